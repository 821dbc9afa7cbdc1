/** The Redis door: jobs by XADD, tokens by one XREAD loop over every job that is followed. */

import { ErrorReply } from "redis";
import { Backoff, sleep, type Door, type Fields } from "./door.js";
import { TokenbusError, fromWire } from "./errors.js";
import { Link, typed } from "./redis-link.js";
import type { JobStream } from "./stream.js";
import { toUsage, type Done, type JobStatus, type Timeouts } from "./types.js";

const BLOCK_MS = 1_000;
const BLOCK_WITHOUT_WAKE_MS = 50; // where CLIENT UNBLOCK is not allowed
const SCAN_ENTRIES = 100_000; // newest entries of each jobs stream that `status` looks through
const PAGE_ENTRIES = 200; // at a time: an entry may have megabytes
const ENTRY_ID = /^\d{1,20}-\d{1,20}$/;

interface Followed {
  cursor: string;
  readFrom: string;
  streams: { stream: JobStream; isOwn: boolean }[];
}

export class RedisDoor implements Door {
  readonly #commands: Link;
  readonly #reads: Link;
  readonly #prefix: string;
  readonly #followed = new Map<string, Followed>();
  #isClosed = false;
  #isReading = false;
  #hasNew = false;
  #canWake = true;
  #clientId: string | undefined;
  #onAdded: () => void = () => {};
  readonly #running: Promise<void>;

  constructor(url: string, queue: string, readonly timeouts: Timeouts, readonly tenant: string) {
    if (!/^[A-Za-z0-9._-]{1,64}$/.test(queue)) {
      throw new TokenbusError("invalid", `queue ${queue} is not 1-64 of A-Z a-z 0-9 . _ -`, { field: "queue" });
    }
    this.#prefix = `tokenbus:{${queue}}:`;
    this.#commands = new Link(url, timeouts.answerMs, timeouts.connectMs);
    this.#reads = new Link(url, BLOCK_MS + 2_000, timeouts.connectMs);
    this.#running = this.#readForever();
  }

  async open(stream: JobStream, { priority = "normal", durable: _, ...fields }: Fields): Promise<void> {
    if (this.tenant !== "" && fields["tenant"] === undefined) fields["tenant"] = this.tenant;
    const key = this.#prefix + (priority === "normal" ? "jobs" : `jobs:${String(priority)}`);
    const flat = Object.entries(fields).flatMap(([name, value]) => [
      name, typeof value === "string" ? (name === "stop" ? JSON.stringify(value) : value) : JSON.stringify(value),
    ]);
    await this.#commands.call(["XADD", key, "*", ...flat]);
    stream.onAccepted();
    this.#follow(stream, true);
  }

  async tail(stream: JobStream, _after: number): Promise<void> {
    this.#follow(stream, false);
  }

  abandon(stream: JobStream, cancel: boolean): void {
    this.#forget(this.#outKey(stream.job), stream);
    if (!cancel || stream.isOver) return;
    stream.fail(new TokenbusError("unavailable", "the stream was closed"));
    this.cancel(stream.job).catch(() => {}); // Redis is away: the job runs to its end
  }

  /** Returns when the wish is in Redis. */
  async cancel(job: string): Promise<void> {
    await this.#commands.call(["SET", `${this.#prefix}cancel:${job}`, "1", "EX", "86400"]);
    await this.#commands.call(["XADD", `${this.#prefix}control`, "MAXLEN", "~", "1000", "*", "op", "cancel", "job", job]);
  }

  /** Throws `unavailable` where the queue is too long to say whether the job is in it. */
  async status(job: string): Promise<JobStatus> {
    const status = await this.#recorded(job);
    if (status !== undefined) return status;
    const isWaiting = await this.#isWaiting(job);
    if (isWaiting === true) return { job, state: "queued", attempt: 0, seq: 0 };
    const later = await this.#recorded(job); // perhaps it was taken meanwhile
    if (later !== undefined) return later;
    if (isWaiting === undefined) {
      const message = `job ${job} is not among the newest ${SCAN_ENTRIES} of the queue; it may wait before them`;
      throw new TokenbusError("unavailable", message);
    }
    throw new TokenbusError("not_found", `job ${job} is not known`, { field: "job" });
  }

  async close(): Promise<void> {
    this.#isClosed = true;
    this.#onAdded();
    this.#reads.drop();
    await this.#running;
    this.#failAll(new TokenbusError("unavailable", "the client was closed"));
    this.#commands.drop();
  }

