// The golden vectors of tests/vectors, as this client reads them.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { MessageType, crc32OfIds, decode, encode } from "../dist/index.js";

const load = (name) => JSON.parse(readFileSync(new URL(`../../../tests/vectors/${name}`, import.meta.url), "utf8"));
const fromHex = (frames) => frames.map((hex) => Buffer.from(hex, "hex"));

function jsonable(value) {
  if (value instanceof Uint8Array) return { hex: Buffer.from(value).toString("hex") };
  if (Array.isArray(value)) return value.map(jsonable);
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, jsonable(item)]));
  }
  return value;
}

for (const row of load("frames.json")) {
  test(`golden frame ${row.name} decodes`, () => {
    const message = decode(fromHex(row.frames));
    assert.equal(message.type, MessageType[row.type]);
    assert.deepEqual(jsonable(message.body), row.body);
  });
  if (row.direction === "c->w") {
    test(`golden frame ${row.name} encodes to the same bytes`, () => {
      const { type, body, blobs } = decode(fromHex(row.frames));
      assert.deepEqual(encode(type, body, blobs).map((f) => Buffer.from(f).toString("hex")), row.frames);
    });
  }
}

for (const row of load("malformed.json")) {
  test(`malformed: ${row.name} is ${row.code}`, () => {
    const limits = row.limits && {
      maxBodyBytes: row.limits.max_body_bytes, maxFrameBytes: row.limits.max_frame_bytes, maxBlobs: row.limits.max_blobs,
    };
    assert.throws(() => decode(fromHex(row.frames), limits), { name: "TokenbusError", code: row.code });
  });
}

for (const { ids, crc } of load("checksums.json")) {
  test(`checksum of ${ids.length} ids`, () => assert.equal(crc32OfIds(ids), crc));
}

test("a checksum can be taken piece by piece", () => {
  assert.equal(crc32OfIds([1, 2, 3]), crc32OfIds([3], crc32OfIds([1, 2])));
});

test("random bytes never throw anything but a typed error", () => {
  let seed = 1;
  const random = (below) => {
    seed = (Math.imul(seed, 1103515245) + 12345) >>> 0;
    return Math.floor((seed / 2 ** 32) * below);
  };
  const golden = load("frames.json").map((row) => fromHex(row.frames));
  for (let round = 0; round < 20_000; round++) {
    const frames = golden[random(golden.length)].map((frame) => Buffer.from(frame));
    const frame = frames[1 + random(frames.length - 1)];
    for (let i = 0; i < 3; i++) frame[random(frame.length)] = random(256);
    try {
      decode(frames);
    } catch (error) {
      assert.equal(error.name, "TokenbusError", String(error.stack));
    }
  }
});

test("what cannot be said is refused before it is sent", () => {
  for (const value of [NaN, Infinity, 2 ** 53, "\ud800", { ["k".repeat(33)]: 1 }, [[[[[[[1]]]]]]], () => 1, 5n]) {
    assert.throws(() => encode(MessageType.PING, { t: value }), { code: "bad_frame" });
  }
});
