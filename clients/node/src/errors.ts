/** Everything that can go wrong, as one class with the wire's `code`. */

/** Codes of docs/PROTOCOL.md section 3. A code of a later version arrives as `internal`. */
export const ERROR_CODES = [
  "invalid", "unsupported", "too_large", "too_long", "unknown_model", "unknown_queue", "not_found",
  "conflict", "gone", "busy", "draining", "engine_lost", "poisoned", "non_finite", "bad_frame",
  "no_session", "version", "internal", "unavailable", "protocol",
] as const;

export type ErrorCode = (typeof ERROR_CODES)[number];

const RETRYABLE = new Set<string>(["busy", "draining", "engine_lost", "no_session", "unavailable"]);

export interface ErrorDetails {
  /** Path of the request field at fault, such as `messages[2].role`. */
  field?: string | undefined;
  /** Whether the same job may succeed later. */
  retry?: boolean | undefined;
  /** How long to wait before, in milliseconds, where the worker can say. */
  retryMs?: number | undefined;
  cause?: unknown;
}

/** A refused request, a failed job, a lost connection or a broken promise of the stream. */
export class TokenbusError extends Error {
  override readonly name = "TokenbusError";
  readonly code: ErrorCode;
  readonly field: string;
  readonly retry: boolean;
  readonly retryMs: number | undefined;

  constructor(code: ErrorCode, message: string, details: ErrorDetails = {}) {
    super(message, details.cause === undefined ? undefined : { cause: details.cause });
    this.code = code;
    this.field = details.field ?? "";
    this.retry = details.retry ?? RETRYABLE.has(code);
    this.retryMs = details.retryMs;
  }
}

/** The error in a body or entry; what the peer says about `retry` wins. */
export function fromWire(body: Record<string, unknown>): TokenbusError {
  const code = String(body["code"] ?? "internal");
  const message = String(body["message"] ?? "");
  const known = (ERROR_CODES as readonly string[]).includes(code);
  return new TokenbusError(known ? (code as ErrorCode) : "internal", known ? message : `${code}: ${message}`, {
    field: typeof body["field"] === "string" ? body["field"] : undefined,
    retry: typeof body["retry"] === "boolean" ? body["retry"] : undefined,
    retryMs: typeof body["retry_ms"] === "number" ? body["retry_ms"] : undefined,
  });
}
