// The ZeroMQ door against a scripted ROUTER: holes, repeats, restarts, silence.
import test from "node:test";
import { Client } from "../dist/index.js";
import { FakeWorker, T, assert, withWorker } from "./fake-worker.mjs";

const read = (client, options = {}) => client.generate({ prompt: "p", job: "j", ...options }).text();

test("tokens come in order and done has the rest", () => withWorker(async (worker, client) => {
  const stream = client.generate({ prompt: "p", job: "j", maxTokens: 3, topP: 0.5 });
  const reading = stream.text();
  const submit = await worker.expect(T.SUBMIT);
  assert.deepEqual({ ...submit.body }, { job: "j", prompt: "p", max_tokens: 3, top_p: 0.5 });
  await worker.accept("j", 9);
  await worker.tokens(["j", 1, [5], "a"]);
  await worker.tokens(["j", 2, [6, 7], "b"]);
  await worker.done("j", [5, 6, 7], { text: "!" });
  assert.equal(await reading, "ab!");
  assert.equal(stream.started.seed, 9);
  assert.equal(stream.done.usage.completionTokens, 3);
}));

test("a hole is filled by RESUME and a repeat is dropped", () => withWorker(async (worker, client) => {
  const reading = read(client);
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  await worker.tokens(["j", 1, [5], "a"]);
  await worker.tokens(["j", 1, [5], "a"]);
  await worker.tokens(["j", 3, [7], "c"]);
  assert.deepEqual({ ...(await worker.expect(T.RESUME)).body }, { job: "j", after: 1 });
  await worker.tokens(["j", 2, [6], "b"], ["j", 3, [7], "c"]);
  await worker.done("j", [5, 6, 7]);
  assert.equal(await reading, "abc");
}));

test("a wrong crc is a protocol error", () => withWorker(async (worker, client) => {
  const reading = read(client);
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  await worker.tokens(["j", 1, [5], "a"]);
  await worker.done("j", [5], { crc: 1 });
  await assert.rejects(reading, { code: "protocol" });
}));

test("many jobs share one connection", () => withWorker(async (worker, client) => {
  const names = Array.from({ length: 40 }, (_, i) => `j${i}`);
  const readings = Promise.all(names.map((job) => read(client, { job })));
  for (const _ of names) await worker.expect(T.SUBMIT);
  for (const name of names) await worker.accept(name);
  for (const seq of [1, 2]) await worker.tokens(...names.map((name) => [name, seq, [seq], `${name}.${seq}`]));
  for (const name of names) await worker.done(name, [1, 2]);
  assert.deepEqual(await readings, names.map((name) => `${name}.1${name}.2`));
  assert.equal(worker.hellos.length, 1);
}));

test("a refused job throws its typed error", () => withWorker(async (worker, client) => {
  const reading = read(client);
  await worker.expect(T.SUBMIT);
  await worker.send(T.REJECTED, { job: "j", code: "busy", retry: true, retry_ms: 250, message: "full" });
  await assert.rejects(reading, { name: "TokenbusError", code: "busy", retry: true, retryMs: 250 });
}));

test("an error ends the stream, an unknown code as internal", () => withWorker(async (worker, client) => {
  const reading = read(client);
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  await worker.send(T.ERROR, { job: "j", code: "later", retry: true, message: "m" });
  await assert.rejects(reading, { code: "internal", retry: true, message: "later: m" });
}));

test("a restarted worker goes on from the tokens the client holds", async () => {
  const first = await new FakeWorker({ heartbeatMs: 400 }).bind();
  const client = new Client({ zmq: first.endpoint });
  const reading = read(client, { maxTokens: 8 });
  await first.expect(T.SUBMIT);
  await first.accept("j", 123);
  await first.tokens(["j", 1, [5, 6], "ab"]);
  await first.settle();
  first.close();
  const second = await new FakeWorker({ boot: "boot-2", heartbeatMs: 400 }).bind(first.endpoint);
  const submit = await second.expect(T.SUBMIT);
  assert.deepEqual({ ...submit.body }, { job: "j", prompt: "p", max_tokens: 8, seed: 123, have: [5, 6] });
  assert.equal(second.hellos[0].client, first.hellos[0].client);
  await second.accept("j", 123, 2);
  await second.tokens(["j", 3, [7], "c"]);
  await second.done("j", [5, 6, 7]);
  assert.equal(await reading, "abc");
  await client.close();
  second.close();
});