  /** What workers wrote of the job, if one had it. */
  async #recorded(job: string): Promise<JobStatus | undefined> {
    const fields = toMap((await this.#commands.call(["HGETALL", `${this.#prefix}job:${job}`])) as string[]);
    const { state, reason, code } = fields;
    if (state === undefined) return undefined;
    const isOver = state === "done" || state === "failed";
    const seq = isOver ? Number(fields["completion_tokens"] ?? 0) : await this.#lastSeq(job);
    const status: JobStatus = { job, state, attempt: Number(fields["attempt"] ?? 0), seq };
    return { ...status, ...(reason ? { reason } : {}), ...(code ? { code } : {}) };
  }

  /** Seq of the last token of a job that runs or waits for another attempt. */
  async #lastSeq(job: string): Promise<number> {
    const last = (await this.#newest(this.#outKey(job), "+", "-", 1))[0];
    return last === undefined ? 0 : Number(last[0].slice(last[0].lastIndexOf("-") + 1));
  }

  /** Whether the job is in a jobs stream; undefined if not all of one was looked through. */
  async #isWaiting(job: string): Promise<boolean | undefined> {
    const keys = ["jobs", "jobs:high", "jobs:low"].map((name) => this.#prefix + name);
    if (ENTRY_ID.test(job)) {
      for (const key of keys) if ((await this.#newest(key, job, job, 1)).length > 0) return true;
    }
    let isSure = true;
    for (const key of keys) {
      const isIn = await this.#isIn(key, job);
      if (isIn === true) return true;
      if (isIn === undefined) isSure = false;
    }
    return isSure ? false : undefined;
  }

  async #isIn(key: string, job: string): Promise<boolean | undefined> {
    let newest = "+";
    for (let seen = 0; seen < SCAN_ENTRIES; seen += PAGE_ENTRIES) {
      const entries = await this.#newest(key, newest, "-", PAGE_ENTRIES);
      if (entries.some(([, flat]) => toMap(flat)["job"] === job)) return true;
      const last = entries.at(-1);
      if (last === undefined || entries.length < PAGE_ENTRIES) return false;
      newest = `(${last[0]}`;
    }
    return undefined;
  }

  /** Entries from `newest` back to `oldest`. */
  async #newest(key: string, newest: string, oldest: string, count: number): Promise<[string, string[]][]> {
    const args = ["XREVRANGE", key, newest, oldest, "COUNT", String(count)];
    return (await this.#commands.call(args)) as [string, string[]][];
  }

  #outKey(job: string): string {
    return `${this.#prefix}out:${job}`;
  }

  #follow(stream: JobStream, isOwn: boolean): void {
    const key = this.#outKey(stream.job);
    const followed = this.#followed.get(key) ?? { cursor: "0", readFrom: "", streams: [] };
    followed.streams.push({ stream, isOwn });
    followed.cursor = "0";
    this.#followed.set(key, followed);
    this.#hasNew = true;
    this.#onAdded();
    if (this.#isReading && this.#canWake) void this.#wake();
  }

  #forget(key: string, stream: JobStream): void {
    const followed = this.#followed.get(key);
    if (followed === undefined) return;
    followed.streams = followed.streams.filter((other) => other.stream !== stream);
    if (followed.streams.length === 0) this.#followed.delete(key);
  }

