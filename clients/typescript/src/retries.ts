// How long to pause before a request is sent again.

export const FIRST_PAUSE = 200;
const MAX_PAUSE = 5000;

export class Retries {
  private giveUpAt = 0;
  private pause = 0;

  constructor(private readonly retryTime: number) {
    this.restart();
  }

  restart(): void {
    this.giveUpAt = performance.now() + this.retryTime;
    this.pause = FIRST_PAUSE;
  }

  /** In milliseconds; undefined if there is no time for another attempt. */
  nextPause(atLeastSeconds = 0): number | undefined {
    const pause = Math.max(atLeastSeconds * 1000, this.pause * (0.5 + Math.random() / 2));
    this.pause = Math.min(this.pause * 2, MAX_PAUSE);
    return performance.now() + pause < this.giveUpAt ? pause : undefined;
  }
}

/** Rejects with the signal's reason if it is aborted meanwhile. */
export function sleep(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const aborted = (): void => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", aborted);
      resolve();
    }, milliseconds);
    signal?.addEventListener("abort", aborted, { once: true });
  });
}