test("a HELLO that died with its worker is said to the next one", async () => {
  const first = await new FakeWorker({ heartbeatMs: 400 }).bind();
  const client = new Client({ zmq: first.endpoint });
  const reading = read(client, { maxTokens: 8 });
  await first.expect(T.SUBMIT);
  await first.accept("j", 123);
  await first.tokens(["j", 1, [5, 6], "ab"]);
  await first.settle();
  first.close();
  const second = await new FakeWorker({ boot: "boot-2" }).bind(first.endpoint);
  second.greets = false;
  await second.expect(T.HELLO);
  second.close();
  const third = await new FakeWorker({ boot: "boot-3", heartbeatMs: 400 }).bind(first.endpoint);
  await third.expect(T.SUBMIT);
  await third.accept("j", 123, 2);
  await third.done("j", [5, 6]);
  assert.equal(await reading, "ab");
  await client.close();
  third.close();
});

test("a new connection to the same worker resumes", () => withWorker(async (worker, client) => {
  const reading = read(client);
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  await worker.tokens(["j", 1, [5], "a"]);
  await worker.send(T.ERROR, { code: "no_session", message: "who?", retry: true });
  assert.deepEqual({ ...(await worker.expect(T.RESUME)).body }, { job: "j", after: 1 });
  assert.equal(worker.hellos.length, 2);
  await worker.done("j", [5]);
  assert.equal(await reading, "a");
}));

test("a SUBMIT that a restarted worker never read is sent again", async () => {
  const first = await new FakeWorker({ heartbeatMs: 400 }).bind();
  const client = new Client({ zmq: first.endpoint });
  const reading = read(client);
  await first.expect(T.SUBMIT);
  await first.accept("j", 123);
  await first.tokens(["j", 1, [5], "a"]);
  await first.settle();
  first.close();
  const second = await new FakeWorker({ boot: "boot-2" }).bind(first.endpoint);
  const lost = await second.expect(T.SUBMIT);
  await second.send(T.ERROR, { code: "no_session", message: "who?", retry: true });
  while ((await second.receive()).type !== T.HELLO);
  await second.welcome();
  const next = await second.receive();
  assert.equal(next.type, T.SUBMIT);
  assert.deepEqual(next.body, lost.body);
  await second.accept("j", 123, 1);
  await second.done("j", [5]);
  assert.equal(await reading, "a");
  await client.close();
  second.close();
});

/** A job with one token, which the worker is asked for again. */
async function resumed(worker, client, options) {
  const reading = read(client, options);
  reading.catch(() => {});
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  await worker.tokens(["j", 1, [5], "a"]);
  await worker.send(T.ERROR, { code: "no_session", message: "who?", retry: true });
  await worker.expect(T.RESUME);
  return { reading };
}

const unknown = { job: "j", code: "not_found", retry: false, message: "" };

test("a job that the worker forgot is submitted again, once a WELCOME", () => withWorker(async (worker, client) => {
  const { reading } = await resumed(worker, client);
  await worker.send(T.ERROR, unknown);
  const submit = await worker.expect(T.SUBMIT);
  assert.deepEqual([submit.body.seed, [...submit.body.have]], [7, [5]]);
  await worker.accept("j", 7, 1);
  await worker.tokens(["j", 3, [7], "c"]);
  await worker.expect(T.RESUME);
  await worker.send(T.ERROR, unknown);
  await assert.rejects(reading, { code: "not_found" });
}));

