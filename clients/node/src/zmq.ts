/** The ZeroMQ door: many jobs over one connection, carried across reconnects and restarts of the worker. */

import { randomUUID } from "node:crypto";
import { Backoff, sleep, type Door, type Fields } from "./door.js";
import { TokenbusError, fromWire } from "./errors.js";
import { MessageType, type Message } from "./protocol.js";
import { Session, type CurveKeys } from "./session.js";
import type { JobStream } from "./stream.js";
import type { JobStatus, Timeouts } from "./types.js";
import {
  acceptedOf, dropTimer, forgetHole, newFollowed, onBusy, rejectedOf, RESUME_AGAIN_MS, submitMessage, toDone, toStarted,
  toStatus, toToken,
  type Followed,
} from "./zmq-job.js";
import { Questions } from "./zmq-questions.js";
import type { Body } from "./msgpack.js";

const GREETING_MS = 5_000;
const MAX_RESUMES = 5; // without a new token in between

export class ZmqDoor implements Door {
  readonly #client = `js-${randomUUID()}`;
  readonly #jobs = new Map<string, Followed[]>();
  readonly #questions: Questions;
  readonly #left = new Set<string>(); // to be cancelled, but there was no session
  #session: Session | undefined;
  #boot = "";
  #worker = "";
  #isClosed = false;
  #fatal: TokenbusError | undefined;
  #onLive: (() => void)[] = [];
  readonly #ticker: NodeJS.Timeout;
  readonly #running: Promise<void>;
  #stop: () => void = () => {};

  constructor(
    readonly endpoint: string, readonly timeouts: Timeouts, readonly tenant: string, readonly credit: number,
    readonly curve: CurveKeys | undefined,
  ) {
    this.#questions = new Questions(endpoint, timeouts.answerMs, (type, body) => this.#send(type, body));
    this.#running = this.#keepConnected();
    this.#ticker = setInterval(() => this.#tick(), RESUME_AGAIN_MS);
    this.#ticker.unref();
  }

  async open(stream: JobStream, fields: Fields): Promise<void> {
    await this.#connected();
    const followed = this.#follow(stream, fields);
    this.#left.delete(stream.job);
    try {
      this.#submit(followed);
    } catch (error) {
      this.#forget(stream);
      throw error;
    }
  }

  async tail(stream: JobStream, _after: number): Promise<void> {
    await this.#connected();
    this.#resume(this.#follow(stream, undefined));
  }

