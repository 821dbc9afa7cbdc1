// Eight jobs at once, their tokens as they come: node stream.mjs [tcp://... or redis://...]
import { Client } from "tokenbus-client";

const address = process.argv[2] ?? "tcp://127.0.0.1:5555";
const client = new Client(address.startsWith("redis") ? { redis: address } : { zmq: address });
const seas = ["Baltic", "Black", "Caspian", "Red", "North", "Coral", "Dead", "Yellow"];

await Promise.all(seas.map(async (sea) => {
  const stream = client.generate({ prompt: `The ${sea} Sea is`, maxTokens: 16 });
  for await (const { seq, text } of stream) {
    console.log(sea.padStart(8), String(seq).padStart(3), JSON.stringify(text));
  }
  console.log(sea.padStart(8), stream.done.reason, stream.done.usage.completionTokens, "tokens");
}));
await client.close();