test("a durable job that Redis lost is not submitted again", () => withWorker(async (worker, client) => {
  const { reading } = await resumed(worker, client, { durable: true });
  await worker.send(T.ERROR, unknown);
  await assert.rejects(reading, { code: "not_found" });
}));

test("a durable job that no worker took ends for those who resume it", () => withWorker(async (worker, client) => {
  const rejected = { job: "j", code: "invalid", field: "top_p", retry: false, message: "" };
  const tailing = client.tail("j").text();
  tailing.catch(() => {});
  await worker.expect(T.RESUME);
  const asking = read(client, { durable: true });
  asking.catch(() => {});
  await worker.expect(T.SUBMIT);
  await worker.send(T.REJECTED, rejected);
  for (const task of [tailing, asking]) await assert.rejects(task, { code: "invalid" });
  const { reading } = await resumed(worker, client, { durable: true });
  await worker.send(T.REJECTED, rejected);
  await assert.rejects(reading, { code: "invalid" });
}));

for (const isRunning of [true, false]) {
  test(`a conflict with a job ${isRunning ? "which runs" : "just sent"} is no end of it`, () => withWorker(async (worker, client) => {
    const first = read(client);
    first.catch(() => {});
    await worker.expect(T.SUBMIT);
    if (isRunning) await worker.accept("j");
    if (isRunning) await worker.settle();
    const second = read(client, { prompt: "other" });
    second.catch(() => {});
    await worker.expect(T.SUBMIT);
    await worker.send(T.REJECTED, { job: "j", code: "conflict", retry: false, message: "", field: "job" });
    await assert.rejects(second, { code: "conflict" });
    if (!isRunning) await worker.accept("j");
    await worker.tokens(["j", 1, [5], "a"]);
    await worker.done("j", [5]);
    assert.equal(await first, "a");
  }));
}

/** Lets seconds go by for the client's tick and for `performance.now`; sockets live on in real time. */
function mockSeconds(t) {
  t.mock.timers.enable({ apis: ["setInterval"] });
  const now = performance.now.bind(performance);
  let aheadMs = 0;
  t.mock.method(performance, "now", () => now() + aheadMs);
  return (seconds) => {
    for (let i = 0; i < seconds; i++) {
      aheadMs += 1_000;
      t.mock.timers.tick(1_000);
    }
  };
}

for (const retryMs of [20, undefined]) {
  const when = retryMs === undefined ? "after a second" : "when it says";
  test(`a worker too busy to resume a job is asked again ${when}`, (t) => {
    const pass = mockSeconds(t);
    return withWorker(async (worker, client) => {
      const reading = read(client, { durable: true });
      await worker.expect(T.SUBMIT);
      await worker.accept("j");
      await worker.tokens(["j", 1, [5], "a"]);
      await worker.send(T.ERROR, { code: "no_session", message: "who?", retry: true });
      await worker.expect(T.RESUME);
      for (let i = 0; i < 7; i++) { // more often than a hole is asked for
        const busy = { job: "j", code: "busy", message: "Redis cannot be reached", retry: true };
        await worker.send(T.ERROR, retryMs === undefined ? busy : { ...busy, retry_ms: retryMs });
        await worker.settle();
        if (retryMs === undefined) pass(1);
        else t.mock.timers.tick(retryMs);
        assert.deepEqual({ ...(await worker.expect(T.RESUME)).body }, { job: "j", after: 1 });
      }
      await worker.tokens(["j", 2, [6], "b"]);
      await worker.done("j", [5, 6]);
      assert.equal(await reading, "ab");
    }, { heartbeatMs: 600_000 });
  });
}

test("a job that waits is resumed once and waited for", (t) => {
  const pass = mockSeconds(t);
  return withWorker(async (worker, client) => {
    const reading = read(client);
    await worker.expect(T.SUBMIT);
    await worker.accept("j");
    await worker.send(T.ERROR, { code: "no_session", message: "who?", retry: true });
    await worker.expect(T.RESUME);
    pass(20);
    await worker.settle();
    await worker.tokens(["j", 1, [5], "a"]);
    await worker.done("j", [5]);
    assert.equal(await reading, "a");
    assert.equal(worker.resumes, 1);
  }, { heartbeatMs: 600_000 });
});

