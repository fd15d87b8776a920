// What changes while a page is open: events of a run, lists, and conversations.

import { request, send } from "./client.js";
import { bodyOf, fail } from "./forms.js";
import { refresh, replaceAddress, speak, visit } from "./pages.js";

let stop = new AbortController();
let timer = 0;

const sleep = (milliseconds, signal) =>
  new Promise((resolve) => {
    const wait = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(wait), resolve()), { once: true });
  });

/** Yields the events of a run until its tree ends, over lost connections and restarts. `first` is a stream that is open. */
async function* events(run, after, signal, first) {
  const prefix = document.documentElement.dataset.prefix;
  let wait = 500;
  while (!signal.aborted) {
    try {
      const headers = { Accept: "text/event-stream" };
      if (after) headers["Last-Event-ID"] = String(after);
      const response = first ?? (await request(`${prefix}/runs/${run}/events`, { headers, signal }));
      first = undefined;
      if (response.status === 204 || response.status === 404) return connected(true);
      if (!response.ok) throw new Error("not available");
      connected(true);
      wait = 500;
      for await (const event of blocks(response.body)) {
        if (event.id) after = Number(event.id);
        if (event.data) yield event;
      }
    } catch {
      if (signal.aborted) return;
      connected(false);
    }
    await sleep(wait, signal);
    wait = Math.min(wait * 2, 5000);
  }
}

/** The blocks of an event stream. */
async function* blocks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value.replaceAll("\r", "");
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const event = { name: "message", data: "" };
      for (const line of text.slice(0, end).split("\n")) {
        const colon = line.indexOf(":");
        if (colon <= 0) continue;
        const field = line.slice(0, colon);
        const content = line.slice(colon + 1).replace(/^ /, "");
        if (field === "data") event.data += content;
        if (field === "event") event.name = content;
        if (field === "id") event.id = content;
      }
      text = text.slice(end + 2);
      yield event;
    }
  }
}

function connected(is) {
  document.body.toggleAttribute("data-disconnected", !is);
}

const isDelta = (name) => name.startsWith("text.") || name.startsWith("reasoning.");

/** Adds a piece of text to a box; the box follows its end unless somebody scrolled up. */
function append(box, text) {
  const follows = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  box.append(text);
  if (follows) box.scrollTop = box.scrollHeight;
}

const NOTHING = { turn: 0, text: "" };
/** The text of the reply that is being written: as the newest page had it, and what has streamed since. */
let rendered = NOTHING;
let streamed = NOTHING;

/** Where the streamed text begins in that of the page; -1 if there is a gap between them. */
function overlap(page, stream) {
  const at = page.indexOf(stream.slice(0, 200));
  if (at >= 0) return at;
  for (let length = Math.min(page.length, stream.length, 200); length > 0; length--) {
    if (page.endsWith(stream.slice(0, length))) return page.length - length;
  }
  return -1;
}

/** Shows the whole text in a box that is new, or whose turn is over. Returns false if a newer page is needed. */
function showLive(box) {
  const isNew = !("joined" in box.dataset);
  if (isNew && Number(box.dataset.liveText) >= rendered.turn) rendered = { turn: Number(box.dataset.liveText), text: box.textContent };
  const turn = Math.max(rendered.turn, streamed.turn);
  const [page, stream] = [rendered, streamed].map((it) => (it.turn === turn ? it.text : ""));
  const at = page ? overlap(page, stream) : 0;
  box.dataset.joined = "";
  box.dataset.liveText = turn;
  const joined = at >= 0 ? page.slice(0, at) + stream : `${page} … ${stream}`;
  box.textContent = stream ? joined : page;
  box.scrollTop = box.scrollHeight;
  return at >= 0;
}

