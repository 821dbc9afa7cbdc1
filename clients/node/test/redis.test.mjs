// The Redis door against a real redis-server; the test writes what a worker would.
import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test, { after, before } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { createClient } from "redis";
import { Client, crc32OfIds } from "../dist/index.js";

const BINARY = process.env.REDIS_SERVER ?? "redis-server";
const skip = spawnSync(BINARY, ["--version"]).status === 0 ? false : "no redis-server on PATH";
let server;
let number = 0;

async function freePort() {
  const probe = createServer().listen(0, "127.0.0.1");
  await once(probe, "listening");
  const { port } = probe.address();
  probe.close();
  await once(probe, "close");
  return port;
}

class Server {
  static async start() {
    const self = new Server();
    self.port = await freePort();
    self.dir = mkdtempSync(join(tmpdir(), "tokenbus-node-"));
    self.url = `redis://127.0.0.1:${self.port}`;
    await self.run();
    return self;
  }

  async run() {
    const args = ["--port", String(this.port), "--bind", "127.0.0.1", "--save", "", "--dir", this.dir];
    this.process = spawn(BINARY, args, { stdio: ["ignore", "pipe", "inherit"] });
    for await (const chunk of this.process.stdout) if (String(chunk).includes("Ready to accept")) break;
    this.redis = await createClient({ url: this.url, RESP: 2 }).on("error", () => {}).connect();
  }

  async kill() {
    this.redis.destroy();
    this.process.kill("SIGKILL");
    await once(this.process, "exit");
  }

  async stop() {
    await this.kill();
    rmSync(this.dir, { recursive: true });
  }

  add(queue, job, id, fields) {
    return this.redis.sendCommand(["XADD", `tokenbus:{${queue}}:out:${job}`, id, ...Object.entries(fields).flat()]);
  }
}

const started = { event: "started", attempt: "1", worker: "w", seed: "9", prompt_tokens: "3" };
const tokens = (seq, ids, text) => ({ event: "tokens", seq: String(seq), ids: JSON.stringify(ids), text });
const done = (ids, more = {}) => ({
  event: "done", reason: "stop", usage: JSON.stringify({ completion_tokens: ids.length }), crc: String(crc32OfIds(ids)), ...more,
});

function redisTest(name, body) {
  test(name, { skip }, async () => {
    const queue = `q${number++}`;
    const client = new Client({ redis: server.url, queue });
    try {
      await body(client, queue, (job, id, fields) => server.add(queue, job, id, fields));
    } finally {
      await client.close();
    }
  });
}

before(async () => {
  if (!skip) server = await Server.start();
});
after(async () => {
  if (!skip) await server.stop();
});

redisTest("a job is an entry of flat fields and its tokens stream back", async (client, queue, add) => {
  const stream = client.generate({ messages: [{ role: "user", content: "hi" }], job: "j", maxTokens: 3, stop: "x" });
  const reading = stream.text();
  await stream.accepted();
  const [[, flat]] = await server.redis.sendCommand(["XRANGE", `tokenbus:{${queue}}:jobs`, "-", "+"]);
  const messages = '[{"role":"user","content":"hi"}]';
  assert.deepEqual(flat, ["job", "j", "messages", messages, "max_tokens", "3", "stop", '"x"']);
  await add("j", "1-0", started);
  await add("j", "1-2", tokens(1, [5, 6], "ab"));
  await add("j", "2-0", { ...started, attempt: "2" });
  await add("j", "2-3", tokens(3, [7], "c"));
  await add("j", "2-4", done([5, 6, 7], { text: "!" }));
  assert.equal(await reading, "abc!");
  assert.equal(stream.done.usage.completionTokens, 3);
  assert.equal(stream.started.attempt, 2);
});

redisTest("the priority chooses the stream", async (client, queue) => {
  await client.submit({ prompt: "p", priority: "high" });
  assert.equal(await server.redis.sendCommand(["XLEN", `tokenbus:{${queue}}:jobs:high`]), 1);
});

redisTest("jobs added while the reader blocks are read at once", async (client, _queue, add) => {
  const quiet = client.tail("quiet").text();
  const beganMs = performance.now();
  for (let i = 0; i < 10; i++) {
    await add(`j${i}`, "1-0", started);
    await add(`j${i}`, "1-1", done([]));
    assert.equal(await client.tail(`j${i}`).text(), "");
  }
  assert.ok(performance.now() - beganMs < 5_000);
  await add("quiet", "1-1", done([]));
  await quiet;
});

redisTest("a tail from a seq skips what was seen", async (client, _queue, add) => {
  for (const seq of [1, 2, 3]) await add("j", `1-${seq}`, tokens(seq, [seq], String(seq)));
  await add("j", "1-4", done([1, 2, 3]));
  assert.equal(await client.tail("j", 1).text(), "23");
});

for (const [name, id, fields, code] of [
  ["an error entry", "1-1", { event: "error", code: "poisoned", message: "m", retry: "false" }, "poisoned"],
  ["a wrong crc", "1-1", done([], { crc: "5" }), "protocol"],
  ["a hole", "1-3", tokens(3, [5], "a"), "protocol"],
  ["an entry that is no event", "1-1", { event: "tokens", ids: "[1" }, "protocol"],
]) {
  redisTest(`${name} throws ${code}`, async (client, _queue, add) => {
    await add("j", id, fields);
    await assert.rejects(client.tail("j").text(), { code });
  });
}

