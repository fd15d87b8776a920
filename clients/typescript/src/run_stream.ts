// The events of a run, over as many connections as it takes.

import { type Attempt, type Call, RETRIED, encode, isLost } from "./call.js";
import type { Client } from "./client.js";
import { ConnectionFailed, UnexpectedResponse, problemOf } from "./errors.js";
import { EventParser } from "./event_parser.js";
import { Retries, sleep } from "./retries.js";
import type { RunEvent } from "./events.js";

/** A stream without a byte for this long is dead: the daemon sends a comment every ten seconds. */
const SILENCE = 30_000;
/** One that brings a byte after this long works, even if it brings no event: a proxy may send a comment and close. */
const STEADY = 5000;
const ENDS = ["run.completed", "run.failed", "run.cancelled"];

export interface StreamOptions {
  run?: string;
  /** Starts the run. */
  start?: Call;
  after?: number;
  scope?: "tree" | "self";
  signal?: AbortSignal | undefined;
}

/**
 * Iterating reconnects after the last event, so that none is missed or comes twice; only deltas of texts are lost with a
 * connection.
 */
export class RunStream implements AsyncIterable<RunEvent> {
  /** The id of the run; undefined before the first event of a run that the stream starts. */
  run: string | undefined;
  /** The number of the last event, to continue after it with `events(run, { after })`. */
  lastEvent: number;
  private isOver = false;
  private hasWorked = false;
  private readonly retries: Retries;

  constructor(
    private readonly client: Client,
    private readonly options: StreamOptions,
  ) {
    this.run = options.run;
    this.lastEvent = options.after ?? 0;
    this.retries = new Retries(client.retryTime);
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<RunEvent, void, undefined> {
    // The consumer may have waited before it iterates.
    this.retries.restart();
    while (!this.isOver) {
      let cause: unknown;
      const connection = new AbortController();
      const attempt = this.client.prepare(this.call());
      try {
        yield* this.connection(attempt, connection);
      } catch (error) {
        this.options.signal?.throwIfAborted();
        if (!isLost(error) && error !== connection.signal.reason) throw error;
        cause = error;
      } finally {
        // The consumer may have stopped.
        connection.abort();
      }
      if (this.isOver) return;
      if (this.hasWorked) {
        // The time counts from the loss of a connection that worked: it may have been silent, or the consumer slow.
        this.hasWorked = false;
        this.retries.restart();
      }
      const pause = this.retries.nextPause();
      if (pause === undefined) {
        const reason = cause ?? "the connection ended again and again";
        throw new ConnectionFailed(`the events of ${this.run ?? "a new run"}: ${reason}`, { cause });
      }
      await sleep(pause, this.options.signal);
    }
  }

  /** The new events of one connection. */
  private async *connection(
    attempt: Attempt,
    connection: AbortController,
  ): AsyncGenerator<RunEvent, void, undefined> {
    const { signal } = this.options;
    const silent = (): void => connection.abort(new DOMException("no event for a long time", "TimeoutError"));
    let timer = setTimeout(silent, SILENCE + attempt.uploadTime);
    try {
      const both = signal ? AbortSignal.any([signal, connection.signal]) : connection.signal;
      const response = await attempt.send(both);
      clearTimeout(timer);
      timer = setTimeout(silent, SILENCE);
      const openedAt = performance.now();
      if (response.status === 204) this.isOver = true;
      if (!response.ok) {
        const problem = await problemOf(response);
        const pause = RETRIED.includes(problem.status) ? this.retries.nextPause(problem.retryAfter) : undefined;
        if (pause === undefined) throw problem;
        await sleep(pause, signal);
        return;
      }
      const type = response.headers.get("content-type") ?? "";
      if (response.status !== 204 && !type.startsWith("text/event-stream")) {
        throw new UnexpectedResponse(`${response.status} with the type "${type}" instead of a stream of events`);
      }
      const parser = new EventParser();
      const reader = response.body?.getReader();
      for (;;) {
        const read = await reader?.read();
        clearTimeout(timer);
        if (!read || read.done) return;
        timer = setTimeout(silent, SILENCE);
        if (performance.now() - openedAt >= STEADY) this.hasWorked = true;
        for (const event of parser.feed(read.value)) {
          if (this.accept(event)) {
            // The consumer may take its time.
            clearTimeout(timer);
            yield event;
            timer = setTimeout(silent, SILENCE);
          }
          if (this.isOver) return;
        }
      }
    } finally {
      clearTimeout(timer);
    }
  }

  private call(): Call {
    const accept: [string, string] = ["accept", "text/event-stream"];
    const { start, scope } = this.options;
    if (this.run === undefined && start) {
      return { ...start, headers: [...(start.headers ?? []), accept] };
    }
    // After the last event the response is 204.
    const position: [string, string] = ["last-event-id", String(this.lastEvent)];
    const path = `/runs/${encode(this.run ?? "")}/events`;
    return { method: "GET", path, query: { scope: scope ?? "tree" }, headers: [accept, position] };
  }

  /** Whether the event is new. */
  private accept(event: RunEvent): boolean {
    this.run ??= event.root_id;
    if (event.seq !== undefined) {
      if (event.seq <= this.lastEvent) return false;
      this.lastEvent = event.seq;
    }
    this.hasWorked = true;
    if (event.run_id === this.run && ENDS.includes(event.type)) this.isOver = true;
    return true;
  }
}
