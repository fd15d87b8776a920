// The client: each method is one operation of the daemon.

import { type Attempt, type Call, type QueryValue, RETRIED, encode, isLost } from "./call.js";
import {
  ConnectionFailed,
  NotFound,
  Problem,
  RunNotCompleted,
  UnexpectedResponse,
  WaitTimeout,
  parsed,
  problemOf,
} from "./errors.js";
import { FIRST_PAUSE, Retries, sleep } from "./retries.js";
import { RunStream } from "./run_stream.js";
import type {
  AddedMessage,
  AgentSummary,
  CallOutcome,
  ChildRun,
  Eval,
  EvalCase,
  EvalRequest,
  FeedbackLink,
  ForkRequest,
  MessageContent,
  PendingApproval,
  PendingQuestion,
  Run,
  RunRequest,
  RunTree,
  Score,
  Turn,
  TurnDetail,
} from "./types.js";

/** One request waits at most this many seconds: proxies often give up after 30 or 60. */
const WAIT_SECONDS = 20;
/** Other answers come at once. */
const READ_TIMEOUT = 30_000;
/** Bytes of a body for each millisecond, about 1 Mbit/s: `fetch` does not report how far a slower upload is. */
const UPLOAD_RATE = 128;
/** A response may be this late after the end of a call's time. */
const GRACE = 1000;
const ENDED = ["completed", "failed", "cancelled"];

export interface ClientOptions {
  /** Default: `http://127.0.0.1:8080`. */
  url?: string;
  key?: string;
  /** How many milliseconds a request is sent again while the daemon does not answer: longer than a restart takes. */
  retryTime?: number;
  fetch?: typeof fetch;
}

export interface CallOptions {
  /** Ends the call, not the run. */
  signal?: AbortSignal;
}

export interface StartOptions extends CallOptions {
  /** Default: a new one for each call, kept over its retries. */
  idempotencyKey?: string;
  /** The user's own key of a provider. */
  providerKey?: { provider: string; key: string };
}

export interface WaitOptions extends CallOptions {
  /** In milliseconds; default: none. */
  timeout?: number;
  /** Also return if calls wait for approval. */
  untilApproval?: boolean;
  /** Also return if questions wait for an answer. */
  untilInput?: boolean;
}

export class Client {
  private readonly url: string;
  private readonly key: string | undefined;
  private readonly fetch: typeof fetch;
  /** @internal */
  readonly retryTime: number;

  constructor(options: ClientOptions = {}) {
    this.url = (options.url ?? "http://127.0.0.1:8080").replace(/\/+$/, "");
    this.key = options.key;
    this.retryTime = options.retryTime ?? 60_000;
    this.fetch = options.fetch ?? ((input, init) => fetch(input, init));
  }

  /** Starts a run and returns it as soon as it is recorded. */
  start(agent: string, input: MessageContent | RunRequest = {}, options: StartOptions = {}): Promise<Run> {
    return this.json<Run>(startCall(agent, input, options), options);
  }

  /**
   * Starts a run and waits for its end. Throws `RunNotCompleted` if it fails or is cancelled, `WaitTimeout` if it has
   * not ended in time.
   */
  async run(
    agent: string,
    input: MessageContent | RunRequest = {},
    options: StartOptions & WaitOptions = {},
  ): Promise<Run> {
    const giveUpAt = endOf(options);
    const call = { ...startCall(agent, input, options), giveUpAt };
    const started = asRun(call, await this.send(call, options));
    const { untilApproval: _, untilInput: __, ...waitOptions } = options;
    const run = await this.waitUntil(giveUpAt, started.id, waitOptions, started);
    if (run.status !== "completed") throw new RunNotCompleted(run);
    return run;
  }

  /** Starts a run with streamed replies and returns its events, over restarts of the daemon. */
  stream(agent: string, input: MessageContent | RunRequest = {}, options: StartOptions = {}): RunStream {
    return new RunStream(this, { start: startCall(agent, input, options), signal: options.signal });
  }