redisTest("a key that is no stream ends its own job only", async (client, queue, add) => {
  await server.redis.sendCommand(["SET", `tokenbus:{${queue}}:out:bad`, "x"]);
  const bad = client.tail("bad").text();
  const good = client.tail("j").text();
  await assert.rejects(Promise.race([bad, sleep(5_000)]), { code: "internal" });
  await add("j", "1-1", tokens(1, [5], "a"));
  await add("j", "1-2", done([5]));
  assert.equal(await good, "a");
});

redisTest("cancel leaves the mark and the wish", async (client, queue) => {
  await client.cancel("j");
  assert.equal(await server.redis.sendCommand(["GET", `tokenbus:{${queue}}:cancel:j`]), "1");
  const [[, flat]] = await server.redis.sendCommand(["XRANGE", `tokenbus:{${queue}}:control`, "-", "+"]);
  assert.deepEqual(flat, ["op", "cancel", "job", "j"]);
});

redisTest("status reads the hash or finds the waiting job", async (client, queue) => {
  await assert.rejects(client.status("j"), { code: "not_found" });
  await client.submit({ prompt: "p", job: "j" });
  assert.equal((await client.status("j")).state, "queued");
  await server.redis.sendCommand(["HSET", `tokenbus:{${queue}}:job:j`, "state", "running", "attempt", "2"]);
  assert.deepEqual(await client.status("j"), { job: "j", state: "running", attempt: 2, seq: 0 });
  const tokens = ["event", "tokens", "seq", "1", "ids", "[5,6]", "text", "ab"];
  await server.redis.sendCommand(["XADD", `tokenbus:{${queue}}:out:j`, "2-2", ...tokens]);
  assert.equal((await client.status("j")).seq, 2);
  const ended = ["state", "done", "reason", "stop", "completion_tokens", "2"];
  await server.redis.sendCommand(["HSET", `tokenbus:{${queue}}:job:j`, ...ended]);
  assert.deepEqual(await client.status("j"), { job: "j", state: "done", attempt: 2, seq: 2, reason: "stop" });
});

redisTest("status finds a job behind many others", async (client, queue) => {
  const key = `tokenbus:{${queue}}:jobs`;
  const unnamed = await server.redis.sendCommand(["XADD", key, "*", "prompt", "p"]);
  await client.submit({ prompt: "p", job: "j" });
  const fill = "for i = 1, ARGV[1] do redis.call('XADD', KEYS[1], '*', 'prompt', 'p') end";
  await server.redis.sendCommand(["EVAL", fill, "1", key, "10100"]);
  for (const job of ["j", unnamed]) assert.equal((await client.status(job)).state, "queued");
  await assert.rejects(client.status("k"), { code: "not_found" });
});

test("a killed server is read on from the cursor", { skip }, async () => {
  const own = await Server.start();
  const client = new Client({ redis: own.url, queue: "q" });
  const iterator = client.tail("j")[Symbol.asyncIterator]();
  await own.add("q", "j", "1-1", tokens(1, [5], "a"));
  assert.equal((await iterator.next()).value.text, "a");
  await own.kill();
  await own.run();
  await own.add("q", "j", "1-1", tokens(1, [5], "a"));
  await own.add("q", "j", "1-2", tokens(2, [6], "b"));
  await own.add("q", "j", "1-3", done([5, 6]));
  assert.equal((await iterator.next()).value.text, "b");
  assert.equal((await iterator.next()).done, true);
  await client.close();
  await own.stop();
});

test("a server that was killed between two commands is met again", { skip }, async () => {
  const own = await Server.start();
  const client = new Client({ redis: own.url, timeouts: { answerMs: 2_000 } });
  await client.submit({ prompt: "p" });
  await own.kill();
  await own.run();
  const jobs = await Promise.all([1, 2, 3].map(() => client.submit({ prompt: "p" })));
  assert.equal(new Set(jobs).size, 3);
  await client.close();
  await own.stop();
});

test("a stopped server is noticed, and the late reply does not go to the next command", { skip }, async () => {
  const own = await Server.start();
  const client = new Client({ redis: own.url, timeouts: { answerMs: 200 } });
  await own.redis.sendCommand(["HSET", "tokenbus:{default}:job:a", "state", "running", "attempt", "1"]);
  await own.redis.sendCommand(["HSET", "tokenbus:{default}:job:b", "state", "running", "attempt", "2"]);
  await client.status("a");
  own.process.kill("SIGSTOP");
  await assert.rejects(client.status("a"), { code: "unavailable" });
  own.process.kill("SIGCONT");
  assert.equal((await client.status("b")).attempt, 2);
  await client.close();
  await own.stop();
});

test("a server that is not there is an error in time", async () => {
  const redis = `redis://127.0.0.1:${await freePort()}`;
  const client = new Client({ redis, timeouts: { connectMs: 300, answerMs: 300, giveUpMs: 300 } });
  await assert.rejects(client.submit({ prompt: "p" }), { code: "unavailable", retry: true });
  await assert.rejects(client.tail("j").text(), { code: "unavailable" });
  await client.close();
});
