/** What the ZeroMQ door knows of one job, and the bodies about it. */

import { isDeepStrictEqual } from "node:util";
import type { Fields } from "./door.js";
import { TokenbusError } from "./errors.js";
import type { Body } from "./msgpack.js";
import { packIds } from "./protocol.js";
import type { JobStream } from "./stream.js";
import { toUsage, type Done, type JobStatus, type Started, type Token } from "./types.js";

export const RESUME_AGAIN_MS = 1_000;

const INLINE_IDS = 64; // more travel as a blob

export interface Followed {
  stream: JobStream;
  fields: Fields | undefined; // undefined: submitted elsewhere
  openedMs: number;
  seed: number | undefined; // the one in use, told by ACCEPTED
  isAsked: boolean; // SUBMIT has no answer yet from the worker that is there now
  wasUnknown: boolean; // to the worker, since the last WELCOME
  isResuming: boolean; // RESUME was sent and nothing new came since
  hasHole: boolean; // something came that does not follow the last token
  asksAgain: NodeJS.Timeout | undefined; // the worker was too busy for RESUME
  resumes: number; // since the hole is known
  resumedMs: number;
}

export function newFollowed(stream: JobStream, fields: Fields | undefined): Followed {
  const openedMs = performance.now();
  return {
    stream, fields, openedMs, seed: undefined, isAsked: false, wasUnknown: false, isResuming: false, hasHole: false,
    asksAgain: undefined, resumes: 0, resumedMs: 0,
  };
}

/** Whether a worker takes both requests for one job: it compares all but `have` and `deadline_ms`. */
function isSameContent(one: Followed, other: Followed): boolean {
  const content = ({ fields }: Followed): object => ({ ...fields, have: undefined, deadline_ms: undefined });
  return isDeepStrictEqual(content(one), content(other));
}

/** Whom ACCEPTED concerns: the SUBMIT that came first, those with the same content, and whoever reads the job. */
export function acceptedOf(row: Followed[]): Followed[] {
  const first = row.find((followed) => followed.isAsked);
  return row.filter((followed) => first === undefined || !followed.isAsked || isSameContent(followed, first));
}

/**
 * Whom REJECTED concerns: one SUBMIT without an answer, or a RESUME of a durable job that no worker took. What runs
 * already goes on.
 */
export function rejectedOf(row: Followed[], error: TokenbusError): Followed[] {
  const asked = row.filter((followed) => followed.isAsked);
  // In conflict is what came later, if there is something else before it.
  const isConflict = error.code === "conflict";
  const refused = isConflict ? asked.at(-1) : asked[0];
  if (refused === undefined) return row.filter((followed) => followed.isResuming);
  const isTail = ({ fields, isResuming }: Followed): boolean => isResuming && fields === undefined;
  return row.filter((followed) =>
    followed.isAsked ? isSameContent(followed, refused) : !isConflict && isTail(followed),
  );
}

/** The tokens go on after the last one, or nothing is known of them any more. */
export function forgetHole(followed: Followed): void {
  followed.isResuming = followed.hasHole = false;
  followed.resumes = 0;
  dropTimer(followed);
}

export function dropTimer(followed: Followed): void {
  clearTimeout(followed.asksAgain);
  followed.asksAgain = undefined;
}

/**
 * RESUME came at a bad time, such as before the worker had found its Redis: `resume` when it says, as long as it answers.
 * It may also be the answer to somebody's CANCEL or STATS.
 */
export function onBusy(followed: Followed, retryMs: number | undefined, resume: () => void): void {
  if (!followed.isResuming) return;
  followed.resumes = 0;
  dropTimer(followed);
  followed.asksAgain = setTimeout(() => {
    followed.asksAgain = undefined;
    followed.isResuming = false;
    if (!followed.stream.isOver) resume();
  }, retryMs ?? RESUME_AGAIN_MS);
  followed.asksAgain.unref();
}

/** Body and blobs of SUBMIT, with the seed and the ids the reader holds where another worker had the job before. */
export function submitMessage({ fields, openedMs, seed, stream }: Followed): [Record<string, unknown>, Uint8Array[]] {
  const body: Record<string, unknown> = { ...fields };
  if (typeof body["deadline_ms"] === "number") {
    body["deadline_ms"] = Math.max(Math.floor(body["deadline_ms"] - (performance.now() - openedMs)), 1);
  }
  if (seed !== undefined) {
    body["seed"] = seed;
    if (stream.assembler.ids.length > 0) body["have"] = stream.assembler.ids;
  }
  const blobs: Uint8Array[] = [];
  for (const name of ["input_ids", "have"]) {
    const ids = body[name];
    if (!Array.isArray(ids) || ids.length <= INLINE_IDS) continue;
    delete body[name];
    body[`${name}_blob`] = blobs.length;
    blobs.push(packIds(ids as number[]));
  }
  return [body, blobs];
}

/** An element of TOKENS `events`: job and token. Throws `bad_frame`. */
export function toToken(event: unknown): [string, Token] {
  const [job, attempt, seq, ids, text] = Array.isArray(event) ? event : [];
  const isWhole = typeof job === "string" && typeof attempt === "number" && typeof text === "string";
  const isPlaced = Number.isInteger(seq) && seq >= 1 && Array.isArray(ids) && ids.length > 0;
  if (!isWhole || !isPlaced || !ids.every((id: unknown) => Number.isInteger(id))) {
    throw new TokenbusError("bad_frame", "event is not [job, attempt, seq, ids, text]");
  }
  return [job, { attempt, seq, ids, text }];
}

/** ACCEPTED of this worker. */
export function toStarted(body: Body, worker: string): Started {
  const promptTokens = Number(body["prompt_tokens"]);
  return { attempt: Number(body["attempt"]), worker, seed: Number(body["seed"]), promptTokens };
}

export function toDone(body: Body): Done {
  const reason = body["reason"] as Done["reason"];
  return { reason, seq: Number(body["seq"]), usage: toUsage(body["usage"]), crc: Number(body["crc"]) };
}

/** What a body about a job says of its state. */
export function toStatus(body: Body): JobStatus {
  const status: JobStatus = {
    job: String(body["job"]), state: String(body["state"] ?? ""), attempt: Number(body["attempt"] ?? 0),
    seq: Number(body["seq"] ?? 0),
  };
  if (typeof body["reason"] === "string") status.reason = body["reason"];
  if (typeof body["code"] === "string") status.code = body["code"];
  return status;
}
