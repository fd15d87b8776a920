// One request, and when it is sent again.

/** Responses that another attempt may change. */
export const RETRIED = [429, 502, 503, 504];

export type QueryValue = string | number | boolean | null | undefined;

export interface Call {
  method: string;
  path: string;
  query?: Record<string, QueryValue>;
  body?: unknown;
  headers?: [string, string][];
  timeout?: number;
  /** By `performance.now()`; the last attempt has a second more. */
  giveUpAt?: number;
  /** Whether it is never sent again, because the daemon might do it twice. */
  once?: boolean;
}

/** A request that is ready to be sent, any number of times. */
export interface Attempt {
  send(signal: AbortSignal): Promise<Response>;
  /** How many milliseconds the daemon may take longer to answer, because the body is on its way. */
  uploadTime: number;
}

export function encode(segment: string): string {
  return encodeURIComponent(segment);
}

/** Whether the connection could not be opened, broke, or timed out. */
export function isLost(error: unknown): boolean {
  return error instanceof TypeError || (error instanceof DOMException && error.name === "TimeoutError");
}
