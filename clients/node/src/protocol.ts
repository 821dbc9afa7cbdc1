/** Frames of the ZeroMQ door, docs/PROTOCOL.md section 5.1, and the checksum of section 2. */

import { crc32 } from "node:zlib";
import { TokenbusError } from "./errors.js";
import { pack, unpack, type Body } from "./msgpack.js";

export const MAJOR = 1;

export const MessageType = {
  HELLO: 1, WELCOME: 2, SUBMIT: 3, ACCEPTED: 4, REJECTED: 5, TOKENS: 6, DONE: 7, ERROR: 8,
  CANCEL: 9, RESUME: 10, CREDIT: 11, PING: 12, PONG: 13, STATS: 14, DRAIN: 15,
} as const;
export type MessageType = (typeof MessageType)[keyof typeof MessageType];

export interface Limits {
  maxBodyBytes: number;
  maxFrameBytes: number;
  maxBlobs: number;
}

export const DEFAULT_LIMITS: Limits = { maxBodyBytes: 1 << 20, maxFrameBytes: 16 << 20, maxBlobs: 4 };

export interface Message {
  type: MessageType;
  body: Body;
  blobs: Uint8Array[];
}

const TYPES = new Set<number>(Object.values(MessageType));

/** Frames of one message. Throws `too_large` over a limit, `bad_frame` for a body outside the subset. */
export function encode(
  type: MessageType, body: Record<string, unknown>, blobs: Uint8Array[] = [], limits = DEFAULT_LIMITS,
): Uint8Array[] {
  const packed = pack(body);
  checkSizes(packed, blobs, limits);
  return [Uint8Array.of(0x54, 0x42, MAJOR, type), packed, ...blobs];
}

/** Check and decode one message. Throws `bad_frame`, `version`, `too_large` or `unsupported`. */
export function decode(frames: Uint8Array[], limits = DEFAULT_LIMITS): Message {
  const [head, body, ...blobs] = frames;
  if (head === undefined || body === undefined) throw new TokenbusError("bad_frame", "expected two frames");
  if (head.length !== 4 || head[0] !== 0x54 || head[1] !== 0x42) {
    throw new TokenbusError("bad_frame", "head frame is not T B <major> <type>");
  }
  if (head[2] !== MAJOR) throw new TokenbusError("version", `peer speaks major version ${head[2]}`);
  checkSizes(body, blobs, limits);
  const type = head[3] as number;
  if (!TYPES.has(type)) throw new TokenbusError("unsupported", `unknown message type ${type}`);
  return { type: type as MessageType, body: unpack(body), blobs };
}

function checkSizes(body: Uint8Array, blobs: Uint8Array[], limits: Limits): void {
  if (body.length > limits.maxBodyBytes) {
    throw new TokenbusError("too_large", `body has ${body.length} bytes, the limit is ${limits.maxBodyBytes}`);
  }
  if (blobs.length > limits.maxBlobs) {
    throw new TokenbusError("too_large", `${blobs.length} blobs, the limit is ${limits.maxBlobs}`);
  }
  const large = blobs.find((blob) => blob.length > limits.maxFrameBytes);
  if (large) {
    throw new TokenbusError("too_large", `a blob has ${large.length} bytes, the limit is ${limits.maxFrameBytes}`);
  }
}

/** Token ids as little-endian int32. */
export function packIds(ids: readonly number[]): Uint8Array {
  const bytes = Buffer.alloc(4 * ids.length);
  ids.forEach((id, index) => bytes.writeInt32LE(id, 4 * index));
  return bytes;
}

/** CRC-32 of ids as little-endian int32; `before`: crc of the ids in front of them. */
export function crc32OfIds(ids: readonly number[], before = 0): number {
  return crc32(packIds(ids), before);
}