/** Speaks a streaming text by sentences. Without text, what has not been spoken yet. */
function sentences() {
  let rest = "";
  return (text) => {
    rest += text ?? "";
    const end = text === undefined ? rest.length : Math.max(...[". ", "? ", "! ", "\n"].map((mark) => rest.lastIndexOf(mark))) + 1;
    speak(rest.slice(0, end));
    rest = rest.slice(end);
  };
}

async function followRun(page, signal) {
  const { run, root, after } = page.dataset;
  let pending = false;
  let interval = 300;
  const say = sentences();
  const update = async () => {
    if (pending) return;
    pending = true;
    await sleep(interval, signal);
    pending = false;
    if (signal.aborted) return;
    const began = performance.now();
    await refresh().catch(() => {});
    // A page that takes long to render is fetched less often.
    interval = Math.max(300, (performance.now() - began) * 5);
  };
  const bars = setInterval(() => document.hidden || update(), 2000);
  signal.addEventListener("abort", () => clearInterval(bars));
  for await (const event of events(root, Number(after), signal)) {
    if (!isDelta(event.name)) {
      update();
      continue;
    }
    const data = JSON.parse(event.data);
    const box = document.querySelector("[data-live-text]");
    if (data.run_id !== run || !box) continue;
    if (event.name === "text.withdrawn") {
      rendered = NOTHING;
      streamed = { turn: data.turn, text: "" };
      box.textContent = "";
    }
    if (event.name !== "text.delta") continue;
    const isKnown = streamed.turn === data.turn && "joined" in box.dataset;
    const text = prose(data.text);
    streamed = { turn: data.turn, text: (streamed.turn === data.turn ? streamed.text : "") + text };
    if (isKnown) append(box, text);
    else if (!showLive(box)) update();
    say(data.text);
  }
  clearInterval(bars);
  if (signal.aborted) return;
  await refresh().catch(() => {});
  say();
  speak(`The run has ended: ${document.querySelector("#state .status")?.textContent ?? ""}`);
}

function poll(signal) {
  const next = async () => {
    if (!document.hidden) {
      const refreshed = await refresh().then(() => true, () => false);
      // The next page may be shown now.
      if (signal.aborted) return;
      connected(refreshed);
    }
    if (!signal.aborted) schedule();
  };
  // What has ended needs no other look.
  const schedule = () => {
    const intervals = [...document.querySelectorAll("[data-live]")].map((part) => Number(part.dataset.live));
    const interval = Math.min(...intervals.filter((it) => it > 0));
    if (Number.isFinite(interval)) timer = setTimeout(next, interval);
  };
  schedule();
}

/** What changes the order of a text as a visible mark, as in the pages: see `terminal_text::mark_reordering`. */
const prose = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

function item(kind) {
  const entry = document.createElement("li");
  entry.className = kind;
  const text = document.createElement("pre");
  text.className = "text";
  entry.append(text);
  return { entry, text };
}

function runLink(run, text) {
  const place = document.createElement("p");
  place.className = "small muted";
  const link = document.createElement("a");
  link.href = `${document.documentElement.dataset.prefix}/ui/runs/${run}`;
  link.textContent = text;
  place.append(link);
  return place;
}

/** The final text of a run. If it is long, its event has only the beginning, and what has streamed may have gaps. */
async function finalText(run, event, streamed, signal) {
  if (!event.truncated) return event.content;
  const prefix = document.documentElement.dataset.prefix;
  const response = await request(`${prefix}/runs/${run}`, { signal }).catch(() => null);
  const whole = response?.ok ? await response.json().catch(() => null) : null;
  return whole?.content ?? (streamed || event.content);
}

