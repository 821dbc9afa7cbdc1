/** One interface over both doors. */

import { randomUUID } from "node:crypto";
import type { Door } from "./door.js";
import { TokenbusError } from "./errors.js";
import { RedisDoor } from "./redis.js";
import type { CurveKeys } from "./session.js";
import { JobStream } from "./stream.js";
import { DEFAULT_TIMEOUTS, toFields, type JobOptions, type JobStatus, type Timeouts } from "./types.js";
import { ZmqDoor } from "./zmq.js";

export interface ClientOptions {
  /** Endpoint of a worker. Give this or `redis`; with neither, `tcp://127.0.0.1:5555`. */
  zmq?: string;
  /** URL of a Redis server. */
  redis?: string;
  /** Queue in Redis. */
  queue?: string;
  /** Tenant of jobs that name none. */
  tenant?: string;
  timeouts?: Partial<Timeouts>;
  /** CURVE keys (Z85), where the worker asks for them. */
  curve?: CurveKeys;
  /** TOKENS events in flight over ZeroMQ. */
  credit?: number;
}

/**
 * Jobs and their tokens over one door; any number at once.
 *
 *     const client = new Client({ redis: "redis://localhost" });
 *     for await (const token of client.generate({ prompt: "The sea is", maxTokens: 16 })) {
 *       process.stdout.write(token.text);
 *     }
 *     await client.close();
 */
export class Client implements AsyncDisposable {
  readonly #options: ClientOptions;
  #door: Door | undefined;
  #isClosed = false;

  constructor(options: ClientOptions = {}) {
    if (options.zmq !== undefined && options.redis !== undefined) {
      throw new TokenbusError("invalid", "zmq and redis: give one of them", { field: "redis" });
    }
    this.#options = options;
  }

  /** Submit a job and stream its tokens. It is sent when the stream is first read. */
  generate(options: JobOptions): JobStream {
    const fields = toFields({ ...options, job: options.job ?? randomUUID() });
    const stream = new JobStream(fields.job);
    stream.onFirstRead = () => this.#start(stream, (door) => door.open(stream, fields));
    stream.onAbandon = () => this.#door?.abandon(stream, true);
    return stream;
  }

  /** Stream a job's tokens after `fromSeq`, wherever it was submitted, then live. */
  tail(job: string, fromSeq = 0): JobStream {
    const stream = new JobStream(job, fromSeq);
    stream.onFirstRead = () => this.#start(stream, (door) => door.tail(stream, fromSeq));
    stream.onAbandon = () => this.#door?.abandon(stream, false);
    return stream;
  }

  /** Submit a job, wait until it was taken, and return its id. */
  async submit(options: JobOptions): Promise<string> {
    const stream = this.generate(options);
    try {
      await stream.accepted();
    } finally {
      this.#door?.abandon(stream, false);
    }
    return stream.job;
  }

  /** End a job; its stream gets `done` with reason `cancelled`. */
  async cancel(job: string): Promise<void> {
    await this.#opened().cancel(job);
  }

  /** Where a job stands. Throws `not_found`. */
  async status(job: string): Promise<JobStatus> {
    return this.#opened().status(job);
  }

  /** Free the connections; open streams end with `unavailable`. */
  async close(): Promise<void> {
    this.#isClosed = true;
    await this.#door?.close();
    this.#door = undefined;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  #start(stream: JobStream, begin: (door: Door) => Promise<void>): void {
    const failed = (error: unknown): void =>
      stream.fail(error instanceof TokenbusError ? error : new TokenbusError("internal", String(error), { cause: error }));
    try {
      begin(this.#opened()).catch(failed);
    } catch (error) {
      failed(error);
    }
  }

  #opened(): Door {
    if (this.#isClosed) throw new TokenbusError("unavailable", "the client is closed");
    if (this.#door === undefined) {
      const { zmq = "tcp://127.0.0.1:5555", redis, queue = "default", tenant = "", credit = 4_096, curve } = this.#options;
      const timeouts = { ...DEFAULT_TIMEOUTS, ...this.#options.timeouts };
      this.#door = redis === undefined
        ? new ZmqDoor(zmq, timeouts, tenant, credit, curve)
        : new RedisDoor(redis, queue, timeouts, tenant);
    }
    return this.#door;
  }
}
