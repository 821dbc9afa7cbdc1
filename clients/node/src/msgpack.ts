/**
 * The msgpack subset of the protocol: string keys, safe integers, finite floats, valid UTF-8, no ext
 * types, at most 6 containers inside each other. Anything else is `bad_frame`.
 */

import { TokenbusError } from "./errors.js";

export type Value = null | boolean | number | string | Uint8Array | Value[] | { [key: string]: Value };
export type Body = { [key: string]: Value };

const MAX_KEY_BYTES = 32;
const MAX_DEPTH = 6;
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

function bad(message: string): TokenbusError {
  return new TokenbusError("bad_frame", message);
}

/** Read one map and nothing after it. */
export function unpack(bytes: Uint8Array): Body {
  const reader = new Reader(bytes);
  const value = reader.value(0);
  if (reader.at !== bytes.length) throw bad("bytes after the body");
  if (value === null || typeof value !== "object" || Array.isArray(value) || value instanceof Uint8Array) {
    throw bad("body is not a map");
  }
  return value;
}

class Reader {
  at = 0;
  readonly #view: DataView;

  constructor(readonly bytes: Uint8Array) {
    this.#view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  value(depth: number): Value {
    const tag = this.#view.getUint8(this.#take(1));
    if (tag <= 0x7f) return tag;
    if (tag <= 0x8f) return this.#map(tag & 0x0f, depth);
    if (tag <= 0x9f) return this.#array(tag & 0x0f, depth);
    if (tag <= 0xbf) return this.#text(tag & 0x1f);
    if (tag >= 0xe0) return tag - 0x100;
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return this.#binary(this.#size(tag - 0xc4));
      case 0xca: return finite(this.#view.getFloat32(this.#take(4)));
      case 0xcb: return finite(this.#view.getFloat64(this.#take(8)));
      case 0xcc: return this.#view.getUint8(this.#take(1));
      case 0xcd: return this.#view.getUint16(this.#take(2));
      case 0xce: return this.#view.getUint32(this.#take(4));
      case 0xcf: return safe(this.#view.getBigUint64(this.#take(8)));
      case 0xd0: return this.#view.getInt8(this.#take(1));
      case 0xd1: return this.#view.getInt16(this.#take(2));
      case 0xd2: return this.#view.getInt32(this.#take(4));
      case 0xd3: return safe(this.#view.getBigInt64(this.#take(8)));
      case 0xd9: case 0xda: case 0xdb: return this.#text(this.#size(tag - 0xd9));
      case 0xdc: case 0xdd: return this.#array(this.#size(tag - 0xdc + 1), depth);
      case 0xde: case 0xdf: return this.#map(this.#size(tag - 0xde + 1), depth);
      default: throw bad(`type byte ${tag.toString(16)} is not in the subset`);
    }
  }

  #take(count: number): number {
    const start = this.at;
    if (count > this.bytes.length - start) throw bad("body is cut short");
    this.at = start + count;
    return start;
  }

  /** A length of 1, 2 or 4 bytes, for width 0, 1 or 2. */
  #size(width: number): number {
    if (width === 0) return this.#view.getUint8(this.#take(1));
    return width === 1 ? this.#view.getUint16(this.#take(2)) : this.#view.getUint32(this.#take(4));
  }

  #text(size: number): string {
    const start = this.#take(size);
    try {
      return utf8.decode(this.bytes.subarray(start, start + size));
    } catch (cause) {
      throw new TokenbusError("bad_frame", "a string is not valid UTF-8", { cause });
    }
  }

  #binary(size: number): Uint8Array {
    const start = this.#take(size);
    return this.bytes.slice(start, start + size);
  }

  #array(count: number, depth: number): Value[] {
    if (depth >= MAX_DEPTH) throw bad(`body is nested deeper than ${MAX_DEPTH}`);
    const items: Value[] = [];
    for (let i = 0; i < count; i++) items.push(this.value(depth + 1));
    return items;
  }

  #map(count: number, depth: number): Body {
    if (depth >= MAX_DEPTH) throw bad(`body is nested deeper than ${MAX_DEPTH}`);
    const map = Object.create(null) as Body; // no `__proto__` to overwrite
    for (let i = 0; i < count; i++) {
      const start = this.at;
      const key = this.value(depth + 1);
      if (typeof key !== "string") throw bad("map key is not a string");
      if (this.at - start > MAX_KEY_BYTES + 2 || Buffer.byteLength(key) > MAX_KEY_BYTES) {
        throw bad(`map key is longer than ${MAX_KEY_BYTES} bytes`);
      }
      if (key in map) throw bad("map has a duplicate key");
      map[key] = this.value(depth + 1);
    }
    return map;
  }
}

