/** CANCEL and STATS of a ZeroMQ connection that wait for the worker's word. */

import { TokenbusError } from "./errors.js";
import { MessageType } from "./protocol.js";
import type { JobStatus } from "./types.js";

const TYPES = { cancel: MessageType.CANCEL, status: MessageType.STATS };

type Kind = keyof typeof TYPES;

interface Waiter {
  kind: Kind;
  job: string;
  resolve: (status: JobStatus) => void;
  reject: (error: TokenbusError) => void;
}

export class Questions {
  readonly #waiters = new Set<Waiter>();

  constructor(
    readonly endpoint: string, readonly answerMs: number,
    readonly send: (type: MessageType, body: Record<string, unknown>) => void,
  ) {}

  /** Throws `unavailable` where no answer comes in time. */
  ask(kind: Kind, job: string): Promise<JobStatus> {
    return new Promise((resolve, reject) => {
      const waiter: Waiter = { kind, job, resolve, reject };
      this.#waiters.add(waiter);
      const late = new TokenbusError("unavailable", `${this.endpoint} did not answer in time`);
      setTimeout(() => this.#settle(waiter, () => reject(late)), this.answerMs).unref();
      this.send(TYPES[kind], { job });
    });
  }

  /** Over a new connection: what was asked over the last one is lost. */
  repeat(): void {
    for (const { kind, job } of this.#waiters) this.send(TYPES[kind], { job });
  }

  answer(kind: Kind, status: JobStatus): void {
    for (const waiter of this.#waiters) {
      if (waiter.kind === kind && waiter.job === status.job) this.#settle(waiter, () => waiter.resolve(status));
    }
  }

  /** The worker does not answer what is asked about this job. */
  refuse(job: string, error: TokenbusError): void {
    for (const waiter of this.#waiters) if (waiter.job === job) this.#settle(waiter, () => waiter.reject(error));
  }

  /** Whether somebody wants the job cancelled. */
  isCancelling(job: string): boolean {
    return [...this.#waiters].some((waiter) => waiter.kind === "cancel" && waiter.job === job);
  }

  failAll(error: TokenbusError): void {
    for (const waiter of this.#waiters) waiter.reject(error);
    this.#waiters.clear();
  }

  #settle(waiter: Waiter, end: () => void): void {
    if (this.#waiters.delete(waiter)) end();
  }
}