test("a hole that is never filled ends the job", (t) => {
  const pass = mockSeconds(t);
  return withWorker(async (worker, client) => {
    const reading = read(client);
    await worker.expect(T.SUBMIT);
    await worker.accept("j");
    await worker.tokens(["j", 3, [5], "a"]);
    await worker.expect(T.RESUME);
    pass(20);
    await assert.rejects(reading, { code: "protocol" });
    await worker.settle();
    assert.equal(worker.resumes, 5);
  }, { heartbeatMs: 600_000 });
});

test("a silent worker is left after three heartbeats and found again", () => withWorker(async (worker, client) => {
  const reading = read(client);
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  await worker.tokens(["j", 1, [5], "a"]);
  while ((await worker.receive()).type !== T.HELLO); // its pings go unanswered until it says HELLO anew
  await worker.welcome();
  assert.deepEqual({ ...(await worker.expect(T.RESUME)).body }, { job: "j", after: 1 });
  await worker.done("j", [5]);
  assert.equal(await reading, "a");
}, { heartbeatMs: 200 }));

test("leaving the loop early cancels the job", () => withWorker(async (worker, client) => {
  const reading = (async () => {
    for await (const token of client.generate({ prompt: "p", job: "j" })) return token.text;
  })();
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  await worker.tokens(["j", 1, [5], "a"]);
  assert.equal(await reading, "a");
  assert.equal((await worker.expect(T.CANCEL)).body.job, "j");
}));

test("cancel waits for the end and the stream sees it", () => withWorker(async (worker, client) => {
  const stream = client.generate({ prompt: "p", job: "j" });
  const reading = stream.text();
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  const cancelling = client.cancel("j");
  await worker.expect(T.CANCEL);
  await worker.done("j", [], { reason: "cancelled" });
  await cancelling;
  assert.equal(await reading, "");
  assert.equal(stream.done.reason, "cancelled");
}));

test("a cancel whose answer was lost is sent again", () => withWorker(async (worker, client) => {
  const reading = read(client);
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  const cancelling = client.cancel("j");
  await worker.expect(T.CANCEL);
  await worker.send(T.ERROR, { code: "no_session", message: "who?", retry: true });
  assert.equal((await worker.expect(T.CANCEL)).body.job, "j");
  await worker.done("j", [], { reason: "cancelled" });
  await cancelling;
  assert.equal(await reading, "");
}));

test("a job left without a connection is cancelled on the next", () => withWorker(async (worker, client) => {
  const iterator = client.generate({ prompt: "p", job: "j" })[Symbol.asyncIterator]();
  const reading = iterator.next();
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  await worker.tokens(["j", 1, [5], "a"]);
  await reading;
  worker.greets = false;
  await worker.send(T.ERROR, { code: "no_session", message: "who?", retry: true });
  await worker.expect(T.HELLO);
  await iterator.return();
  await worker.welcome();
  assert.equal((await worker.expect(T.CANCEL)).body.job, "j");
}));

test("status and cancel of an unknown job throw not_found", () => withWorker(async (worker, client) => {
  for (const [call, type] of [["status", T.STATS], ["cancel", T.CANCEL]]) {
    const asking = client[call]("j");
    await worker.expect(type);
    await worker.send(T.ERROR, { job: "j", code: "not_found", retry: false, message: "" });
    await assert.rejects(asking, { code: "not_found" });
  }
}));

for (const [call, type] of [["status", T.STATS], ["cancel", T.CANCEL]]) {
  test(`a worker too busy for ${call} refuses it and the job goes on`, () => withWorker(async (worker, client) => {
    const reading = read(client, { durable: true });
    await worker.expect(T.SUBMIT);
    await worker.accept("j");
    const asking = client[call]("j");
    asking.catch(() => {});
    await worker.expect(type);
    await worker.send(T.ERROR, { job: "j", code: "busy", retry: true, retry_ms: 500, message: "" });
    await worker.settle();
    await worker.tokens(["j", 1, [5], "a"]);
    await worker.done("j", [5]);
    await assert.rejects(asking, { code: "busy", retryMs: 500 });
    assert.equal(await reading, "a");
  }));
}