function finite(value: number): number {
  if (!Number.isFinite(value)) throw bad(`${value} is not a finite number`);
  return value;
}

function safe(value: bigint): number {
  const number = Number(value);
  if (!Number.isSafeInteger(number)) throw bad(`integer ${value} is outside +-(2^53-1)`);
  return number;
}

/** Write one map. Undefined values are left out. */
export function pack(body: Record<string, unknown>): Uint8Array {
  const chunks: Buffer[] = [];
  write(chunks, body, 0);
  return Buffer.concat(chunks);
}

function write(out: Buffer[], value: unknown, depth: number): void {
  if (value === null) out.push(Buffer.from([0xc0]));
  else if (typeof value === "boolean") out.push(Buffer.from([value ? 0xc3 : 0xc2]));
  else if (typeof value === "number") out.push(Number.isInteger(value) ? integer(value) : float(value));
  else if (typeof value === "string") text(out, value);
  else if (value instanceof Uint8Array) out.push(prefix(value.length, [0xc4, 0xc5, 0xc6]), Buffer.from(value));
  else if (typeof value === "object") container(out, value as object, depth);
  else throw bad(`a ${typeof value} cannot be sent`);
}

function container(out: Buffer[], value: object, depth: number): void {
  if (depth >= MAX_DEPTH) throw bad(`body is nested deeper than ${MAX_DEPTH}`);
  if (Array.isArray(value)) {
    out.push(value.length < 16 ? Buffer.from([0x90 | value.length]) : prefix(value.length, [null, 0xdc, 0xdd]));
    for (const item of value) write(out, item, depth + 1);
    return;
  }
  const entries = Object.entries(value).filter(([, item]) => item !== undefined);
  out.push(entries.length < 16 ? Buffer.from([0x80 | entries.length]) : prefix(entries.length, [null, 0xde, 0xdf]));
  for (const [key, item] of entries) {
    if (Buffer.byteLength(key) > MAX_KEY_BYTES) throw bad(`map key is longer than ${MAX_KEY_BYTES} bytes`);
    text(out, key);
    write(out, item, depth + 1);
  }
}

function text(out: Buffer[], value: string): void {
  if (!value.isWellFormed()) throw bad("a string is not valid Unicode");
  const bytes = Buffer.from(value);
  out.push(bytes.length < 32 ? Buffer.from([0xa0 | bytes.length]) : prefix(bytes.length, [0xd9, 0xda, 0xdb]), bytes);
}

/** Tag and length in the smallest of the widths that have a tag. */
function prefix(size: number, [one, two, four]: [number | null, number, number]): Buffer {
  if (one !== null && size < 0x100) return Buffer.from([one, size]);
  const head = Buffer.alloc(size < 0x10000 ? 3 : 5);
  if (size < 0x10000) head.writeUInt16BE(size, head.writeUInt8(two));
  else head.writeUInt32BE(size, head.writeUInt8(four));
  return head;
}

function integer(value: number): Buffer {
  if (!Number.isSafeInteger(value)) throw bad(`integer ${value} is outside +-(2^53-1)`);
  if (value >= -32 && value < 0x80) return Buffer.from([value & 0xff]);
  const out = Buffer.alloc(9);
  if (value >= 0) {
    if (value < 0x100) return Buffer.from([0xcc, value]);
    if (value < 0x10000) return out.subarray(0, out.writeUInt16BE(value, out.writeUInt8(0xcd)));
    if (value < 2 ** 32) return out.subarray(0, out.writeUInt32BE(value, out.writeUInt8(0xce)));
    out.writeBigUInt64BE(BigInt(value), out.writeUInt8(0xcf));
    return out;
  }
  if (value >= -0x80) return out.subarray(0, out.writeInt8(value, out.writeUInt8(0xd0)));
  if (value >= -0x8000) return out.subarray(0, out.writeInt16BE(value, out.writeUInt8(0xd1)));
  if (value >= -(2 ** 31)) return out.subarray(0, out.writeInt32BE(value, out.writeUInt8(0xd2)));
  out.writeBigInt64BE(BigInt(value), out.writeUInt8(0xd3));
  return out;
}

function float(value: number): Buffer {
  if (!Number.isFinite(value)) throw bad(`${value} is not a finite number`);
  const out = Buffer.alloc(9);
  out.writeDoubleBE(value, out.writeUInt8(0xcb));
  return out;
}