  /**
   * The events of a run after the one with the number `after`, until the run ends. With the scope `self` without those
   * of its descendants.
   */
  events(run: string, options: CallOptions & { after?: number; scope?: "tree" | "self" } = {}): RunStream {
    return new RunStream(this, { run, ...options });
  }

  /** Waits until the run has ended, with as many requests as it takes. */
  wait(run: string, options: WaitOptions = {}): Promise<Run> {
    return this.waitUntil(endOf(options), run, options);
  }

  /** `found` is the last known state of the run. */
  private async waitUntil(giveUpAt: number, run: string, options: WaitOptions, found?: Run): Promise<Run> {
    let seconds = 0;
    for (;;) {
      const timeout = READ_TIMEOUT + seconds * 1000;
      const call: Call = { method: "GET", path: `/runs/${encode(run)}`, timeout, giveUpAt };
      if (seconds >= 1) call.query = { wait: Math.floor(seconds) };
      const isShortOfTime = giveUpAt - performance.now() < this.retryTime;
      try {
        found = asRun(call, await this.send(call, options));
        const isPending =
          (options.untilApproval === true && found.pending_approvals.length > 0) ||
          (options.untilInput === true && found.pending_inputs.length > 0);
        if (ENDED.includes(found.status) || isPending) return found;
      } catch (error) {
        const isAway = error instanceof Problem ? RETRIED.includes(error.status) : error instanceof ConnectionFailed;
        if (!isAway || !found || !isShortOfTime) throw error;
        const pause = Math.max(FIRST_PAUSE, error instanceof Problem ? (error.retryAfter ?? 0) * 1000 : 0);
        await sleep(Math.max(0, Math.min(pause, giveUpAt - performance.now())), options.signal);
      }
      const remaining = (giveUpAt - performance.now()) / 1000;
      if (remaining <= 0) throw new WaitTimeout(found);
      seconds = Math.min(WAIT_SECONDS, remaining);
      // The daemon waits for whole seconds.
      if (seconds < 1) await sleep(seconds * 1000, options.signal);
    }
  }

  get(run: string, options: CallOptions = {}): Promise<Run> {
    return this.json<Run>({ method: "GET", path: `/runs/${encode(run)}` }, options);
  }

  /** Cancels a run with its descendants. It may still be `cancelling` afterwards. */
  cancel(run: string, reason?: string, options: CallOptions = {}): Promise<Run> {
    const body = reason === undefined ? {} : { reason };
    return this.json<Run>({ method: "POST", path: `/runs/${encode(run)}/cancel`, body }, options);
  }

  /** Scores a run that has ended. Another score of this name replaces it. */
  score(
    run: string,
    name: string,
    value: number | boolean | string,
    options: CallOptions & { comment?: string; turn?: number } = {},
  ): Promise<Score> {
    const { comment, turn } = options;
    const body = { name, value, comment, turn };
    return this.json<Score>({ method: "POST", path: `/runs/${encode(run)}/scores`, body }, options);
  }

  /** A URL that scores the run by `POST` without a key. `expiresIn`: seconds, or a text such as "7d". */
  feedbackLink(run: string, name: string, expiresIn: number | string, options: CallOptions = {}): Promise<FeedbackLink> {
    const body = { name, expires_in: expiresIn };
    return this.json<FeedbackLink>({ method: "POST", path: `/runs/${encode(run)}/feedback-links`, body }, options);
  }

  /** Evaluates an agent over the cases of a dataset. It is sent once, without repetition. */
  createEval(request: EvalRequest, options: CallOptions = {}): Promise<Eval> {
    return this.json<Eval>({ method: "POST", path: "/evals", body: request, once: true }, options);
  }

  getEval(id: string, options: CallOptions = {}): Promise<Eval> {
    return this.json<Eval>({ method: "GET", path: `/evals/${encode(id)}` }, options);
  }