test("a refused RESUME is no answer to a cancel", () => withWorker(async (worker, client) => {
  const tailing = client.tail("j", 99).text();
  tailing.catch(() => {});
  await worker.expect(T.RESUME);
  let isCancelled = false;
  const cancelling = client.cancel("j").then(() => (isCancelled = true));
  await worker.expect(T.CANCEL);
  await worker.send(T.ERROR, { job: "j", code: "gone", retry: false, message: "" });
  await assert.rejects(tailing, { code: "gone" });
  await worker.settle();
  assert.equal(isCancelled, false);
  await worker.done("j", [], { reason: "cancelled" });
  await cancelling;
}));

test("submit returns when the job was taken and tail reads it", () => withWorker(async (worker, client) => {
  const submitting = client.submit({ prompt: "p", job: "j" });
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  assert.equal(await submitting, "j");
  const reading = client.tail("j", 1).text();
  assert.deepEqual({ ...(await worker.expect(T.RESUME)).body }, { job: "j", after: 1 });
  await worker.tokens(["j", 2, [6], "b"]);
  await worker.done("j", [5, 6]);
  assert.equal(await reading, "b");
}));

test("credit is renewed as events come", () => withWorker(async (worker, client) => {
  const reading = read(client);
  await worker.expect(T.SUBMIT);
  assert.equal(worker.hellos[0].credit, 10);
  await worker.accept("j");
  const ids = Array.from({ length: 30 }, (_, i) => i + 1);
  for (const id of ids) await worker.tokens(["j", id, [id], "x"]);
  await worker.done("j", ids);
  assert.equal(await reading, "x".repeat(30));
  await worker.settle();
  assert.ok(worker.credits.at(-1) >= 30 && worker.credits.at(-1) <= 40, String(worker.credits));
}, { credit: 10 }));

test("a credit of one event is renewed after every event", () => withWorker(async (worker, client) => {
  const reading = read(client);
  await worker.expect(T.SUBMIT);
  await worker.accept("j");
  for (const id of [1, 2]) {
    await worker.tokens(["j", id, [id], "x"]);
    await worker.expect(T.CREDIT);
  }
  await worker.done("j", [1, 2]);
  assert.equal(await reading, "xx");
  assert.deepEqual(worker.credits, [2, 3]);
}, { credit: 1 }));

test("long id lists travel as a blob", () => withWorker(async (worker, client) => {
  const inputIds = Array.from({ length: 100 }, (_, i) => i);
  const reading = client.generate({ inputIds, job: "j" }).text();
  const { body, blobs } = await worker.expect(T.SUBMIT);
  assert.deepEqual({ ...body }, { job: "j", input_ids_blob: 0 });
  assert.equal(Buffer.from(blobs[0]).readInt32LE(4 * 99), 99);
  await worker.accept("j");
  await worker.done("j", []);
  await reading;
}));

test("a prompt over the limits and an unknown option are refused before they are sent", () => withWorker(async (worker, client) => {
  const greeting = worker.expect(T.PING);
  greeting.catch(() => {});
  await assert.rejects(read(client, { prompt: "x".repeat(2 << 20) }), { code: "too_large" });
  assert.throws(() => client.generate({ prompt: "p", temprature: 1 }), TypeError);
}));

test("no worker at all is an error in time", async () => {
  const probe = await new FakeWorker().bind();
  probe.close();
  const client = new Client({ zmq: probe.endpoint, timeouts: { connectMs: 200 } });
  await assert.rejects(read(client), { code: "unavailable", retry: true });
  await client.close();
  await assert.rejects(read(client), { code: "unavailable" });
});
