/** What the client asks of a door. */

import type { JobStream } from "./stream.js";
import type { JobStatus } from "./types.js";

export type Fields = Record<string, unknown> & { job: string };

export interface Door {
  /** Send a job and feed the stream. */
  open(stream: JobStream, fields: Fields): Promise<void>;
  /** Feed the stream with what the job has after `after`, then live. */
  tail(stream: JobStream, after: number): Promise<void>;
  /** Stop feeding; with `cancel`, end the job too. */
  abandon(stream: JobStream, cancel: boolean): void;
  cancel(job: string): Promise<void>;
  status(job: string): Promise<JobStatus>;
  close(): Promise<void>;
}

/** 100, 200, 400 ... ms up to a limit, each within 25 %. */
export class Backoff {
  #nextMs: number;

  constructor(readonly firstMs = 100, readonly limitMs = 10_000) {
    this.#nextMs = firstMs;
  }

  next(): number {
    const wait = this.#nextMs * (0.75 + Math.random() / 2);
    this.#nextMs = Math.min(this.#nextMs * 2, this.limitMs);
    return wait;
  }

  reset(): void {
    this.#nextMs = this.firstMs;
  }
}

export const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));
