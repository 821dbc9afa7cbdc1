// No-op jobs with BullMQ, for `tokenbus bench bus`:
//
//   node bullmq_noop.mjs NODE_MODULES PORT NUM_JOBS WINDOW      prints one JSON line
//
// The worker is a process of its own with WINDOW jobs at a time; the client keeps WINDOW jobs open
// and waits for their results.
import { fork } from "node:child_process";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const [modules, port, jobs, width, role] = process.argv.slice(2);
const require = createRequire(join(resolve(modules), "from-here.js"));
const { Queue, QueueEvents, Worker } = require("bullmq");
const connection = { host: "127.0.0.1", port: Number(port), maxRetriesPerRequest: null };
const numJobs = Number(jobs);
const window = Number(width);

if (role === "worker") {
  const worker = new Worker("noop", async () => 1, { connection, concurrency: window });
  await worker.waitUntilReady();
  process.send("ready");
} else {
  const self = fileURLToPath(import.meta.url);
  const worker = fork(self, [modules, port, jobs, width, "worker"]);
  await new Promise((ready) => worker.once("message", ready));
  const queue = new Queue("noop", { connection });
  const events = new QueueEvents("noop", { connection });
  await events.waitUntilReady();
  events.setMaxListeners(0);
  const start = process.hrtime.bigint();
  let sent = 0;
  let ended = 0;
  await new Promise((allDone) => {
    const add = (count) => {
      const rows = [];
      while (rows.length < count && sent < numJobs) rows.push({ name: "noop", data: { i: sent++ } });
      if (rows.length) queue.addBulk(rows);
    };
    let free = 0;
    events.on("completed", () => {
      ended += 1;
      free += 1;
      if (ended === numJobs) allDone();
      if (free === 1) setImmediate(() => { const count = free; free = 0; add(count); });
    });
    add(window);
  });
  const seconds = Number(process.hrtime.bigint() - start) / 1e9;
  const version = require("bullmq/package.json").version;
  console.log(JSON.stringify({ version, jobs: numJobs, jobs_per_s: Math.round(numJobs / seconds) }));
  worker.kill();
  process.exit(0);
}
