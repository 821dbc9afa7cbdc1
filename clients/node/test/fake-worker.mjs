// A ROUTER that a test scripts message by message.
import assert from "node:assert/strict";
import { setTimeout } from "node:timers/promises";
import { Router } from "zeromq";
import { MessageType as T, crc32OfIds, decode, encode } from "../dist/index.js";

export class FakeWorker {
  hellos = [];
  greets = true;
  credits = [];
  resumes = 0;
  #greeted = new Set();
  #peer = Buffer.alloc(0);

  constructor({ boot = "boot-1", heartbeatMs = 2_000 } = {}) {
    Object.assign(this, { boot, heartbeatMs });
    this.socket = new Router({ linger: 0, receiveTimeout: 10_000 });
  }

  /** The port of a worker that was just closed is free a moment later: libzmq closes behind our back. */
  async bind(address = "tcp://127.0.0.1:*") {
    for (let tries = 1; ; tries++) {
      try {
        await this.socket.bind(address);
        break;
      } catch (error) {
        if (error.code !== "EADDRINUSE" || tries === 200) throw error;
        await setTimeout(25);
      }
    }
    this.endpoint = this.socket.lastEndpoint;
    return this;
  }

  close() {
    if (!this.socket.closed) this.socket.close();
  }

  async receive() {
    const [peer, ...frames] = await this.socket.receive();
    this.#peer = peer;
    return decode(frames);
  }

  async expect(type) {
    for (;;) {
      const message = await this.receive();
      if (message.type === T.HELLO) {
        this.hellos.push(message.body);
        if (this.greets) await this.welcome();
      } else if (!this.#greeted.has(this.#peer.toString("hex"))) {
        await this.send(T.ERROR, { code: "no_session", message: "say HELLO", retry: true });
        continue;
      } else if (message.type === T.PING) await this.send(T.PONG, { t: message.body.t });
      else if (message.type === T.CREDIT) this.credits.push(message.body.total);
      else if (message.type === T.RESUME) this.resumes += 1;
      if (message.type === type) return message;
    }
  }

  async welcome() {
    this.#greeted.add(this.#peer.toString("hex"));
    const limits = { max_body_bytes: 1 << 20, max_frame_bytes: 16 << 20, max_blobs: 4 };
    await this.send(T.WELCOME, {
      version: 1, worker: "fake", boot: this.boot, queue: "default", models: ["m"],
      heartbeat_ms: this.heartbeatMs, retain_ms: 60_000, limits,
    });
  }

  /** Returns when the client has everything that was sent. */
  async settle() {
    await this.send(T.PING, { t: 1 });
    await this.expect(T.PONG);
  }

  async send(type, body) {
    await this.socket.send([this.#peer, ...encode(type, body)]);
  }

  accept(job, seed = 7, seq = 0) {
    return this.send(T.ACCEPTED, { job, attempt: 1, seed, prompt_tokens: 3, seq, queue_position: 0 });
  }

  tokens(...events) {
    return this.send(T.TOKENS, { events: events.map(([job, seq, ids, text]) => [job, 1, seq, ids, text]) });
  }

  done(job, ids, { text = "", reason = "stop", crc = crc32OfIds(ids) } = {}) {
    const usage = { prompt_tokens: 3, completion_tokens: ids.length, cached_tokens: 0, queue_ms: 0, ttft_ms: 1.5, total_ms: 2 };
    return this.send(T.DONE, { job, attempt: 1, seq: ids.length, reason, text, usage, crc });
  }
}

/** A worker and a client for one test. */
export async function withWorker(test, { boot, heartbeatMs, ...clientOptions } = {}) {
  const { Client } = await import("../dist/index.js");
  const worker = await new FakeWorker({ boot, heartbeatMs }).bind();
  const client = new Client({ zmq: worker.endpoint, timeouts: { connectMs: 5_000, answerMs: 5_000, giveUpMs: 5_000 }, ...clientOptions });
  try {
    await test(worker, client);
  } finally {
    await client.close();
    worker.close();
  }
}

export { T, assert };
