// node stress.mjs ENDPOINT [CLIENT-OPTIONS [JOB-OPTIONS]]: runs the jobs on standard input, all at once over one
// connection. The options are JSON. Input and output are those of clients/c/tests/stress.c:
//
// A line of input: MAX_TOKENS TEMPERATURE SEED CHAT PROMPT, separated by tabs; SEED -1 for none, CHAT 1 for a chat of
// one user message. CHAT "cancel" cancels the job after its third token.
// A line of output for each job in order: INDEX REASON-OR-CODE SEQ CRC TEXT-IN-HEX IDS.
// Standard error: "tokens N" each time the job with the fewest tokens has got five more.
import { Client, TokenbusError } from "../dist/index.js";

const [endpoint, clientOptions = "{}", jobOptions = "{}"] = process.argv.slice(2);
const client = new Client({ zmq: endpoint, ...JSON.parse(clientOptions) });
const runs = [];
let told = 0;

function fail(what) {
  console.error(what);
  process.exit(1);
}

function tellProgress() {
  const least = Math.min(...runs.filter((run) => !run.stream.isOver).map((run) => run.ids.length));
  if (least === Infinity || least < told + 5) return;
  told = least;
  console.error(`tokens ${least}`);
}

function start(line) {
  const [maxTokens, temperature, seed, chat, prompt] = line.split("\t");
  const stream = client.generate({
    ...(chat === "1" ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    ...(Number(seed) >= 0 ? { seed: Number(seed) } : {}),
    maxTokens: Number(maxTokens), temperature: Number(temperature), ...JSON.parse(jobOptions),
  });
  return { stream, cancels: chat === "cancel", ids: [], text: "", end: "" };
}

async function follow(run) {
  try {
    for await (const token of run.stream) {
      if (token.seq !== run.ids.length + 1) fail("a hole or a repeat");
      run.ids.push(...token.ids);
      run.text += token.text;
      if (run.cancels && run.ids.length >= 3) {
        run.cancels = false;
        void client.cancel(run.stream.job);
      }
      tellProgress();
    }
    run.end = run.stream.done.reason;
  } catch (error) {
    if (!(error instanceof TokenbusError)) throw error;
    run.end = error.code;
    console.error(`job ${run.stream.job}: ${error.field} ${error.message}`);
  }
}

let input = "";
for await (const chunk of process.stdin.setEncoding("utf8")) input += chunk;
runs.push(...input.split("\n").filter((line) => line !== "").map(start));
await Promise.all(runs.map(follow));
runs.forEach(({ stream, ids, text, end }, index) => {
  const row = [index, end, ids.length, stream.done?.crc ?? 0, Buffer.from(text).toString("hex")];
  console.log([...row, ...(ids.length > 0 ? [ids.join(",")] : [])].join("\t"));
});
await client.close();