  /** Waits for the end of an evaluation. `finished_at` is null if the time was over before. */
  async waitForEval(id: string, options: CallOptions & { timeout?: number } = {}): Promise<Eval> {
    const remaining = (until: number): number => Math.max(0, (until - performance.now()) / 1000);
    const giveUpAt = endOf(options);
    for (;;) {
      const wait = Math.floor(Math.min(WAIT_SECONDS, remaining(giveUpAt)));
      const call: Call = { method: "GET", path: `/evals/${encode(id)}`, timeout: READ_TIMEOUT + wait * 1000 };
      if (wait > 0) call.query = { wait };
      const found = await this.json<Eval>(call, options);
      if (found.finished_at !== null || remaining(giveUpAt) < 1) return found;
    }
  }

  /** Cancels an evaluation. Its runs may still have to end afterwards. */
  cancelEval(id: string, reason?: string, options: CallOptions = {}): Promise<Eval> {
    const body = reason === undefined ? {} : { reason };
    return this.json<Eval>({ method: "POST", path: `/evals/${encode(id)}/cancel`, body }, options);
  }

  pause(run: string, options: CallOptions = {}): Promise<Run> {
    return this.json<Run>({ method: "POST", path: `/runs/${encode(run)}/pause` }, options);
  }

  resume(run: string, options: CallOptions = {}): Promise<Run> {
    return this.json<Run>({ method: "POST", path: `/runs/${encode(run)}/resume` }, options);
  }

  /** Starts a run from a part of another. */
  fork(run: string, request: ForkRequest = {}, options: StartOptions = {}): Promise<Run> {
    const headers = idempotency(options);
    return this.json<Run>({ method: "POST", path: `/runs/${encode(run)}/fork`, body: request, headers }, options);
  }

  /** Adds a user message to a run that has not ended. */
  addMessage(run: string, content: MessageContent, options: StartOptions = {}): Promise<AddedMessage> {
    const headers = idempotency(options);
    const path = `/runs/${encode(run)}/messages`;
    return this.json<AddedMessage>({ method: "POST", path, body: { content }, headers }, options);
  }

  /** Approves a tool call, with other arguments if they are given. */
  approve(
    run: string,
    toolCall: string,
    decision: { arguments?: Record<string, unknown>; reason?: string } = {},
    options: StartOptions = {},
  ): Promise<Run> {
    return this.decide(run, toolCall, { decision: "approve", ...decision }, options);
  }

  /** Denies a tool call. The model gets the reason. */
  deny(run: string, toolCall: string, reason?: string, options: StartOptions = {}): Promise<Run> {
    return this.decide(run, toolCall, { decision: "deny", reason }, options);
  }

  /** Answers a question. The first answer wins. */
  answer(run: string, input: string, answer: unknown, options: StartOptions = {}): Promise<Run> {
    return this.answerInput(run, input, { answer }, options);
  }

  /** Declines to answer a question. The model gets the reason. */
  decline(run: string, input: string, reason: string, options: StartOptions = {}): Promise<Run> {
    return this.answerInput(run, input, { decline: reason }, options);
  }

  /** Says whether a call was done whose end is not known; `result` is what it returned. The first answer wins. */
  reconcile(run: string, call: string, outcome: CallOutcome, result: unknown = "", options: StartOptions = {}): Promise<Run> {
    const body = outcome === "done" ? { outcome, result } : { outcome };
    const path = `/runs/${encode(run)}/calls/${encode(call)}`;
    return this.json<Run>({ method: "POST", path, body, headers: idempotency(options) }, options);
  }

  /** Wakes the runs that wait for this event, and returns their number. With `id` it counts once. */
  async publish(event: string, key: string, data: unknown = null, options: CallOptions & { id?: string } = {}): Promise<number> {
    const { id, ...rest } = options;
    const body = id === undefined ? { event, key, data } : { event, key, data, id };
    return (await this.json<{ woken: number }>({ method: "POST", path: "/events", body }, rest)).woken;
  }

