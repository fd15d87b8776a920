// Drives the TypeScript client against a daemon that is killed meanwhile.

import {
  Client,
  Conflict,
  ConnectionFailed,
  Invalid,
  NotFound,
  Problem,
  RunNotCompleted,
  type RunRequest,
  type RunEvent,
  UnexpectedResponse,
  WaitTimeout,
} from "axed-client";

declare const process: { argv: string[] };
const [url = "", control = ""] = process.argv.slice(2);
const restart = (): Promise<Response> => fetch(control, { method: "POST" });

function assert(holds: unknown, what: unknown = "it does not hold"): asserts holds {
  if (!holds) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

async function failsWith<T extends Error>(kind: abstract new (...args: never[]) => T, call: Promise<unknown>): Promise<T> {
  try {
    await call;
  } catch (error) {
    assert(error instanceof kind, `${error}`);
    return error;
  }
  throw new Error(`no ${kind.name}`);
}

async function collect<T>(items: AsyncIterable<T>): Promise<T[]> {
  const all: T[] = [];
  for await (const item of items) all.push(item);
  return all;
}

const client = new Client({ url });
assert((await client.agents()).some((agent) => agent.name === "quick"));
const quick = await client.run("quick", { input: "go", labels: { team: "green" } });
assert(quick.content === "done", quick);

// The daemon is killed in the middle of a stream and of a wait.
const stream = client.stream("slow", "go");
const events: RunEvent[] = [];
for await (const event of stream) {
  events.push(event);
  if (event.type === "tool.completed" && event.turn === 2) await restart();
}
const streamed = await client.get(stream.run ?? "");
const numbers = events.flatMap((event) => event.seq ?? []);
assert(numbers.length === streamed.last_event && numbers.every((seq, index) => seq === index + 1), numbers);
assert(events.at(-1)?.type === "run.completed" && streamed.content === "the\u2028final\u0085text", streamed);
assert(events.some((event) => event.type === "text.delta"));
assert((await collect(client.events(streamed.id, { after: stream.lastEvent }))).length === 0);
const first: string[] = [];
for await (const event of client.events(streamed.id)) {
  first.push(event.type);
  break;
}
assert(first[0] === "run.queued", first);
const waited = await client.start("slow", "go");
const [done] = await Promise.all([client.wait(waited.id, { timeout: 60_000 }), restart()]);
assert(done.status === "completed", done);

// Responses are lost: each call takes effect once.
const keys: string[] = [];
const seen = new Set<string>();
const unreliable = new Client({
  url,
  fetch: async (input, init) => {
    const response = await fetch(input, init);
    const key = new Headers(init?.headers).get("idempotency-key");
    if (key !== null) keys.push(key);
    const kind = `${init?.method}${String(input).includes("wait=") ? "?wait" : ""}`;
    if (seen.has(kind)) return response;
    seen.add(kind);
    await response.text();
    if (kind === "GET?wait") return new Response("<html>gateway timeout</html>", { status: 504 });
    throw new TypeError("fetch failed");
  },
});
const before = (await collect(client.runs({ agent: "quick" }))).length;
const once = await unreliable.run("quick", "go");
assert((await collect(client.runs({ agent: "quick" }))).length === before + 1);
assert(keys.length === 2 && keys[0] === keys[1], keys);
await unreliable.delete(once.id);
await failsWith(NotFound, client.delete(once.id));

// Approvals, messages, forks and pages.
const started = await client.start("careful", "go");
const careful = await client.wait(started.id, { untilApproval: true });
const [pending] = await collect(client.approvals({ root: careful.id }));
assert(pending && pending.tool_call_id === careful.pending_approvals[0]?.tool_call_id);
const invalid = await failsWith(
  Invalid,
  client.approve(pending.run_id, pending.tool_call_id, { arguments: { path: 1 } }),
);
assert(invalid.code === "invalid_field" && invalid.errors[0]?.pointer === "/arguments", invalid);
await client.pause(careful.id);
await client.resume(careful.id);
for (let attempt = 0; attempt < 2; attempt++) {
  const decision = { arguments: { path: "other.md", content: "x" } };
  await client.approve(pending.run_id, pending.tool_call_id, decision, { idempotencyKey: "once" });
}
const approved = await client.wait(careful.id, { timeout: 30_000 });
assert(approved.content?.includes("wrote 1 bytes to other.md"), approved);
await failsWith(Conflict, client.approve(pending.run_id, pending.tool_call_id));
const asking = await client.wait((await client.start("asking", "go")).id, { untilInput: true });
const [question] = await collect(client.inputs({ root: asking.id }));
assert(question && question.id === asking.pending_inputs[0]?.id && asking.wait?.reason === "input");
await failsWith(Invalid, client.answer(question.run_id, question.id, "three"));
await client.answer(question.run_id, question.id, 3, { idempotencyKey: "once" });
await failsWith(Conflict, client.decline(question.run_id, question.id, "too late"));
assert((await client.wait(asking.id, { timeout: 30_000 })).content === "A person answered: 3");
assert((await client.score(approved.id, "tone", "friendly", { turn: 1 })).value === "friendly");
assert((await client.get(approved.id)).scores["tone"]?.counts?.["friendly"] === 1);
assert((await client.feedbackLink(approved.id, "thumbs", 60)).url.includes("/feedback/"));
const cases = ["a", "b", "c"].map((id) => ({ id, input: id }));
const accepted = await client.createEval({ agent: "quick", against: "wordy", cases, gates: ["short.mean >= 1"] });
assert(accepted.planned === 6 && accepted.result === null);
const evaluated = await client.waitForEval(accepted.id, { timeout: 60_000 });
assert(evaluated.state === "completed" && (await client.getEval(accepted.id)).ended === 6, evaluated);
assert(evaluated.result?.scorers["short"]?.wins === 3 && evaluated.result.gates[0]?.held, evaluated.result);
const compared = (await collect(client.evalCases(accepted.id))).map((it) => `${it.case}${it.runs.length}`);
assert(compared.join() === "a2,b2,c2", compared);
const abandoned = await client.createEval({ agent: "endless", cases, tools: "live" });
assert((await client.waitForEval(abandoned.id, { timeout: 1500 })).finished_at === null);
await client.cancelEval(abandoned.id, "enough");
assert((await client.waitForEval(abandoned.id)).reason === "enough");
assert((await collect(client.evals({ agent: "endless" })))[0]?.id === abandoned.id);
const roles = (await collect(client.messages(careful.id))).map((message) => message["role"]);
assert(roles.slice(0, 3).join() === "user,assistant,tool", roles);
assert((await client.turn(careful.id, 1)).turn === (await client.turns(careful.id))[0]?.turn);
const fork = await client.fork(careful.id, { at: { turn: 2 } });
assert((await client.wait(fork.id, { timeout: 30_000 })).forked_from?.run === careful.id);
assert((await client.tree(fork.id)).children.length === (await collect(client.children(fork.id))).length);
const ids = (await collect(client.runs({ limit: 1 }))).map((run) => run.id);
assert(ids.length >= 5 && new Set(ids).size === ids.length, ids);
assert((await collect(client.runs({ labels: { team: "green" } }))).length === 1);

// What goes wrong.
const endless = await client.start("endless", "go");
const timeout = await failsWith(WaitTimeout, client.wait(endless.id, { timeout: 1500 }));
assert(timeout.run.id === endless.id && timeout.name === "WaitTimeout");
assert((await client.addMessage(endless.id, "be brief")).number === 1);
const stopped = new AbortController();
setTimeout(() => stopped.abort(), 100);
await failsWith(DOMException, client.wait(endless.id, { signal: stopped.signal }));
await client.cancel(endless.id, "enough");
assert((await client.wait(endless.id)).cancel_reason === "enough");
const failed = await failsWith(RunNotCompleted, client.run("failing", "go"));
assert(failed.run.error?.code === "provider_bad_request", failed.run);
assert((await failsWith(NotFound, client.start("nobody"))).code === "agent_not_found");
const unknown = await failsWith(Problem, client.start("quick", { inptu: "x" } as object));
assert(unknown.code === "unknown_field" && unknown.requestId, unknown);
await failsWith(ConnectionFailed, new Client({ url: "http://127.0.0.1:9", retryTime: 500 }).get("run_x"));
await failsWith(TypeError, new Client({ url: "nowhere" }).get("run_x"));

// Other servers, and a daemon that is away. The last response comes again and again.
function answering(retryTime: number, ...responses: (() => Response)[]): Client {
  let next = 0;
  return new Client({
    retryTime,
    fetch: async () => {
      const respond = responses[Math.min(next++, responses.length - 1)];
      return respond ? respond() : new Response(null, { status: 500 });
    },
  });
}
const away = (): Response => {
  throw new TypeError("fetch failed");
};
const location = "https://axed.example.com/runs/run_x?token=secret";
const redirecting = answering(0, () => new Response("", { status: 307, headers: { location } }));
for (const call of [redirecting.get("run_x"), collect(redirecting.events("run_x"))]) {
  const { status, message } = await failsWith(Problem, call);
  assert(status === 307 && message.includes("https://axed.example.com/runs/run_x"), message);
  assert(!message.includes("secret"), message);
}
const page = answering(60_000, () => new Response("<h1>It works</h1>", { headers: { "content-type": "text/html" } }));
await failsWith(UnexpectedResponse, page.get("run_x"));
await failsWith(UnexpectedResponse, collect(page.events("run_x")));
for (const body of [{ status: "ok" }, {}, []]) {
  await failsWith(UnexpectedResponse, answering(60_000, () => Response.json(body)).wait("run_x"));
}
const beforeWaits = performance.now();
await failsWith(ConnectionFailed, answering(60_000, away).wait("run_x", { timeout: 500 }));
await failsWith(ConnectionFailed, answering(60_000, away).run("quick", "go", { timeout: 500 }));
const running = (): Response => Response.json({ id: "run_x", status: "running", pending_approvals: [] });
await failsWith(WaitTimeout, answering(60_000, running, away).wait("run_x", { timeout: 1500 }));
for (const status of [429, 502, 503, 504]) {
  const failing = (): Response => new Response("<html>no upstream</html>", { status, headers: { "retry-after": "3600" } });
  await failsWith(WaitTimeout, answering(60_000, running, failing).wait("run_x", { timeout: 1500 }));
}
// A decision is repeated also if it may have arrived.
for (const lost of [away, (): Response => new Response("", { status: 502 })]) {
  assert((await answering(60_000, lost, running).approve("run_x", "call_1")).status === "running");
}
const missing = (): Response => new Response("", { status: 404 });
await failsWith(NotFound, answering(60_000, running, missing).wait("run_x", { timeout: 1500 }));
assert(performance.now() - beforeWaits < 60_000);

// A stream that is silent for longer than the client tries again, before its connection breaks.
const eventText = (seq: number, type: string): string =>
  `data: ${JSON.stringify({ type, seq, run_id: "run_x", root_id: "run_x" })}\n\n`;
const eventStream = (body: BodyInit): Response =>
  new Response(body, { headers: { "content-type": "text/event-stream" } });
const broken = (): Response => {
  const chunks = [eventText(1, "run.started"), ...Array<string>(4).fill(": the run continues\n\n")];
  const pull = async (controller: ReadableStreamDefaultController<Uint8Array>): Promise<void> => {
    await new Promise((resolve) => setTimeout(resolve, 200));
    const chunk = chunks.shift();
    if (chunk === undefined) controller.error(new TypeError("terminated"));
    else controller.enqueue(new TextEncoder().encode(chunk));
  };
  return eventStream(new ReadableStream({ pull }));
};
const resumed = answering(500, away, broken, () => eventStream(eventText(2, "run.completed"))).events("run_x");
await new Promise((resolve) => setTimeout(resolve, 600));
assert((await collect(resumed)).map((event) => event.seq).join() === "1,2");
// A proxy that closes at once, also after a comment of its own.
for (const body of ["", ": keep-alive\n\n"]) {
  await failsWith(ConnectionFailed, collect(answering(500, () => eventStream(body)).events("run_x")));
}

// A large body takes its time. The client's clocks are 50 times faster here.
const [realTimeout, realSignal] = [setTimeout, AbortSignal.timeout];
const slow = (respond: () => Response): Client =>
  new Client({
    retryTime: 0,
    fetch: (_, init) =>
      new Promise((resolve, reject) => {
        init?.signal?.addEventListener("abort", () => reject(init.signal?.reason));
        realTimeout(() => resolve(respond()), 1000);
      }),
  });
Object.assign(globalThis, {
  setTimeout: (callback: () => void, milliseconds: number) => realTimeout(callback, milliseconds / 50),
});
AbortSignal.timeout = (milliseconds) => realSignal.call(AbortSignal, Math.ceil(milliseconds / 50));
const large = "x".repeat(20_000_000);
assert((await slow(running).start("quick", large)).id === "run_x");
assert((await collect(slow(() => eventStream(eventText(1, "run.completed"))).stream("quick", large))).length === 1);
await failsWith(ConnectionFailed, slow(running).start("quick", "small"));
Object.assign(globalThis, { setTimeout: realTimeout });
AbortSignal.timeout = realSignal;

// Input for an agent with an `input_schema`.
const structured: RunRequest = { input: { team: "blue" } };
assert((await failsWith(Problem, client.start("quick", structured))).status === 422);
console.log("clients: TypeScript: streams and waits over restarts, lost responses, approvals, forks, errors");
