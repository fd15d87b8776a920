// Forms that send JSON to the API: `data-post` is the address, `data-then` what follows.

import { post, request } from "./client.js";
import { markDecided } from "./decided.js";
import { notice, refresh, visit } from "./pages.js";

const readers = {
  number: (text) => {
    if (!/^\d+$/.test(text.trim())) throw new Error("This must be a whole number.");
    return Number(text);
  },
  decimal: (text) => {
    if (!Number.isFinite(Number(text))) throw new Error("This must be a number.");
    return Number(text);
  },
  score: (text) => (Number.isFinite(Number(text)) ? Number(text) : text),
  lines: (text) => text.split("\n").map((line) => line.trim()).filter(Boolean),
  json: (text) => {
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`This is not JSON: ${error.message}`);
    }
  },
  labels: (text) => {
    const pairs = text.split(",").map((pair) => pair.split("=").map((it) => it.trim()));
    if (pairs.some((pair) => pair.length !== 2 || !pair[0])) throw new Error("Labels are written as name=value, name=value.");
    return Object.fromEntries(pairs);
  },
};

const valueOf = (field) => (readers[field.dataset.type] ?? ((text) => text))(field.value);

function put(body, path, value) {
  const names = path.split(".");
  const last = names.pop();
  let object = body;
  for (const name of names) object = object[name] ??= {};
  object[last] = value;
}

const base64 = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });

/** The body of the request. Empty fields are left out. */
export async function bodyOf(form, submitter) {
  const body = {};
  for (const field of form.elements) {
    if (!field.name || field.type === "submit" || field.type === "checkbox" || !field.value.trim()) continue;
    if (field.dataset.for && field.dataset.for !== submitter?.value) continue;
    if ("onlyIfChanged" in field.dataset && field.value === field.defaultValue) continue;
    // A field with the name of a property of forms, such as `dataset`, would hide it.
    put(body, field.dataset.field ?? field.name, valueOf(field));
  }
  if (submitter?.name) put(body, submitter.name, valueOf(submitter));
  if (submitter?.value === "decline") body.decline ??= "";
  if (submitter?.value === "done") body.result ??= "";
  for (const field of form.querySelectorAll("[data-pictures]")) {
    const parts = [];
    for (const file of field.files) parts.push({ type: "image", media_type: file.type, data: await base64(file), name: file.name });
    if (parts.length === 0) continue;
    const text = body[field.dataset.pictures];
    put(body, field.dataset.pictures, text ? [{ type: "text", text }, ...parts] : parts);
  }
  return body;
}

export function fail(form, message) {
  const place = form.querySelector("[role=alert]");
  if (place) place.textContent = message;
  else notice(message);
}

/** When a call was decided last: another click on the same spot may be meant for the same call. */
let decidedAt = -Infinity;
const PAUSE_MS = 600;

const VERDICTS = { approve: "Approved", deny: "Denied", done: "Was done", not_done: "Was not done", unknown: "Unknown" };

function verdictOf(body) {
  if ("decline" in body) return body.decline ? `Declined: ${body.decline}` : "Declined";
  return VERDICTS[body.decision ?? body.outcome] ?? "Answered";
}

/** The pages of what a form starts. */
const PAGES = { run: "runs", eval: "evals" };

const addressOf = (kind, id) => `${document.documentElement.dataset.prefix}/ui/${PAGES[kind]}/${encodeURIComponent(id)}`;