  abandon(stream: JobStream, cancel: boolean): void {
    const wasFollowed = this.#forget(stream);
    if (!wasFollowed || !cancel || stream.isOver) return;
    stream.fail(new TokenbusError("unavailable", "the stream was closed"));
    if (this.#session?.isLive) this.#send(MessageType.CANCEL, { job: stream.job });
    else this.#left.add(stream.job);
  }

  /** Returns when the job has ended. */
  async cancel(job: string): Promise<void> {
    await this.#connected();
    await this.#questions.ask("cancel", job);
  }

  async status(job: string): Promise<JobStatus> {
    await this.#connected();
    return this.#questions.ask("status", job);
  }

  async close(): Promise<void> {
    this.#isClosed = true;
    clearInterval(this.#ticker);
    await new Promise((resolve) => setImmediate(resolve)); // what was queued goes out
    this.#session?.close();
    this.#stop();
    await this.#running;
    this.#failAll(new TokenbusError("unavailable", "the client was closed"));
  }

  // ---------------------------------------------------------------- connection

  async #connected(): Promise<void> {
    if (this.#fatal) throw this.#fatal;
    if (this.#session?.isLive) return;
    let timer: NodeJS.Timeout | undefined;
    await new Promise<void>((resolve, reject) => {
      this.#onLive.push(() => (this.#fatal ? reject(this.#fatal) : resolve()));
      const late = new TokenbusError("unavailable", `no worker answers at ${this.endpoint}`);
      timer = setTimeout(() => reject(late), this.timeouts.connectMs);
    }).finally(() => clearTimeout(timer));
  }

  async #keepConnected(): Promise<void> {
    const backoff = new Backoff();
    let silentSinceMs = performance.now();
    while (!this.#isClosed && !this.#fatal) {
      let wasLive = false;
      const error = await new Promise<TokenbusError | undefined>((resolve) => {
        this.#stop = () => resolve(undefined);
        const session = new Session(this.endpoint, this.#client, this.tenant, this.credit, this.curve, {
          onWelcome: (body) => {
            wasLive = true;
            this.#onWelcome(body);
          },
          onMessage: (message) => this.#onMessage(message),
          onLost: resolve,
        });
        this.#session = session;
        session.open(Math.min(GREETING_MS, this.timeouts.connectMs));
      });
      this.#session = undefined;
      if (error === undefined) return;
      if (wasLive) {
        backoff.reset();
        silentSinceMs = performance.now();
      }
      if (error.code === "version") {
        this.#fatal = error;
        this.#wakeAll();
      }
      if (this.#fatal || performance.now() - silentSinceMs > this.timeouts.giveUpMs) this.#failAll(error);
      await Promise.race([sleep(backoff.next()), new Promise<void>((resolve) => (this.#stop = resolve))]);
    }
  }

  #onWelcome(body: Body): void {
    const isSameWorker = body["boot"] === this.#boot;
    this.#boot = String(body["boot"]);
    this.#worker = String(body["worker"]);
    for (const followed of [...this.#jobs.values()].flat()) this.#pickUp(followed, isSameWorker);
    for (const job of this.#left) this.#send(MessageType.CANCEL, { job });
    this.#left.clear();
    this.#questions.repeat();
    this.#wakeAll();
  }

  #wakeAll(): void {
    for (const wake of this.#onLive.splice(0)) wake();
  }

  /** Without a session nothing is sent: the next WELCOME picks every job up again. */
  #send(type: MessageType, body: Record<string, unknown>, blobs: Uint8Array[] = []): void {
    if (this.#session?.isLive) this.#session.send(type, body, blobs);
  }

  // ---------------------------------------------------------------- jobs

  #follow(stream: JobStream, fields: Fields | undefined): Followed {
    const followed = newFollowed(stream, fields);
    this.#jobs.set(stream.job, [...(this.#jobs.get(stream.job) ?? []), followed]);
    return followed;
  }

  #forget(stream: JobStream): boolean {
    const row = this.#jobs.get(stream.job) ?? [];
    const rest = row.filter((followed) => followed.stream !== stream);
    for (const followed of row) if (!rest.includes(followed)) dropTimer(followed);
    if (rest.length > 0) this.#jobs.set(stream.job, rest);
    else this.#jobs.delete(stream.job);
    return rest.length < row.length;
  }

  #submit(followed: Followed): void {
    followed.isAsked = true;
    this.#send(MessageType.SUBMIT, ...submitMessage(followed));
  }

  /** A job that waits has nothing to send: RESUME is repeated where a hole is known (and at last given up) or refused. */
  #resume(followed: Followed): void {
    const now = performance.now();
    if (followed.isResuming && now - followed.resumedMs < RESUME_AGAIN_MS) return;
    const { stream } = followed;
    if (followed.resumes >= MAX_RESUMES) {
      stream.fail(new TokenbusError("protocol", `the worker does not resend what follows seq ${stream.assembler.last}`));
      return;
    }
    if (followed.hasHole) followed.resumes += 1;
    followed.isResuming = true;
    dropTimer(followed);
    followed.resumedMs = now;
    this.#send(MessageType.RESUME, { job: stream.job, after: stream.assembler.last });
  }

  #onHole(followed: Followed): void {
    followed.hasHole = true;
    this.#resume(followed);
  }

  #pickUp(followed: Followed, isSameWorker: boolean): void {
    forgetHole(followed);
    followed.wasUnknown = false;
    const { fields, isAsked } = followed;
    const isKnown = isSameWorker || fields?.["durable"] === true;
    if (fields === undefined || (isKnown && !isAsked)) this.#resume(followed);
    else this.#submitAgain(followed);
  }

  #submitAgain(followed: Followed): void {
    try {
      this.#submit(followed);
    } catch (error) {
      followed.stream.fail(error as TokenbusError); // this worker's limits are lower
    }
  }

  /** The worker has forgotten the job, or did not know it yet. isUnwanted: somebody wants it cancelled. */
  #onUnknown(followed: Followed, error: TokenbusError, isUnwanted: boolean): void {
    if (followed.isAsked) return; // it did not know the job before it read SUBMIT
    const { fields, isResuming, stream, wasUnknown } = followed;
    if (!isResuming || fields === undefined || fields["durable"] === true || isUnwanted || wasUnknown) {
      stream.fail(error);
      return;
    }
    followed.wasUnknown = true;
    forgetHole(followed);
    this.#submitAgain(followed);
  }