  async #readForever(): Promise<void> {
    const backoff = new Backoff();
    let lostSinceMs: number | undefined;
    while (!this.#isClosed) {
      if (this.#followed.size === 0) {
        await new Promise<void>((resolve) => (this.#onAdded = resolve));
        continue;
      }
      try {
        await this.#readOnce();
        lostSinceMs = undefined;
        backoff.reset();
        continue;
      } catch (error) {
        this.#isReading = false;
        lostSinceMs ??= performance.now();
        if (performance.now() - lostSinceMs > this.timeouts.giveUpMs) this.#failAll(typed(error as Error, false));
      }
      if (!this.#isClosed) await sleep(backoff.next());
    }
  }

  async #readOnce(): Promise<void> {
    if (this.#canWake && !this.#reads.isConnected) await this.#askClientId();
    const keys = [...this.#followed.keys()];
    const cursors = keys.map((key) => {
      const followed = this.#followed.get(key) as Followed;
      return (followed.readFrom = followed.cursor);
    });
    this.#hasNew = false;
    this.#isReading = true;
    const block = String(this.#canWake ? BLOCK_MS : BLOCK_WITHOUT_WAKE_MS);
    const args = ["XREAD", "COUNT", "512", "BLOCK", block, "STREAMS", ...keys, ...cursors];
    let reply: [string, [string, string[]][]][] | null;
    try {
      reply = (await this.#reads.once(args)) as typeof reply;
    } catch (error) {
      this.#isReading = false;
      const isAboutKey = error instanceof ErrorReply && error.message.startsWith("WRONGTYPE");
      if (isAboutKey && (await this.#dropOthers(keys))) return;
      throw error;
    }
    this.#isReading = false;
    for (const [key, entries] of reply ?? []) this.#onEntries(key, entries);
  }

  /** Fail the jobs whose key is no stream: XREAD of all of them is refused for one. Whether there was any. */
  async #dropOthers(keys: string[]): Promise<boolean> {
    let foundAny = false;
    for (const key of keys) {
      const type = String(await this.#reads.once(["TYPE", key]));
      if (type === "stream" || type === "none") continue;
      foundAny = true;
      const streams = this.#followed.get(key)?.streams ?? [];
      this.#followed.delete(key);
      for (const { stream } of streams) stream.fail(new TokenbusError("internal", `Redis: ${key} is no stream but a ${type}`));
    }
    return foundAny;
  }

  async #askClientId(): Promise<void> {
    try {
      this.#clientId = String(await this.#reads.once(["CLIENT", "ID"]));
    } catch (error) {
      if (!(error instanceof ErrorReply)) throw error;
      this.#canWake = false; // not allowed here
    }
  }

  /** Have the loop look at its jobs again, as soon as the server can be told. */
  async #wake(): Promise<void> {
    while (this.#hasNew && this.#isReading && !this.#isClosed && this.#clientId !== undefined) {
      try {
        if ((await this.#commands.call(["CLIENT", "UNBLOCK", this.#clientId], 1)) === 1) return;
      } catch {
        this.#canWake = false; // not allowed, or Redis is away: the loop wakes by itself
        return;
      }
      await sleep(5);
    }
  }

  #onEntries(key: string, entries: [string, string[]][]): void {
    const followed = this.#followed.get(key);
    if (followed === undefined || followed.readFrom !== followed.cursor) return; // a reader came: read again
    for (const [id, flat] of entries) {
      followed.cursor = id;
      for (const { stream } of followed.streams) give(stream, id, toMap(flat));
    }
    for (const { stream } of [...followed.streams]) if (stream.isOver) this.#forget(key, stream);
  }

  #failAll(error: TokenbusError): void {
    for (const { streams } of this.#followed.values()) for (const { stream } of streams) stream.fail(error);
    this.#followed.clear();
  }
}

/** One entry to one reader; an entry that breaks the protocol ends the job for it. */
function give(stream: JobStream, id: string, fields: Record<string, string>): void {
  try {
    const [attempt, seq] = id.split("-").map(Number) as [number, number];
    let verdict = "new";
    if (fields["event"] === "started") {
      const { worker = "", seed, prompt_tokens: promptTokens } = fields;
      stream.onStarted({ attempt, worker, seed: Number(seed), promptTokens: Number(promptTokens) });
    } else if (fields["event"] === "tokens") {
      const ids = JSON.parse(fields["ids"] ?? "") as number[];
      verdict = stream.onToken({ attempt, seq: Number(fields["seq"]), ids, text: fields["text"] ?? "" });
    } else if (fields["event"] === "done") {
      const done: Done = {
        reason: fields["reason"] as Done["reason"], seq: seq - 1, crc: Number(fields["crc"]),
        usage: toUsage(JSON.parse(fields["usage"] ?? "{}")),
      };
      verdict = stream.onDone(done, fields["text"] ?? "", attempt);
    } else if (fields["event"] === "error") {
      const retry = fields["retry"] === undefined ? undefined : fields["retry"] === "true";
      const retryMs = fields["retry_ms"] === undefined ? undefined : Number(fields["retry_ms"]);
      stream.fail(fromWire({ ...fields, retry, retry_ms: retryMs }));
    }
    if (verdict === "hole") throw new Error(`it does not follow seq ${stream.assembler.last}`);
  } catch (cause) {
    stream.fail(new TokenbusError("protocol", `entry ${id} of ${stream.job}: ${(cause as Error).message}`, { cause }));
  }
}

function toMap(flat: string[]): Record<string, string> {
  const map = Object.create(null) as Record<string, string>;
  for (let i = 0; i + 1 < flat.length; i += 2) map[flat[i] as string] = flat[i + 1] as string;
  return map;
}
