// Why a call failed.

import type { Run } from "./types.js";

/** The base of all errors of this package. */
export class AxedError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The daemon could not be reached within `retryTime`, or a request that must not be repeated was interrupted. */
export class ConnectionFailed extends AxedError {}

/** The response is not one of the daemon: the URL may be that of another server. */
export class UnexpectedResponse extends AxedError {}

/** The run has not ended in time. It continues. */
export class WaitTimeout extends AxedError {
  constructor(readonly run: Run) {
    super(`${run.id} is still ${run.status}`);
  }
}

/** The run failed or was cancelled. */
export class RunNotCompleted extends AxedError {
  constructor(readonly run: Run) {
    const reason = run.error ? `${run.error.code}: ${run.error.message}` : run.cancel_reason;
    super(`${run.id} ${run.status}` + (reason ? `: ${reason}` : ""));
  }
}

/** The daemon refused a request. */
export class Problem extends AxedError {
  /** Stable; the other texts are for people. */
  readonly code: string;
  readonly detail: string;
  /** The invalid fields. */
  readonly errors: { pointer: string; detail: string }[];
  readonly requestId: string | undefined;

  constructor(
    readonly status: number,
    body: Record<string, unknown>,
    /** In seconds. */
    readonly retryAfter: number | undefined,
  ) {
    const code = String(body["code"] ?? "");
    const detail = String(body["detail"] ?? "");
    super(`${status}${code && ` ${code}`}: ${detail}`);
    this.code = code;
    this.detail = detail;
    this.errors = (body["errors"] as { pointer: string; detail: string }[] | undefined) ?? [];
    this.requestId = body["request_id"] as string | undefined;
  }
}

/** 401: the key is missing or wrong. */
export class Unauthorized extends Problem {}
/** 403: the key lacks a scope. */
export class Forbidden extends Problem {}
/** 404: there is no such agent or run for this key. */
export class NotFound extends Problem {}
/** 409: the run or the call is in another state. */
export class Conflict extends Problem {}
/** 422: a field is invalid. */
export class Invalid extends Problem {}
/** 429: the queue is full, or a budget is used up. */
export class TooManyRequests extends Problem {}
/** 503: the daemon stops, or its store fails. */
export class Unavailable extends Problem {}

const CLASSES: Record<number, typeof Problem> = {
  401: Unauthorized,
  403: Forbidden,
  404: NotFound,
  409: Conflict,
  422: Invalid,
  429: TooManyRequests,
  503: Unavailable,
};

export function parsed(json: string, source: string): unknown {
  try {
    return JSON.parse(json);
  } catch (error) {
    throw new UnexpectedResponse(`${source}: not JSON: ${json.slice(0, 100)}`, { cause: error });
  }
}

/** The error of a response, which may be that of a proxy. */
export async function problemOf(response: Response): Promise<Problem> {
  // Browsers do not show the status of a redirect.
  if (response.type === "opaqueredirect" || (response.status >= 300 && response.status < 400)) {
    // A query may have secrets.
    const target = response.headers.get("location")?.split("?")[0] ?? "another address";
    const detail = `redirected to ${target}, which the client does not follow`;
    return new Problem(response.status, { detail }, undefined);
  }
  const text = await response.text();
  let body: Record<string, unknown> = { detail: text.slice(0, 200).trim() };
  try {
    const json: unknown = JSON.parse(text);
    if (json !== null && typeof json === "object") body = json as Record<string, unknown>;
  } catch {
    // It is no JSON.
  }
  const seconds = Number(response.headers.get("retry-after") ?? NaN);
  const retryAfter = Number.isFinite(seconds) ? Math.max(0, seconds) : undefined;
  return new (CLASSES[response.status] ?? Problem)(response.status, body, retryAfter);
}