  #tick(): void {
    for (const followed of [...this.#jobs.values()].flat()) {
      if (followed.hasHole && followed.asksAgain === undefined) this.#resume(followed);
      if (followed.stream.isOver) this.#forget(followed.stream);
    }
  }

  #failAll(error: TokenbusError): void {
    for (const followed of [...this.#jobs.values()].flat()) followed.stream.fail(error);
    this.#jobs.clear();
    this.#questions.failAll(error);
  }

  // ---------------------------------------------------------------- messages

  #onMessage({ type, body }: Message): void {
    const job = String(body["job"] ?? "");
    const row = this.#jobs.get(job) ?? [];
    if (type === MessageType.TOKENS) this.#onTokens(body["events"]);
    else if (type === MessageType.ACCEPTED) for (const followed of acceptedOf(row)) this.#onAccepted(followed, body);
    else if (type === MessageType.REJECTED) this.#onRejected(row, fromWire(body));
    else if (type === MessageType.DONE) this.#onDone(row, body);
    else if (type === MessageType.ERROR) this.#onError(row, job, body);
    else if (type === MessageType.STATS && job !== "") this.#questions.answer("status", toStatus(body));
    for (const followed of row) if (followed.stream.isOver) this.#forget(followed.stream);
  }

  #onTokens(events: unknown): void {
    if (!Array.isArray(events)) throw new TokenbusError("bad_frame", "TOKENS without events");
    for (const event of events) {
      const [job, token] = toToken(event);
      for (const followed of this.#jobs.get(job) ?? []) {
        const verdict = followed.stream.onToken(token);
        if (verdict === "new") forgetHole(followed);
        else if (verdict === "hole") this.#onHole(followed);
      }
    }
    this.#session?.useCredit(events.length);
  }

  #onAccepted(followed: Followed, body: Body): void {
    followed.isAsked = false;
    followed.seed = Number(body["seed"]);
    followed.stream.onStarted(toStarted(body, this.#worker));
  }

  #onRejected(row: Followed[], error: TokenbusError): void {
    const lost = new TokenbusError("engine_lost", "the worker was restarted and cannot continue the job");
    for (const followed of rejectedOf(row, error)) {
      followed.isAsked = false;
      followed.stream.fail(error.field.startsWith("have") ? lost : error);
    }
  }

  #onDone(row: Followed[], body: Body): void {
    const done = toDone(body);
    for (const followed of row) {
      const verdict = followed.stream.onDone(done, String(body["text"] ?? ""), Number(body["attempt"] ?? 1));
      if (verdict === "hole") this.#onHole(followed);
    }
    this.#questions.answer("cancel", { ...toStatus(body), state: "done" });
  }

  #onError(row: Followed[], job: string, body: Body): void {
    const error = fromWire(body);
    const isBusy = error.code === "busy" && body["attempt"] === undefined; // the job is as it was
    const isUnwanted = this.#questions.isCancelling(job);
    if (isBusy || error.code === "not_found") this.#questions.refuse(job, error);
    else if (error.code !== "gone") { // that is about a RESUME
      this.#questions.answer("cancel", { ...toStatus(body), state: "failed" });
    }
    for (const followed of row) {
      if (isBusy) onBusy(followed, error.retryMs, () => this.#resume(followed));
      else if (error.code === "not_found") this.#onUnknown(followed, error, isUnwanted);
      else if (followed.isResuming || error.code !== "gone") followed.stream.fail(error);
    }
  }
}
