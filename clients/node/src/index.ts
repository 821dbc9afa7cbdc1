/** Client for tokenbus workers: LLM jobs over Redis streams or ZeroMQ, tokens streamed back. */

export { Client, type ClientOptions } from "./client.js";
export { ERROR_CODES, TokenbusError, type ErrorCode } from "./errors.js";
export { MessageType, crc32OfIds, decode, encode, type Limits, type Message } from "./protocol.js";
export type { CurveKeys } from "./session.js";
export { JobStream } from "./stream.js";
export type { ChatMessage, Done, JobOptions, JobStatus, Started, Timeouts, Token, Usage } from "./types.js";
