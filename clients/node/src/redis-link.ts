/** A connection to Redis that is made anew when it breaks, with bounded retries. */

import { ErrorReply, createClient } from "redis";
import { Backoff, sleep } from "./door.js";
import { TokenbusError } from "./errors.js";

const ATTEMPTS = 4;

export type Reply = null | number | string | Reply[];
type Client = ReturnType<typeof connect>;

function connect(url: string, connectMs: number) {
  const socket = { connectTimeout: connectMs, reconnectStrategy: false as const };
  const client = createClient({ url, RESP: 2, disableOfflineQueue: true, socket });
  client.on("error", () => {}); // every command rejects with it
  return client;
}

/** One connection that is made anew when it breaks, and whose commands can be repeated. */
export class Link {
  #client: Client | undefined;
  #opening: Promise<unknown> | undefined;

  constructor(readonly url: string, readonly timeoutMs: number, readonly connectMs: number) {}

  /** Run a command that may safely run twice. Throws `unavailable` or `internal`. */
  async call(args: string[], attempts = ATTEMPTS): Promise<Reply> {
    const backoff = new Backoff(50, 1_000);
    for (let left = attempts; ; ) {
      try {
        return await this.once(args);
      } catch (error) {
        left -= 1;
        const isRefusal = error instanceof ErrorReply && !isPassing(error);
        if (isRefusal || left <= 0) throw typed(error as Error, isRefusal);
      }
      await sleep(backoff.next());
    }
  }

  /** Run a command once. After anything but a reply the connection is dropped: a late reply must not meet the next command. */
  async once(args: string[]): Promise<Reply> {
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<never>((_, reject) => {
      timer = setTimeout(() => reject(new Error(`no reply within ${this.timeoutMs} ms`)), this.timeoutMs);
    });
    try {
      return await Promise.race([this.#send(args), late]);
    } catch (error) {
      if (!(error instanceof ErrorReply)) this.drop();
      throw error;
    } finally {
      clearTimeout(timer);
    }
  }

  async #send(args: string[]): Promise<Reply> {
    if (this.#client === undefined || !this.#client.isOpen) {
      this.#client = connect(this.url, this.connectMs);
      this.#opening = this.#client.connect();
    }
    const client = this.#client;
    await this.#opening;
    return (await client.sendCommand(args)) as Reply;
  }

  drop(): void {
    const client = this.#client;
    this.#client = undefined;
    if (client?.isOpen) client.destroy();
  }

  get isConnected(): boolean {
    return this.#client?.isReady === true;
  }
}

function isPassing(error: Error): boolean {
  return /^(LOADING|READONLY|CLUSTERDOWN|TRYAGAIN|MASTERDOWN|UNBLOCKED)/.test(error.message);
}

/** The error of a command as ours; isRefusal: the server answered. */
export function typed(error: Error, isRefusal: boolean): TokenbusError {
  if (error instanceof TokenbusError) return error;
  const isAway = !isRefusal || /^(MISCONF|OOM|NOAUTH|WRONGPASS)/.test(error.message);
  return new TokenbusError(isAway ? "unavailable" : "internal", `Redis: ${error.message}`, { cause: error });
}