async function submit(event) {
  const form = event.target;
  event.preventDefault();
  const buttons = form.querySelectorAll("button");
  const decides = form.dataset.then === "decided";
  if (decides && performance.now() - decidedAt < PAUSE_MS) return;
  if (decides) decidedAt = performance.now();
  fail(form, "");
  try {
    const body = await bodyOf(form, event.submitter);
    for (const button of buttons) button.disabled = true;
    const answer = await post(form.dataset.post, body);
    delete form.dataset.dirty;
    form.closest("details.menu")?.removeAttribute("open");
    form.reset();
    if (decides) {
      const reason = body.reason ? `: ${body.reason}` : "";
      const edited = body.arguments ? ", with other arguments" : "";
      markDecided(form.closest(".approval"), `${verdictOf(body)}${edited}${reason}`);
    }
    if (form.dataset.then in PAGES) await visit(addressOf(form.dataset.then, answer.id));
    else await refresh().catch(() => notice("Sent, but this page could not be brought up to date."));
  } catch (error) {
    fail(form, error.message);
  } finally {
    for (const button of buttons) button.disabled = false;
  }
}

async function cancelMany(event) {
  event.preventDefault();
  const form = event.target;
  const chosen = [...form.querySelectorAll("input[name=run]:checked")];
  let failed = 0;
  for (const box of chosen) {
    try {
      await post(`${form.dataset.cancelMany}${encodeURIComponent(box.value)}/cancel`, {});
      box.checked = false;
    } catch {
      failed += 1;
    }
  }
  countChosen(form);
  const isNew = await refresh().then(() => true, () => false);
  fail(form, failed ? `${failed} of ${chosen.length} runs could not be cancelled.` : "");
  if (!failed) notice(`${chosen.length} runs cancelled${isNew ? "" : ", but this page could not be brought up to date"}.`);
}

function countChosen(form) {
  const button = form.querySelector(".bar button");
  if (!button) return;
  const count = form.querySelectorAll("input[name=run]:checked").length;
  button.disabled = count === 0;
  button.textContent = count ? `Cancel ${count} selected` : "Cancel the selected runs";
}

/** Saves an answer of the API as a file; a link cannot send the key. */
async function download(link) {
  const response = await request(link.href);
  if (!response.ok) {
    const problem = await response.json().catch(() => ({}));
    notice(problem.detail || `The server answered ${response.status}.`);
    return;
  }
  saveAs(link.dataset.download, await response.blob());
}

function saveAs(name, blob) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(blob);
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
}

/** Saves the text beside the button as a file. */
function save(button) {
  const text = button.closest("section").querySelector("[data-source]").textContent;
  saveAs(button.dataset.save, new Blob([`${text}\n`], { type: "application/jsonl" }));
}

/** Writes the button's text into a field. */
function fill(button) {
  const field = document.getElementById(button.dataset.fill);
  if (!field) return;
  field.value = button.textContent;
  field.form.dataset.dirty = "";
  field.focus();
}

function preview(field) {
  const place = field.form?.querySelector("[data-previews]");
  if (!place) return;
  for (const old of place.querySelectorAll("img")) URL.revokeObjectURL(old.src);
  place.replaceChildren();
  for (const file of field.files) {
    const image = document.createElement("img");
    image.src = URL.createObjectURL(file);
    image.alt = file.name;
    place.append(image);
  }
}

export function start() {
  document.addEventListener("submit", (event) => {
    if (event.target.matches("[data-chat-form]")) return;
    if (event.target.matches("[data-post]")) submit(event);
    if (event.target.matches("[data-cancel-many]")) cancelMany(event);
  });
  document.addEventListener("input", (event) => {
    const form = event.target.form;
    if (form?.matches("[data-post]")) form.dataset.dirty = "";
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("input[name=run]")) countChosen(event.target.form);
    if (event.target.matches("[data-pictures]")) preview(event.target);
  });
  document.addEventListener("console:refreshed", () => {
    for (const form of document.querySelectorAll("[data-cancel-many]")) countChosen(form);
  });
  document.addEventListener("click", (event) => {
    const saved = event.target.closest?.("[data-save]");
    if (saved) save(saved);
    const filled = event.target.closest?.("[data-fill]");
    if (filled) fill(filled);
    const link = event.target.closest?.("[data-download]");
    if (!link) return;
    event.preventDefault();
    download(link);
  });
}