  /** Deletes a root run that has ended, with its tree. */
  async delete(run: string, options: CallOptions = {}): Promise<void> {
    let attempts = 0;
    try {
      await this.send({ method: "DELETE", path: `/runs/${encode(run)}` }, options, () => attempts++);
    } catch (error) {
      // A repetition that finds nothing has deleted it before.
      if (!(error instanceof NotFound) || attempts < 2) throw error;
    }
  }

  tree(run: string, options: CallOptions = {}): Promise<RunTree> {
    return this.json<RunTree>({ method: "GET", path: `/runs/${encode(run)}/tree` }, options);
  }

  async turns(run: string, options: CallOptions = {}): Promise<Turn[]> {
    const page = await this.json<{ data: Turn[] }>({ method: "GET", path: `/runs/${encode(run)}/turns` }, options);
    return page.data;
  }

  /** A turn with its request and its reply. */
  turn(run: string, turn: number, options: CallOptions = {}): Promise<TurnDetail> {
    return this.json<TurnDetail>({ method: "GET", path: `/runs/${encode(run)}/turns/${turn}` }, options);
  }

  async agents(options: CallOptions = {}): Promise<AgentSummary[]> {
    return (await this.json<{ data: AgentSummary[] }>({ method: "GET", path: "/agents" }, options)).data;
  }

  /** Runs, newest first, over all pages. The other filters are those of the list, such as `agent` or `status`. */
  runs(
    filters: { labels?: Record<string, string>; [filter: string]: QueryValue | Record<string, string> } = {},
    options: CallOptions = {},
  ): AsyncGenerator<Run, void, undefined> {
    const { labels, ...others } = filters;
    const query = others as Record<string, QueryValue>;
    for (const [name, value] of Object.entries(labels ?? {})) query[`label.${name}`] = value;
    return this.pages<Run>("/runs", query, "cursor", options);
  }

  children(run: string, options: CallOptions = {}): AsyncGenerator<ChildRun, void, undefined> {
    return this.pages<ChildRun>(`/runs/${encode(run)}/children`, {}, "cursor", options);
  }

  /** The tool calls that wait for approval, oldest runs first. */
  approvals(filters: { root?: string } = {}, options: CallOptions = {}): AsyncGenerator<PendingApproval, void, undefined> {
    return this.pages<PendingApproval>("/approvals", { ...filters }, "cursor", options);
  }

  /** The questions that wait for an answer, oldest runs first. */
  inputs(filters: { root?: string } = {}, options: CallOptions = {}): AsyncGenerator<PendingQuestion, void, undefined> {
    return this.pages<PendingQuestion>("/inputs", { ...filters }, "cursor", options);
  }

  /** Evaluations without their results, newest first, over all pages. */
  evals(filters: { agent?: string } = {}, options: CallOptions = {}): AsyncGenerator<Eval, void, undefined> {
    return this.pages<Eval>("/evals", { ...filters }, "cursor", options);
  }

  /** The cases of an evaluation with their runs, over all pages. */
  evalCases(id: string, options: CallOptions = {}): AsyncGenerator<EvalCase, void, undefined> {
    return this.pages<EvalCase>(`/evals/${encode(id)}/cases`, {}, "cursor", options);
  }

  /** The conversation of a run, over all pages. */
  messages(run: string, options: CallOptions = {}): AsyncGenerator<Record<string, unknown>, void, undefined> {
    return this.pages<Record<string, unknown>>(`/runs/${encode(run)}/messages`, {}, "after", options);
  }

  private async *pages<T>(
    path: string,
    query: Record<string, QueryValue>,
    parameter: "cursor" | "after",
    options: CallOptions,
  ): AsyncGenerator<T, void, undefined> {
    let position: string | number | null = null;
    do {
      type Page = { data: T[]; next_cursor?: string | null; next_after?: number | null };
      const page: Page = await this.json<Page>({ method: "GET", path, query: { ...query, [parameter]: position } }, options);
      yield* page.data;
      position = page[`next_${parameter}`] ?? null;
    } while (position !== null);
  }

