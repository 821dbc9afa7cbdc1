/** One ZeroMQ connection: HELLO and WELCOME, heartbeats, credit. Knows nothing of jobs. */

import { Dealer } from "zeromq";
import { TokenbusError, fromWire } from "./errors.js";
import { DEFAULT_LIMITS, MessageType, decode, encode, type Limits, type Message } from "./protocol.js";
import type { Body } from "./msgpack.js";

const LIVENESS = 3;
const INCOMING: Limits = { ...DEFAULT_LIMITS, maxBodyBytes: 16 << 20 }; // our credit bounds what comes

export interface CurveKeys {
  serverKey: string;
  publicKey: string;
  secretKey: string;
}

export interface SessionEvents {
  onWelcome(body: Body): void;
  onMessage(message: Message): void;
  onLost(error: TokenbusError): void;
}

export class Session {
  #socket: Dealer;
  #queue: Uint8Array[][] = [];
  #isSending = false;
  #isLive = false;
  #isClosed = false;
  #granted = 0;
  #received = 0;
  #heartbeatMs = 2_000;
  #lastSentMs = performance.now();
  #lastHeardMs = performance.now();
  #helloMs = performance.now();
  #timer: NodeJS.Timeout | undefined;
  #limits = DEFAULT_LIMITS;

  constructor(
    readonly endpoint: string, readonly client: string, readonly tenant: string, readonly credit: number,
    curve: CurveKeys | undefined, readonly events: SessionEvents,
  ) {
    const keys = curve && {
      curveServerKey: curve.serverKey, curvePublicKey: curve.publicKey, curveSecretKey: curve.secretKey,
    };
    this.#socket = new Dealer({
      immediate: true, linger: 500, receiveHighWaterMark: 0, heartbeatInterval: 2_000,
      heartbeatTimeout: 6_000, reconnectInterval: 100, reconnectMaxInterval: 5_000, ...keys,
    });
    this.#socket.connect(endpoint);
  }

  get isLive(): boolean {
    return this.#isLive && !this.#isClosed;
  }

  /** Say HELLO; without WELCOME in time the session is lost. */
  open(timeoutMs: number): void {
    void this.#receive();
    this.#sayHello();
    this.#timer = setTimeout(() => this.#lose(`no worker answers at ${this.endpoint}`), timeoutMs);
  }

  /** Queue one message. Throws `too_large` over the worker's limits. */
  send(type: MessageType, body: Record<string, unknown>, blobs: Uint8Array[] = []): void {
    if (this.#isClosed) return;
    this.#queue.push(encode(type, body, blobs, this.#limits));
    this.#lastSentMs = performance.now();
    if (!this.#isSending) void this.#flush();
  }

  /** Count TOKENS events; grant more when half of the window is used. */
  useCredit(events: number): void {
    this.#received += events;
    if (this.#granted - this.#received >= this.credit / 2) return;
    this.#granted = this.#received + this.credit;
    this.send(MessageType.CREDIT, { total: this.#granted });
  }

  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    clearTimeout(this.#timer);
    this.#socket.close();
  }

  #sayHello(): void {
    this.#isLive = false;
    this.#helloMs = performance.now();
    this.#granted = this.credit;
    this.#received = 0;
    const { client, credit, tenant } = this;
    this.send(MessageType.HELLO, { client, credit, versions: [1], tenant, agent: "tokenbus-node/0.1.0" });
  }

  #lose(reason: string | TokenbusError): void {
    if (this.#isClosed) return;
    this.close();
    this.events.onLost(typeof reason === "string" ? new TokenbusError("unavailable", reason) : reason);
  }

  /** zeromq.js allows one send at a time; it waits while there is no connection. */
  async #flush(): Promise<void> {
    this.#isSending = true;
    try {
      for (let frames = this.#queue.shift(); frames !== undefined; frames = this.#queue.shift()) {
        await this.#socket.send(frames as Buffer[]);
      }
    } catch (error) {
      this.#lose(`cannot send to ${this.endpoint}: ${(error as Error).message}`);
    } finally {
      this.#isSending = false;
    }
  }

  async #receive(): Promise<void> {
    try {
      for await (const frames of this.#socket) this.#onFrames(frames);
    } catch (error) {
      this.#lose(error instanceof TokenbusError ? error : `${this.endpoint}: ${(error as Error).message}`);
    }
  }

  #onFrames(frames: Uint8Array[]): void {
    this.#lastHeardMs = performance.now();
    let message: Message;
    try {
      message = decode(frames, INCOMING);
    } catch (error) {
      if ((error as TokenbusError).code === "unsupported") return; // of a later minor version
      throw new TokenbusError("unavailable", `${this.endpoint} speaks another protocol`, { cause: error });
    }
    const { type, body } = message;
    if (type === MessageType.WELCOME) this.#onWelcome(body);
    else if (type === MessageType.PING) this.send(MessageType.PONG, { t: body["t"] ?? 0 });
    else if (type === MessageType.ERROR && body["job"] === undefined) this.#onOwnError(fromWire(body));
    else if (type !== MessageType.PONG) this.events.onMessage(message);
  }

  #onOwnError(error: TokenbusError): void {
    if (error.code === "no_session") {
      // Several messages may have met a new worker: one HELLO answers them all. But the worker may have died with
      // that HELLO: then the next heartbeat learns it.
      if (this.#isLive || performance.now() - this.#helloMs > this.#heartbeatMs / 2) this.#sayHello();
    } else if (error.code === "version" || !this.#isLive) {
      this.#lose(error);
    }
  }

  #onWelcome(body: Body): void {
    const limits = (body["limits"] ?? {}) as Record<string, unknown>;
    const limit = (name: string, fallback: number): number =>
      typeof limits[name] === "number" ? (limits[name] as number) : fallback;
    this.#limits = {
      maxBodyBytes: limit("max_body_bytes", DEFAULT_LIMITS.maxBodyBytes),
      maxFrameBytes: limit("max_frame_bytes", DEFAULT_LIMITS.maxFrameBytes),
      maxBlobs: limit("max_blobs", DEFAULT_LIMITS.maxBlobs),
    };
    if (typeof body["heartbeat_ms"] === "number" && body["heartbeat_ms"] > 0) this.#heartbeatMs = body["heartbeat_ms"];
    this.#isLive = true;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#onHeartbeat(), this.#heartbeatMs / 2);
    this.events.onWelcome(body);
  }

  #onHeartbeat(): void {
    const now = performance.now();
    if (now - this.#lastHeardMs > LIVENESS * this.#heartbeatMs) {
      this.#lose(`the worker at ${this.endpoint} went silent`);
      return;
    }
    if (now - this.#lastSentMs >= this.#heartbeatMs * 0.9) this.send(MessageType.PING, { t: Math.floor(now) });
    this.#timer = setTimeout(() => this.#onHeartbeat(), this.#heartbeatMs / 2);
  }
}
