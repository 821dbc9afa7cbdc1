/** What a caller gives and gets. */

export interface ChatMessage {
  role: "system" | "developer" | "user" | "assistant" | "tool";
  content: string | { type: "text"; text: string }[];
  name?: string;
}

/** A job. Exactly one of prompt, messages and inputIds. Ranges: docs/PROTOCOL.md section 1. */
export interface JobOptions {
  prompt?: string;
  messages?: ChatMessage[];
  inputIds?: number[];
  /** Job id; a random UUID by default. Submitting the same id twice runs it once. */
  job?: string;
  maxTokens?: number;
  minTokens?: number;
  temperature?: number;
  topP?: number;
  topK?: number;
  minP?: number;
  repetitionPenalty?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  seed?: number;
  stop?: string | string[];
  stopTokenIds?: number[];
  ignoreEos?: boolean;
  priority?: "high" | "normal" | "low";
  deadlineMs?: number;
  tenant?: string;
  idempotencyKey?: string;
  durable?: boolean;
  model?: string;
  queue?: string;
}

export interface Token {
  /** Seq of the first id: 1, 2, 3 ... without holes. */
  seq: number;
  ids: number[];
  /** What the ids add to the answer; may be empty. */
  text: string;
  attempt: number;
}

export interface Usage {
  promptTokens: number;
  completionTokens: number;
  cachedTokens: number;
  queueMs: number;
  ttftMs: number;
  totalMs: number;
}

export interface Done {
  reason: "stop" | "length" | "cancelled" | "deadline";
  seq: number;
  usage: Usage;
  crc: number;
}

export interface Started {
  attempt: number;
  worker: string;
  seed: number;
  promptTokens: number;
}

export interface JobStatus {
  job: string;
  state: string;
  attempt: number;
  seq: number;
  reason?: string;
  code?: string;
}

export interface Timeouts {
  /** Until the first contact with a worker or Redis. */
  connectMs: number;
  /** For one answer. */
  answerMs: number;
  /** How long a running job survives without any contact. */
  giveUpMs: number;
}

export const DEFAULT_TIMEOUTS: Timeouts = { connectMs: 10_000, answerMs: 10_000, giveUpMs: 60_000 };

const NAMES: Record<keyof JobOptions, string> = {
  prompt: "prompt", messages: "messages", inputIds: "input_ids", job: "job", maxTokens: "max_tokens",
  minTokens: "min_tokens", temperature: "temperature", topP: "top_p", topK: "top_k", minP: "min_p",
  repetitionPenalty: "repetition_penalty", presencePenalty: "presence_penalty",
  frequencyPenalty: "frequency_penalty", seed: "seed", stop: "stop", stopTokenIds: "stop_token_ids",
  ignoreEos: "ignore_eos", priority: "priority", deadlineMs: "deadline_ms", tenant: "tenant",
  idempotencyKey: "idempotency_key", durable: "durable", model: "model",
  queue: "queue",
};

/** Options with the wire's field names, those that say nothing left out. Throws TypeError for an unknown one. */
export function toFields(options: JobOptions & { job: string }): Record<string, unknown> & { job: string } {
  const fields: Record<string, unknown> & { job: string } = { job: options.job };
  for (const [name, value] of Object.entries(options)) {
    if (!Object.hasOwn(NAMES, name)) throw new TypeError(`${name} is not an option of a job`);
    if (value !== undefined && value !== null) fields[NAMES[name as keyof JobOptions]] = value;
  }
  return fields;
}

/** `usage` of the wire. */
export function toUsage(value: unknown): Usage {
  const map = (typeof value === "object" && value !== null ? value : {}) as Record<string, unknown>;
  const number = (name: string): number => (typeof map[name] === "number" ? (map[name] as number) : 0);
  return {
    promptTokens: number("prompt_tokens"), completionTokens: number("completion_tokens"),
    cachedTokens: number("cached_tokens"), queueMs: number("queue_ms"), ttftMs: number("ttft_ms"),
    totalMs: number("total_ms"),
  };
}