  private decide(run: string, toolCall: string, body: unknown, options: StartOptions): Promise<Run> {
    const headers = idempotency(options);
    const path = `/runs/${encode(run)}/approvals/${encode(toolCall)}`;
    return this.json<Run>({ method: "POST", path, body, headers }, options);
  }

  private answerInput(run: string, input: string, body: unknown, options: StartOptions): Promise<Run> {
    const headers = idempotency(options);
    const path = `/runs/${encode(run)}/inputs/${encode(input)}`;
    return this.json<Run>({ method: "POST", path, body, headers }, options);
  }

  private async json<T>(call: Call, options: CallOptions): Promise<T> {
    return (await this.send(call, options)) as T;
  }

  /** Sends a request until there is a response that another attempt would not change, and reads it. */
  private async send(call: Call, options: CallOptions, onAttempt?: () => void): Promise<unknown> {
    const remaining = (): number => Math.max(0, (call.giveUpAt ?? Infinity) - performance.now());
    const retries = new Retries(call.once ? 0 : Math.min(this.retryTime, remaining()));
    const attempt = this.prepare(call);
    for (;;) {
      onAttempt?.();
      let pause: number | undefined;
      try {
        const milliseconds = Math.min((call.timeout ?? READ_TIMEOUT) + attempt.uploadTime, remaining() + GRACE);
        const timeout = AbortSignal.timeout(Math.ceil(milliseconds));
        const signal = options.signal ? AbortSignal.any([options.signal, timeout]) : timeout;
        const response = await attempt.send(signal);
        if (response.ok) {
          const text = await response.text();
          return text === "" ? undefined : parsed(text, `${call.method} ${call.path}`);
        }
        const problem = await problemOf(response);
        pause = RETRIED.includes(problem.status) ? retries.nextPause(problem.retryAfter) : undefined;
        if (pause === undefined) throw problem;
      } catch (error) {
        options.signal?.throwIfAborted();
        if (!isLost(error)) throw error;
        pause = retries.nextPause();
        if (pause === undefined) throw new ConnectionFailed(`${call.method} ${call.path}: ${error}`, { cause: error });
      }
      await sleep(pause, options.signal);
    }
  }

  /** @internal */
  prepare(call: Call): Attempt {
    const url = new URL(this.url + call.path);
    for (const [name, value] of Object.entries(call.query ?? {})) {
      if (value !== undefined && value !== null) url.searchParams.set(name, String(value));
    }
    const headers = new Headers(call.headers ?? []);
    if (this.key !== undefined) headers.set("authorization", `Bearer ${this.key}`);
    // A redirect that is followed may lose the key, and the method and the body of a POST.
    const init: RequestInit = { method: call.method, headers, redirect: "manual" };
    let uploadTime = 0;
    if (call.body !== undefined) {
      headers.set("content-type", "application/json");
      const body = JSON.stringify(call.body);
      init.body = body;
      uploadTime = body.length / UPLOAD_RATE;
    }
    return { send: (signal) => this.fetch(url, { ...init, signal }), uploadTime };
  }
}

function endOf(options: WaitOptions): number {
  return performance.now() + (options.timeout ?? Infinity);
}

function asRun(call: Call, body: unknown): Run {
  const run = body as Run | null | undefined;
  // Later versions may have more statuses.
  if (typeof run?.id === "string" && typeof run.status === "string") return run;
  throw new UnexpectedResponse(`${call.method} ${call.path}: not a run: ${JSON.stringify(body)?.slice(0, 100)}`);
}

function startCall(agent: string, input: MessageContent | RunRequest, options: StartOptions): Call {
  const body = typeof input === "string" || Array.isArray(input) ? { input } : input;
  const headers = idempotency(options);
  const own = options.providerKey;
  if (own) headers.push(["x-provider-key", `${own.provider}=${own.key}`]);
  return { method: "POST", path: `/agents/${encode(agent)}/runs`, body, headers };
}

/** One key for all attempts of a call, so that it takes effect once. */
function idempotency(options: StartOptions): [string, string][] {
  return [["idempotency-key", options.idempotencyKey ?? crypto.randomUUID()]];
}