/** Shows the answer of a run at the end of a conversation while it is written. */
async function followAnswer(run, entry, text, signal, after, first) {
  const say = sentences();
  for await (const event of events(run, after, signal, first)) {
    const data = JSON.parse(event.data);
    if (data.run_id !== run) continue;
    if (event.name === "text.delta") {
      append(text, prose(data.text));
      say(data.text);
    }
    if (event.name === "turn.started" || event.name === "text.withdrawn") text.textContent = "";
    if (event.name === "approval.requested") {
      entry.querySelector("p.small")?.remove();
      entry.append(runLink(run, `${data.tool} waits for approval: open the run`));
    }
    if (event.name === "input.requested") {
      entry.querySelector("p.small")?.remove();
      entry.append(runLink(run, `asks: ${data.question} Open the run to answer`));
    }
    if (event.name === "approval.decided" || event.name === "input.answered") entry.querySelector("p.small")?.remove();
    if (event.name === "run.completed") {
      const streamed = text.textContent;
      text.textContent = prose(await finalText(run, data, streamed, signal));
      if (!streamed) say(text.textContent);
    }
    if (event.name === "run.failed" || event.name === "run.cancelled") {
      const error = document.createElement("p");
      error.className = "error";
      error.textContent = data.error?.message ?? `Cancelled: ${data.reason}`;
      entry.append(error);
    }
    if (/^run\.(completed|failed|cancelled)$/.test(event.name)) break;
    entry.scrollIntoView({ block: "nearest" });
  }
  say();
  entry.querySelector("p.small")?.remove();
  entry.append(runLink(run, "Open the run"));
  entry.removeAttribute("data-active");
}

async function sendMessage(event) {
  event.preventDefault();
  const form = event.target;
  const button = form.querySelector("button[type=submit]");
  const { signal } = stop;
  button.disabled = true;
  fail(form, "");
  try {
    const body = await bodyOf(form);
    // The events come with the answer, from the first on.
    const response = await send(form.dataset.post, body, "text/event-stream", signal);
    const run = response.headers.get("Location").match(/run_[0-9a-f-]+/)[0];
    const list = document.getElementById("messages");
    const mine = item("user");
    mine.text.textContent = form.elements.input.value;
    for (const picture of form.querySelectorAll("[data-previews] img")) {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      figure.className = "attached";
      caption.className = "muted small";
      caption.textContent = picture.alt;
      figure.append(picture.cloneNode(), caption);
      mine.entry.append(figure);
    }
    const reply = item("agent");
    reply.entry.dataset.active = "";
    list.append(mine.entry, reply.entry);
    form.querySelector("[data-previews]").replaceChildren();
    form.reset();
    delete form.dataset.dirty;
    replaceAddress(form.closest("[data-chat]").dataset.chat);
    reply.entry.scrollIntoView({ block: "nearest" });
    await followAnswer(run, reply.entry, reply.text, signal, 0, response);
  } catch (error) {
    fail(form, error.message);
  } finally {
    button.disabled = false;
  }
  form.elements.input.focus();
}

/** Follows what the new page shows, and nothing of the old one. */
function follow() {
  stop.abort();
  clearTimeout(timer);
  stop = new AbortController();
  connected(true);
  rendered = streamed = NOTHING;
  const run = document.querySelector(".split[data-run][data-active]");
  if (run) followRun(run, stop.signal);
  else poll(stop.signal);
  for (const entry of document.querySelectorAll("#messages li[data-active][data-run]")) {
    followAnswer(entry.dataset.run, entry, entry.querySelector("pre"), stop.signal, Number(entry.dataset.after));
  }
}

export function start() {
  document.addEventListener("console:page", follow);
  document.addEventListener("console:refreshed", () => {
    const box = document.querySelector("[data-live-text]:not([data-joined])");
    if (box) showLive(box);
  });
  document.addEventListener("submit", (event) => {
    if (event.target.matches("[data-chat-form]")) sendMessage(event);
  });
  document.addEventListener("keydown", (event) => {
    const isMessage = event.target.matches?.("#message");
    if (isMessage && event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      event.target.form.requestSubmit();
    }
  });
  // A step's page replaces the step's details without a new connection when nothing else changes.
  window.addEventListener("pagehide", () => stop.abort());
  window.addEventListener("pageshow", (event) => event.persisted && visit(location.href, { push: false }));
  follow();
}
