/** The tokens of one job: in order, each once, with the checksum compared at the end. */

import { TokenbusError } from "./errors.js";
import { crc32OfIds } from "./protocol.js";
import type { Done, Started, Token } from "./types.js";

/** `hole`: tokens are missing before this event; it was dropped. */
export type Verdict = "new" | "repeat" | "hole";

/** Section 6 of docs/PROTOCOL.md as state: no I/O. */
export class Assembler {
  last: number;
  readonly ids: number[] = [];
  #crc = 0;
  #isFresh = true;
  readonly #checksCrc: boolean;

  /** after: seq that the reader starts behind; the crc cannot be checked then. */
  constructor(after = 0) {
    this.last = after;
    this.#checksCrc = after === 0;
  }

  take(token: Token): Verdict {
    const lastSeq = token.seq + token.ids.length - 1;
    if (lastSeq <= this.last) return "repeat";
    if (token.seq > this.last + 1 || (token.seq <= this.last && !this.#isFresh)) return "hole";
    this.#isFresh = false;
    this.last = lastSeq;
    for (const id of token.ids) this.ids.push(id);
    this.#crc = crc32OfIds(token.ids, this.#crc);
    return "new";
  }

  finish(done: Done): Verdict {
    if (done.seq > this.last) return "hole";
    if (done.seq < this.last) {
      throw new TokenbusError("protocol", `the job ended at seq ${done.seq}, but ${this.last} tokens came`);
    }
    if (this.#checksCrc && done.crc !== this.#crc) {
      throw new TokenbusError("protocol", `crc of ${this.last} tokens is ${this.#crc}, told ${done.crc}`);
    }
    return "new";
  }
}

/** A job as its door sees it, and as its reader does: an async iterable of tokens. One reader. */
export class JobStream implements AsyncIterable<Token> {
  readonly job: string;
  /** @internal */ readonly assembler: Assembler;
  /** @internal */ onAbandon: () => void = () => {};
  /** @internal */ onFirstRead: () => void = () => {};
  #started: Started | undefined;
  #done: Done | undefined;
  #error: TokenbusError | undefined;
  #pending: Token[] = [];
  #wake: () => void = () => {};
  #isOpened = false;
  #accepted: Promise<void>;
  #accept!: () => void;
  #refuse!: (error: TokenbusError) => void;

  /** @internal */
  constructor(job: string, after = 0) {
    this.job = job;
    this.assembler = new Assembler(after);
    this.#accepted = new Promise((resolve, reject) => {
      this.#accept = resolve;
      this.#refuse = reject;
    });
    this.#accepted.catch(() => {}); // the iteration throws it too
  }

  /** Reason, usage and crc once the job has ended well. */
  get done(): Done | undefined {
    return this.#done;
  }

  /** Worker, seed and prompt length of the attempt that runs or ran the job. */
  get started(): Started | undefined {
    return this.#started;
  }

  /** Whether nothing more will come. */
  get isOver(): boolean {
    return this.#done !== undefined || this.#error !== undefined;
  }

  /** Submit the job if need be, and wait until it was taken. */
  async accepted(): Promise<void> {
    this.#open();
    await this.#accepted;
  }

  /** Everything from here to the end. */
  async text(): Promise<string> {
    let text = "";
    for await (const token of this) text += token.text;
    return text;
  }

  /** Leaving the loop early cancels a job of `generate`; after `tail` the job goes on. */
  async *[Symbol.asyncIterator](): AsyncGenerator<Token, void, undefined> {
    this.#open();
    try {
      for (;;) {
        const token = this.#pending.shift();
        if (token !== undefined) yield token;
        else if (this.#error !== undefined) throw this.#error;
        else if (this.#done !== undefined) return;
        else await new Promise<void>((resolve) => (this.#wake = resolve));
      }
    } finally {
      if (!this.isOver) this.onAbandon();
    }
  }

  /** @internal */
  onStarted(started: Started): void {
    this.#started = started;
    this.#accept();
  }

  /** @internal */
  onAccepted(): void {
    this.#accept();
  }

  /** @internal */
  onToken(token: Token): Verdict {
    if (this.isOver) return "repeat";
    const verdict = this.assembler.take(token);
    if (verdict === "new") this.#push(token);
    return verdict;
  }

  /** @internal */
  onDone(done: Done, text: string, attempt: number): Verdict {
    if (this.isOver) return "repeat";
    try {
      if (this.assembler.finish(done) === "hole") return "hole";
    } catch (error) {
      this.fail(error as TokenbusError);
      return "new";
    }
    if (text !== "") this.#push({ seq: done.seq + 1, ids: [], text, attempt });
    this.#done = done;
    this.#accept();
    this.#wake();
    return "new";
  }

  /** @internal */
  fail(error: TokenbusError): void {
    if (this.isOver) return;
    this.#error = error;
    this.#refuse(error);
    this.#wake();
  }

  #push(token: Token): void {
    this.#pending.push(token);
    this.#wake();
  }

  #open(): void {
    if (this.#isOpened) return;
    this.#isOpened = true;
    this.onFirstRead();
  }
}
