// Uses the console in a headless Chromium, with a real daemon whose models are scripted.
//
//     node console.mjs AXED CHROMIUM [directory for screenshots]
//
// Every page is checked for: no error in the browser's console, no violation of the content security policy, no request to
// another host, no finding of axe-core, nothing wider than the window, visible focus, and its size.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { chromium } from "playwright-core";

import { checkSizes, faultsOf, focusFaultsOf } from "./console_checks.mjs";
import { EVAL_FILES, EVAL_PRICES, addToDataset, cancelEvaluations, evalAddresses, evaluate, report, thumbs } from "./console_evals.mjs";
import { refusedList, skipToTheContent } from "./console_navigation.mjs";

const [axed, executablePath, shots] = process.argv.slice(2);
const home = mkdtempSync(join(tmpdir(), "axed-console-"));

const LONG = Array.from({ length: 120 }, (_, n) => `sentence ${n + 1} of the story.`).join(" ");
/** More than the event of a run's end has. */
const BOOK = Array.from({ length: 900 }, (_, n) => `sentence ${n + 1} of the book.`).join(" ");
const MARKDOWN = `${"> ".repeat(500)}deep\n\n<script>alert(1)</script>\n\n${"A **bold** word, `code`, and [a link](javascript:alert(1)).\n\n- one\n- two\n\n".repeat(1300)}`;
const LONG_NAME = "an-agent-with-a-name-that-is-as-long-as-the-names-of-agents-can-";
const DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
const calls = (agent, count) => {
  const call = (_, n) => `[[replies.tool_calls]]\nname = "call_agent"\narguments = { agent = "${agent}", task = "part ${n}" }\n`;
  return `[[replies]]\ntext = "go"\n${Array.from({ length: count }, call).join("")}[[replies]]\ntext = "done"\n`;
};
const FILES = {
  "config/axed.toml": `
[server]
listen = "127.0.0.1:PORT"
[data]
requests = "full"
[providers.scripted]
scripts = ["../scripts"]
[prices."scripted/writer"]
input = 3.0
output = 15.0
[prices."scripted/editor"]
input = 3.0
output = 15.0
[prices."scripted/critic"]
input = 1.0
output = 5.0
${EVAL_PRICES}`,
  ...EVAL_FILES,
  "agents/writer.toml": `
name = "writer"
description = "Writes a story, slowly."
model = "scripted/writer"
system_prompt = "You write."
stream = true
`,
  "agents/novelist.toml": `name = "novelist"\nmodel = "scripted/novelist"\nsystem_prompt = "x"\nstream = true\n`,
  "agents/printer.toml": `name = "printer"\nmodel = "scripted/novelist"\nsystem_prompt = "x"\nstream = false\n`,
  "agents/pacer.toml": `name = "pacer"\nmodel = "scripted/pacer"\nsystem_prompt = "x"\nsub_agents = ["critic"]\n`,
  "scripts/pacer.toml": `
[[replies]]
errors = [{ category = "rate_limit", message = "slow down", times = 1, retry_after_ms = 15000 }]
text = "I let somebody else read it."
tool_calls = [{ name = "call_agent", arguments = { agent = "critic", task = "Judge" } }]
[[replies]]
text = "Done."
`,
  "agents/author.toml": `name = "author"\nmodel = "scripted/author"\nsystem_prompt = "x"\n`,
  "scripts/author.toml": `[[replies]]\ntext = '''${MARKDOWN}'''\n`,
  "scripts/novelist.toml": `[[replies]]\ntext = "${BOOK}"\n`,
  "agents/editor.toml": `
name = "editor"
description = "Plans a page, lets two critics read it in parallel, and rewrites it."
model = "scripted/editor"
sub_agents = ["critic"]
system_prompt = "You edit pages."
`,
  "agents/critic.toml": `
name = "critic"
description = "Finds the weakest point of a draft."
model = "scripted/critic"
system_prompt = "You are strict."
`,
  "agents/crowd.toml": `name = "crowd"\ndescription = "Divides the work twice."\nmodel = "scripted/crowd"\nsystem_prompt = "x"\nsub_agents = ["team"]\n`,
  "agents/team.toml": `name = "team"\ndescription = "Divides the work."\nmodel = "scripted/team"\nsystem_prompt = "x"\nsub_agents = ["member"]\n`,
  "agents/member.toml": `name = "member"\ndescription = "Works."\nmodel = "scripted/member"\nsystem_prompt = "x"\n`,
  "scripts/crowd.toml": calls("team", 18),
  "scripts/team.toml": calls("member", 18),
  "scripts/member.toml": `[[replies]]\ntext = "done"\n`,
  "agents/notes.toml": `
name = "notes"
description = "Writes notes into files; each write waits for a person."
model = "scripted/notes"
tools = ["write_file"]
approve = ["write_file"]
workdir = "notes"
system_prompt = "You keep notes."
`,
  "agents/host.toml": `name = "host"\nmodel = "scripted/host"\nsystem_prompt = "x"\n[ask]\nenabled = true\n`,
  "scripts/host.toml": `
[[replies]]
text = "I have to ask."
tool_calls = [{ name = "ask_person", arguments = { question = "Which trip?", schema = { type = "object", required = ["city"], properties = { city = { type = "string", title = "City", enum = ["Oslo", "Rome"] }, nights = { type = "integer", minimum = 1 }, breakfast = { type = "boolean" } } } } }]
[[replies]]
text = "And one thing more."
tool_calls = [{ name = "ask_person", arguments = { question = "By which train?", options = ["the night train", "the first one"] } }]
[[replies]]
text = "Your PIN?"
tool_calls = [{ name = "ask_person", arguments = { question = "Which PIN?" } }]
[[replies]]
text = "Booked. {{result.1}}"
`,
  "agents/weather.toml": `
name = "weather"
description = "Takes a city and a number of days."
model = "scripted/weather"
system_prompt = "You know the weather."
[input_schema]
type = "object"
required = ["city"]
properties.city = { type = "string", description = "Where." }
properties.days = { type = "integer", default = 3 }
`,
  "scripts/weather.toml": `[[replies]]\ntext = "Rain: {{input}}"\n`,
  "agents/broken.toml": `name = "broken"\nmodle = "scripted/writer"\n`,
  "scripts/writer.toml": `delay_ms = 100\n[[replies]]\nmatch = "short"\ntext = "A short story."\ndelay_ms = 1\n[[replies]]\ntext = "${LONG}"\n`,
  "scripts/editor.toml": `
delay_ms = 4
[[replies]]
text = "I let two critics read the draft."
input_tokens = 1412
output_tokens = 96
[[replies.tool_calls]]
name = "call_agent"
arguments = { agent = "critic", task = "Judge the argument: {{input}}" }
[[replies.tool_calls]]
name = "call_agent"
arguments = { agent = "critic", task = "Judge the language, urgent: {{input}}" }
[[replies]]
text = "The page is now shorter, and says first what matters. The first critic wants a number for each claim; the second wants shorter sentences. Both are right."
input_tokens = 2210
output_tokens = 340
`,
  "scripts/critic.toml": `
delay_ms = 9
[[replies]]
match = "urgent"
errors = [{ category = "rate_limit", message = "slow down", times = 1, retry_after_ms = 300 }]
text = "The sentences are long, and two of them say the same. Cut the second paragraph, and say who acts."
input_tokens = 640
output_tokens = 120
[[replies]]
text = "The claim about speed has no number. Name the machine, the load and the percentile, or leave it out of the page."
input_tokens = 610
output_tokens = 90
`,
  [`agents/${LONG_NAME}.toml`]: `
name = "${LONG_NAME}"
description = "https://example.com/${"a-long-path-".repeat(12)}"
model = "scripted/${LONG_NAME}"
system_prompt = "x"
`,
  [`scripts/${LONG_NAME}.toml`]: `
[[replies]]
match = "fail"
errors = [{ category = "auth", message = "${"a-key-that-nobody-knows-".repeat(12)}" }]
text = "x"
[[replies]]
text = "${"an-answer-without-any-space-".repeat(20)}"
`,
  "scripts/notes.toml": `
[[replies]]
text = "I write it down."
tool_calls = [{ name = "write_file", arguments = { path = "build.md", content = "The build is green." } }]
[[replies]]
text = "Written: {{result.1}}"
`,
};

for (const [path, text] of Object.entries(FILES)) {
  mkdirSync(join(home, path, ".."), { recursive: true });
  writeFileSync(join(home, path), text);
}
mkdirSync(join(home, "notes"), { recursive: true });

async function freePort() {
  const server = createServer();
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address();
  await new Promise((resolve) => server.close(resolve));
  return port;
}

const daemons = new Set();
async function serve(port, extra = "") {
  const data = extra ? "data-keys" : "data";
  writeFileSync(join(home, "config/axed.toml"), FILES["config/axed.toml"].replace("PORT", port) + extra);
  const environment = { HOME: home, PATH: process.env.PATH };
  const daemon = spawn(axed, ["serve", "--data", data], { cwd: home, env: environment, stdio: ["ignore", "pipe", "pipe"] });
  let log = "";
  daemon.stderr.on("data", (text) => (log += text));
  daemons.add(daemon);
  await new Promise((resolve, reject) => {
    daemon.stdout.on("data", (text) => String(text).includes("http://") && resolve());
    daemon.on("exit", (code) => reject(new Error(`axed ended with ${code}:\n${log}`)));
  });
  return daemon;
}

async function stop(daemon) {
  const ended = new Promise((resolve) => daemon.on("exit", resolve));
  daemon.kill("SIGTERM");
  await ended;
  daemons.delete(daemon);
}

async function api(base, method, path, body, key) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(base + path, { method, headers, body: body && JSON.stringify(body) });
  assert.ok(response.ok, `${method} ${path}: ${response.status}`);
  return response.json();
}

const tabs = new Set();

/** A tab that records everything that must not happen. */
async function openTab(browser, base, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1360, height: 850 }, ...options });
  const page = await context.newPage();
  const faults = [];
  page.setDefaultTimeout(60_000);
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) faults.push(`${message.text()} (${message.location().url})`);
  });
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(base) && !/^(data|blob):/.test(url)) faults.push(`request to ${url}`);
  });
  const tab = { page, context, faults };
  tabs.add(tab);
  context.on("close", () => tabs.delete(tab));
  return tab;
}

async function inANewTab(browser, base, story) {
  const tab = await openTab(browser, base);
  await story(tab);
  await tab.context.close();
}

const shot = async (page, name) => shots && page.screenshot({ path: join(shots, `${name}.png`) });
const runOf = (page) => page.url().match(/run_[0-9a-f-]{36}/)?.[0];
const status = (page, text) => page.locator("#state .status", { hasText: text }).waitFor();
const tools = { api, shot, axed, home };
let passed = 0;
/** Only stories whose name contains this, if it is given. */
const filter = process.env.STORIES ?? "";
const story = async (name, tell) => {
  if (!name.includes(filter)) return;
  try {
    await tell();
  } catch (error) {
    error.message = `${name}: ${error.message}`;
    for (const tab of tabs) {
      console.error(`${tab.page.url()}\n${(await tab.page.locator("main").innerText().catch(() => "")).slice(0, 3000)}`);
      await shot(tab.page, "failure");
      console.error(tab.faults.join("\n"));
    }
    throw error;
  }
  passed += 1;
  console.log(`console: ${name}`);
};

async function startInTheForm(page, base) {
  await page.goto(`${base}/`);
  assert.equal(new URL(page.url()).pathname, "/ui/");
  await page.getByRole("link", { name: "Agents" }).click();
  await page.getByRole("link", { name: "writer", exact: true }).click();
  await page.getByLabel("Input").fill("Tell a story");
  await page.getByText("More", { exact: true }).click();
  await page.getByLabel("Labels").fill("team=search");
  await page.getByRole("button", { name: "Start" }).click();
  await page.waitForURL(/\/ui\/runs\/run_/);
  const live = page.locator("[data-live-text]");
  await live.filter({ hasText: /^sentence 1 of the story.*sentence 9/ }).waitFor();
  await page.locator("#spoken p", { hasText: "of the story." }).first().waitFor({ state: "attached" });
  await page.reload();
  await live.filter({ hasText: /^sentence 1 of the story/ }).waitFor();
  const early = (await live.textContent()).length;
  await page.waitForFunction((length) => (document.querySelector("[data-live-text]")?.textContent.length ?? 0) > length + 40, early);
}

async function cancel(page) {
  await page.locator("#actions summary", { hasText: "Cancel" }).click();
  await page.getByRole("button", { name: "Cancel the run" }).click();
  await status(page, "cancelled");
  await page.locator("#cancel").waitFor({ state: "detached" });
}

async function approveWithAnEdit(page, base) {
  const run = await api(base, "POST", "/agents/notes/runs", { input: "Note that the build is green" });
  await page.goto(`${base}/ui/approvals`);
  const box = page.locator("article.approval", { hasText: "write_file" });
  await box.waitFor();
  await shot(page, "approvals");
  await box.locator("pre.added", { hasText: "The build is green." }).waitFor();
  await box.locator("summary", { hasText: "Arguments" }).click();
  await box.getByLabel(/Arguments/).fill('{"path": "edited.md", "content": "Edited by a person."}');
  await box.getByRole("button", { name: "Approve" }).click();
  await box.getByText("Approved, with other arguments").waitFor();
  const ended = await ending(base, run.id);
  assert.equal(ended.status, "completed");
  await page.goto(`${base}/ui/runs/${run.id}`);
  await page.locator(".row", { hasText: "write_file" }).click();
  await page.locator("#inspector").getByText("Edited by a person.").first().waitFor();
  assert.match(page.url(), /\?call=/);
}

/** The run at its end. A request also returns when the run waits no more, which it may do after the request has come. */
async function ending(base, id) {
  let run;
  for (let tries = 0; tries < 9 && (run?.status ?? "running") === "running"; tries++) {
    run = await api(base, "GET", `/runs/${id}?wait=20`);
  }
  return run;
}

/** A form by the schema, a suggestion that fills a text, and a question that is declined. */
async function answerQuestions(page, base, faults) {
  const run = await api(base, "POST", "/agents/host/runs?wait=20", { input: "Book a trip" });
  await page.goto(`${base}/ui/approvals`);
  const card = page.locator("article.approval:not([data-decided])", { hasText: "host" });
  await card.getByText("Which trip?").waitFor();
  await shot(page, "question");
  await card.getByLabel("City").selectOption("Oslo");
  await card.getByLabel("nights").fill("0");
  await card.getByRole("button", { name: "Answer" }).click();
  await card.locator("[role=alert]", { hasText: "nights" }).waitFor();
  await card.getByLabel("nights").fill("2");
  await card.getByLabel("breakfast").selectOption("true");
  await page.waitForTimeout(700);
  await card.getByRole("button", { name: "Answer" }).click();
  await page.getByText("Answered · ").waitFor();
  const next = await ending(base, run.id);
  assert.equal(next.waiting_for, "input");
  await page.goto(`${base}/ui/runs/${run.id}`);
  const text = page.locator("article.approval:not([data-decided])", { hasText: "By which train?" });
  await text.getByRole("button", { name: "the night train" }).click();
  assert.equal(await text.getByLabel("Answer", { exact: true }).inputValue(), "the night train");
  await text.getByRole("button", { name: "Answer" }).click();
  const last = page.locator("article.approval:not([data-decided])", { hasText: "Which PIN?" });
  await last.getByLabel(/why you do not answer/).fill("it is secret");
  await page.waitForTimeout(700);
  await last.getByRole("button", { name: "Decline" }).click();
  const ended = await ending(base, run.id);
  assert.equal(ended.status, "completed", JSON.stringify(ended));
  assert.match(ended.content, /declined to answer: it is secret/);
  const events = await api(base, "GET", `/runs/${run.id}/events`);
  const given = events.data.filter((event) => event.type === "input.answered").map((event) => event.answer ?? null);
  assert.deepEqual(given, [{ city: "Oslo", nights: 2, breakfast: true }, "the night train", null]);
  // The answer that was refused.
  assert.match(faults.splice(0).join("\n"), /^[^\n]*status of 422[^\n]*$/);
}

/** The second click falls on the same spot, where the next card must not be. */
async function approveOnce(page, base) {
  const runs = [];
  for (const note of ["first", "second"]) runs.push(await api(base, "POST", "/agents/notes/runs?wait=20", { input: `Note the ${note}` }));
  await page.goto(`${base}/ui/approvals`);
  assert.ok(Number(await page.locator("header.top .badge").textContent()) >= 2);
  const cards = page.locator("article.approval");
  const below = await cards.nth(1).boundingBox();
  await cards.first().getByRole("button", { name: "Approve" }).click({ clickCount: 2, delay: 30 });
  await cards.first().getByText("Approved").waitFor();
  await ending(base, runs[0].id);
  await page.evaluate(() => new Promise((resolve) => document.addEventListener("console:refreshed", resolve, { once: true })));
  assert.deepEqual(await cards.nth(1).boundingBox(), below, "nothing moves");
  await cards.first().getByRole("link", { name: "Open the call" }).waitFor();
  const states = await Promise.all(runs.map((run) => api(base, "GET", `/runs/${run.id}`)));
  assert.deepEqual(states.map((run) => run.status), ["completed", "waiting"]);
  await shot(page, "approvals-decided");
  await api(base, "POST", `/runs/${runs[1].id}/cancel`, {});
}

/** Hostile Markdown of 100 KB, with the rows and the divider of the tree. */
async function markdown(page, base) {
  const run = await api(base, "POST", "/agents/author/runs?wait=30", { input: "# Plan\n\n<img src=x> ![p](http://127.0.0.1:1/p.png)" });
  await page.goto(`${base}/ui/runs/${run.id}?turn=1`);
  const reply = page.locator(".thread .assistant .markdown");
  await reply.locator("strong").first().waitFor();
  assert.ok((await reply.innerText()).length > 50_000);
  assert.equal(await page.locator(".thread img, .thread script").count(), 0);
  assert.equal(await page.locator(".thread .user .heading").innerText(), "Plan");
  await page.getByRole("link", { name: "Raw" }).click();
  await page.getByRole("heading", { name: "Request as sent" }).waitFor();
  const time = await page.evaluate(() => performance.getEntriesByType("navigation")[0].responseEnd);
  assert.ok(time < 15_000, `${time} ms`);
}

async function searchRuns(page, base) {
  const run = await api(base, "POST", "/agents/writer/runs?wait=30", { input: "A short one about a WALRUS" });
  const failed = await api(base, "POST", `/agents/${LONG_NAME}/runs?wait=30`, { input: "fail" });
  await page.goto(`${base}/ui/`);
  await page.keyboard.press("/");
  await page.keyboard.type("walrus");
  await page.keyboard.press("Enter");
  await page.waitForURL(/q=walrus/);
  const rows = page.locator("table.runs tbody tr");
  await rows.filter({ hasText: "WALRUS" }).waitFor();
  assert.equal(await rows.count(), 1);
  const { height } = await rows.first().boundingBox();
  assert.ok(height <= 41, `a row of ${height} px`);
  const short = await rows.locator("code").innerText();
  assert.ok(run.id.replaceAll("-", "").endsWith(short));
  await page.goto(`${base}/ui/?q=${short}`);
  await rows.filter({ hasText: "WALRUS" }).waitFor();
  await page.goto(`${base}/ui/`);
  await page.getByLabel("Error").selectOption(failed.error.code);
  await page.getByRole("button", { name: "Filter" }).click();
  await page.waitForURL(/error=/);
  await rows.locator("td.why", { hasText: failed.error.code }).first().waitFor();
  await page.goto(`${base}/ui/`);
  await page.locator("#counts a", { hasText: "failed" }).click();
  await page.waitForURL(/status=failed/);
  await rows.first().waitFor();
  await shot(page, "search");
}

async function foldAndDrag(page) {
  const rows = page.locator(".tree .row:visible");
  const before = await rows.count();
  await page.getByRole("button", { name: "Fold editor" }).click();
  assert.equal(await rows.count(), 1);
  await page.getByRole("button", { name: "Fold editor" }).click();
  assert.equal(await rows.count(), before);
  assert.equal(await page.locator(".tree .row", { hasText: "call_agent" }).count(), 0, "a delegation is one row");
  const divider = page.locator(".divider");
  const start = (await divider.boundingBox()).x;
  await divider.focus();
  await page.keyboard.press("ArrowRight");
  assert.ok((await divider.boundingBox()).x > start);
  const box = await divider.boundingBox();
  await page.mouse.move(box.x + 4, box.y + 10);
  await page.mouse.down();
  await page.mouse.move(box.x - 80, box.y + 10);
  await page.mouse.up();
  assert.ok((await divider.boundingBox()).x < start);
}

async function pauseAndRunAgain(page, base) {
  const run = await api(base, "POST", "/agents/pacer/runs", { input: "Tell it again", labels: { team: "search" } });
  await page.goto(`${base}/ui/runs/${run.id}`);
  await page.getByRole("button", { name: "Pause" }).click();
  await page.locator(".wait", { hasText: "Paused" }).getByRole("button", { name: "Resume" }).click();
  await status(page, "completed");
  await page.getByRole("link", { name: "Edit and run" }).click();
  await page.waitForURL(/from=run_/);
  assert.equal(await page.getByLabel("Input").inputValue(), "Tell it again");
  assert.equal(await page.getByLabel("Labels").inputValue(), "team=search");
  await page.goto(`${base}/ui/runs/${run.id}`);
  await page.getByRole("button", { name: "Run again" }).click();
  await page.waitForURL((url) => !url.pathname.endsWith(run.id) && /run_/.test(url.pathname));
  await status(page, "completed");
  assert.equal((await api(base, "GET", `/runs/${runOf(page)}`)).input, "Tell it again");
}

async function steer(page, base) {
  const run = await api(base, "POST", "/agents/notes/runs", { input: "Note the weather" });
  await page.goto(`${base}/ui/runs/${run.id}`);
  await page.locator("summary", { hasText: "Steer" }).click();
  await page.getByLabel(/A message that/).fill("Write in French");
  await page.getByRole("button", { name: "Send" }).click();
  await page.locator("article.approval").getByRole("button", { name: "Deny" }).click();
  await page.locator(".tree .row", { hasText: "turn 2" }).waitFor();
  const messages = await api(base, "GET", `/runs/${run.id}/messages`);
  assert.ok(JSON.stringify(messages).includes("Write in French"));
  await api(base, "POST", `/runs/${run.id}/cancel`, {});
}

async function treeForkAndCompare(page, base) {
  const run = await api(base, "POST", "/agents/editor/runs", { input: "The page about speed", labels: { team: "docs" } });
  await page.goto(`${base}/ui/runs/${run.id}`);
  await status(page, "completed");
  await page.locator(".tree .row", { hasText: "critic" }).first().waitFor();
  assert.ok((await page.locator("path.retry").count()) > 0, "the retry has a tint");
  await shot(page, "run");
  await page.emulateMedia({ colorScheme: "dark" });
  await shot(page, "run-dark");
  await page.emulateMedia({ colorScheme: "light" });
  await page.keyboard.press("j");
  await page.keyboard.press("j");
  await page.keyboard.press("k");
  await page.keyboard.press("Enter");
  await page.waitForURL(/\?turn=1/);
  await page.locator(".thread .user").waitFor();
  await shot(page, "turn");
  await foldAndDrag(page);
  await page.getByRole("link", { name: "Events" }).click();
  await page.locator(".events summary", { hasText: "turn.completed" }).first().click();
  await page.goto(`${base}/ui/runs/${run.id}?turn=2`);
  await page.locator("summary", { hasText: "Fork here" }).click();
  await page.getByRole("button", { name: "Fork", exact: true }).last().click();
  await page.waitForURL((url) => !url.pathname.endsWith(run.id) && /run_/.test(url.pathname));
  const fork = runOf(page);
  await status(page, "completed");
  await page.goto(`${base}/ui/compare`);
  await page.getByLabel("First run").fill(run.id);
  await page.getByLabel("Second run").fill(fork);
  await page.getByRole("button", { name: "Compare" }).click();
  await page.locator("table.totals").waitFor();
  await shot(page, "differences");
  await page.goto(`${base}/ui/runs/${run.id}`);
  const download = page.waitForEvent("download");
  await page.locator("summary", { hasText: "Save as test" }).click();
  await page.getByRole("link", { name: "Download" }).click();
  assert.equal((await download).suggestedFilename(), "editor.toml");
}

async function largeTree(page, base) {
  const run = await api(base, "POST", "/agents/crowd/runs?wait=250", { input: "Divide the work", timeout: 600 });
  assert.equal(run.tree.runs, 343);
  await page.goto(`${base}/ui/runs/${run.id}`);
  const rows = page.locator(".tree .row");
  await rows.first().waitFor();
  const first = await rows.count();
  assert.ok(first < 100, `${first} rows`);
  await page.getByText("324 runs below others").waitFor();
  await shot(page, "large");
  await rows.filter({ hasText: "+ 18 runs" }).first().click();
  await rows.filter({ hasText: "member" }).nth(17).waitFor();
  await page.getByRole("link", { name: "Show all" }).click();
  await page.waitForURL(/open=all/);
  await page.locator(".tree .row:has(b)").nth(342).waitFor();
  await rows.nth(3).click();
  await page.waitForURL(/open=all/);
}

async function structuredInput(page, base) {
  await page.goto(`${base}/ui/agents/weather`);
  await page.getByLabel("city").fill("Oslo");
  await page.getByRole("button", { name: "Start" }).click();
  await page.waitForURL(/\/ui\/runs\/run_/);
  await status(page, "completed");
  const run = await api(base, "GET", `/runs/${runOf(page)}`);
  assert.ok(run.content.includes("Oslo") && run.content.includes("3"), run.content);
}

async function chat(page, base) {
  await page.goto(`${base}/ui/agents/writer/chat`);
  await page.locator("#chat-pictures").setInputFiles({ name: "dot.png", mimeType: "image/png", buffer: Buffer.from(DOT, "base64") });
  await page.getByLabel("Message").fill("A short one");
  await page.getByRole("button", { name: "Send" }).click();
  await page.locator("#messages .agent", { hasText: /^A short story\./ }).waitFor();
  await page.locator("#messages .agent a", { hasText: "Open the run" }).waitFor();
  assert.match(page.url(), /session=chat-/);
  await page.reload();
  const earlier = page.locator("#messages .user", { hasText: "A short one" });
  await earlier.getByText("dot.png").waitFor();
  await earlier.getByRole("img", { name: "dot.png" }).waitFor();
  await page.waitForFunction(() => document.querySelector("#messages .user img").naturalWidth === 1);
  assert.equal(await earlier.getByText("[image").count(), 0);
  await shot(page, "chat");
}

async function longAnswers(page, base) {
  for (const agent of ["novelist", "printer"]) {
    await page.goto(`${base}/ui/agents/${agent}/chat?session=book-of-${agent}`);
    await page.getByLabel("Message").fill("Write a book");
    await page.getByRole("button", { name: "Send" }).click();
    await page.locator("#messages .agent a", { hasText: "Open the run" }).waitFor();
    assert.equal(await page.locator("#messages .agent pre").textContent(), BOOK, agent);
  }
}

async function cancelMany(page, base) {
  for (const input of ["one", "two", "three"]) await api(base, "POST", "/agents/notes/runs", { input });
  await page.goto(`${base}/ui/?status=waiting`);
  const boxes = page.locator("input[name=run]");
  await boxes.nth(2).waitFor();
  await boxes.nth(0).check();
  await boxes.nth(1).check();
  await page.getByRole("button", { name: "Cancel 2 selected" }).click();
  await page.waitForFunction(() => document.querySelectorAll("input[name=run]").length === 1);
}

async function reconnect(page, base, port, daemon) {
  const run = await api(base, "POST", "/agents/notes/runs", { input: "Note the restart" });
  await page.goto(`${base}/ui/runs/${run.id}`);
  await status(page, "waiting");
  await stop(daemon);
  await page.locator("body[data-disconnected]").waitFor();
  const next = await serve(port);
  await page.locator("body:not([data-disconnected])").waitFor();
  await page.getByRole("button", { name: "Approve" }).click();
  await status(page, "completed");
  return next;
}

async function everyPage(page, base, faults) {
  for (const path of ["", "agents", "agents/editor", "agents/broken", "approvals", "sessions", "evals", "compare", "usage", "usage?by=model", "usage?by=label&label=team", "system"]) {
    await page.goto(`${base}/ui/${path}`);
    await page.locator("h1").first().waitFor();
    await shot(page, path.replace(/\W/g, "-") || "runs");
  }
  assert.deepEqual(faults, []);
  await page.getByRole("button", { name: "Keyboard shortcuts" }).click();
  await page.locator("dialog[open]").waitFor();
  await page.keyboard.press("Escape");
}

/** The addresses of all kinds of pages, with what the other stories have left in them. */
async function everyAddress(base) {
  const idOf = async (agent) => (await api(base, "GET", `/runs?agent=${agent}`)).data.at(-1).id;
  const [editor, crowd, writer] = [await idOf("editor"), await idOf("crowd"), await idOf("writer")];
  const chat = (await api(base, "GET", "/sessions")).data.find((it) => it.name.startsWith("chat-")).name;
  return [
    "", "?status=waiting", "?agent=none", "agents", "agents/editor", "agents/weather", "agents/broken", "approvals", "sessions",
    `sessions/${chat}`, `agents/writer/chat?session=${chat}`, "agents/editor/chat", "compare", `compare?a=${editor}&b=${writer}`,
    "usage", "usage?by=model", "usage?by=label&label=team", "usage?by=label", "system", "nowhere", `runs/${editor}`,
    `runs/${editor}?turn=1`, `runs/${editor}?view=events`, `runs/${crowd}`, ...(await evalAddresses(base, tools)), ...(await longTexts(base)),
  ];
}

async function withoutScripts(browser, base) {
  const { page, context } = await openTab(browser, base, { javaScriptEnabled: false });
  await page.goto(`${base}/ui/`);
  await page.locator("table.runs td.main a").first().click();
  await page.locator("#tree .row").first().waitFor();
  const run = await api(base, "POST", "/agents/notes/runs?wait=30", { input: "Note it" });
  for (const [path, action] of [["agents/writer", "Starting a run"], ["agents/writer/chat", "Sending messages"], ["approvals", "Deciding"], [`runs/${run.id}`, "Changing a run"]]) {
    await page.goto(`${base}/ui/${path}`);
    const warning = await page.locator("noscript .warning").first().innerText();
    assert.ok(warning.startsWith(`${action} from this page needs scripts`), warning);
    assert.equal(await page.getByRole("button", { name: /Start|Send|Approve|Cancel|Steer/ }).count(), 0, path);
  }
  await api(base, "POST", `/runs/${run.id}/cancel`, {});
  await context.close();
}

/** Fills pages with names, labels and texts that are as long as they can be. Returns the addresses of these pages. */
async function longTexts(base) {
  const labels = { [`team-${"x".repeat(50)}`]: "y".repeat(200), owner: "z".repeat(256) };
  const body = { labels, session: "s".repeat(64), input: `${"unbroken".repeat(40)} text` };
  const run = await api(base, "POST", `/agents/${LONG_NAME}/runs?wait=30`, body);
  const failed = await api(base, "POST", `/agents/${LONG_NAME}/runs?wait=30`, { ...body, input: "fail" });
  assert.equal(failed.status, "failed");
  const path = "p".repeat(300);
  const waiting = await api(base, "POST", "/agents/notes/runs?wait=30", { ...body, input: path });
  assert.equal(waiting.status, "waiting");
  return [
    `runs/${run.id}`, `runs/${run.id}?turn=1`, `runs/${failed.id}`, `runs/${failed.id}?view=events`, `runs/${waiting.id}`,
    `agents/${LONG_NAME}`, `agents/${LONG_NAME}/chat?session=${body.session}`, `sessions/${body.session}`, "?session=none",
    `compare?a=${run.id}&b=${failed.id}`, `usage?by=label&label=team-${"x".repeat(50)}`, `runs/run_${"0".repeat(300)}`,
  ];
}

const MODES = {
  light: {},
  dark: { colorScheme: "dark" },
  narrow: { viewport: { width: 380, height: 820 }, deviceScaleFactor: 2 },
};

async function forEverybody(browser, base, paths) {
  const found = [];
  for (const [mode, options] of Object.entries(MODES)) {
    const { page, context } = await openTab(browser, base, { reducedMotion: "reduce", ...options });
    for (const path of paths) {
      await page.goto(`${base}/ui/${path}`);
      await page.locator("h1").first().waitFor();
      await shot(page, `${path.replace(/run_[0-9a-f-]+/g, "run").replace(/\W+/g, "-").slice(0, 40) || "runs"}-${mode}`);
      const faults = [...(await faultsOf(page)), ...(mode === "light" ? await focusFaultsOf(page, 25) : [])];
      found.push(...faults.map((fault) => `${mode} /ui/${path.slice(0, 80)}: ${fault}`));
    }
    await page.locator("[data-help]").click();
    found.push(...(await faultsOf(page)).map((fault) => `${mode}, help: ${fault}`));
    await context.close();
  }
  assert.equal(found.length, 0, `${found.length} faults:\n${[...new Set(found)].join("\n")}`);
}

async function keys(browser, base) {
  const { page, context, faults } = await openTab(browser, base);
  const input = [{ type: "text", text: "Mine" }, { type: "image", media_type: "image/png", data: DOT, name: "dot.png" }];
  const mine = await api(base, "POST", "/agents/notes/runs", { input }, "key-of-editor");
  await page.goto(`${base}/ui/runs/${mine.id}`);
  for (const [key, why] of [["ключ", "cannot be sent"], ["key-of-nobody", "does not know this key"], ["key-of-meter", "does not have the scope read"]]) {
    await page.getByLabel("Key", { exact: true }).fill(key);
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.locator(".sign-in .error", { hasText: why }).waitFor();
    assert.equal(await page.evaluate(() => sessionStorage.getItem("axed.key")), null, key);
  }
  await page.evaluate(() => sessionStorage.setItem("axed.key", "key-of-meter"));
  await page.reload();
  await page.locator(".sign-in .error", { hasText: "does not have the scope read" }).waitFor();
  await page.getByRole("button", { name: "Sign out" }).click();
  await page.getByRole("button", { name: "Sign out" }).waitFor({ state: "detached" });
  await page.getByLabel("Key", { exact: true }).fill("key-of-reader");
  await shot(page, "sign-in");
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByText("there is no run").waitFor();
  await page.getByRole("link", { name: "Approvals" }).click();
  await page.getByText("Nothing waits").waitFor();
  assert.equal(await page.getByRole("button", { name: /Approve|Deny|Cancel/ }).count(), 0);
  await page.getByRole("link", { name: "Agents" }).click();
  await page.getByRole("link", { name: "notes", exact: true }).click();
  await page.getByRole("heading", { name: "Definition" }).waitFor();
  assert.equal(await page.getByRole("button", { name: "Start" }).count(), 0);
  const cookies = await context.cookies();
  assert.deepEqual(cookies, []);
  await page.getByRole("button", { name: "Sign out" }).click();
  await page.getByLabel("Key", { exact: true }).waitFor();
  await page.goto(`${base}/ui/runs/${mine.id}`);
  await page.getByLabel("Key", { exact: true }).fill("key-of-editor");
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByRole("button", { name: "Approve" }).click();
  await status(page, "completed");
  await page.waitForFunction(() => document.querySelector("#inspector img[alt='dot.png']")?.naturalWidth === 1);
  const expected = faults.filter((fault) => !/status of 40[134]/.test(fault));
  assert.deepEqual(expected, []);
  const other = await context.newPage();
  await other.goto(`${base}/ui/`);
  await other.getByLabel("Key", { exact: true }).waitFor();
  await context.close();
}

const hash = (text) => createHash("sha256").update(text).digest("hex");
const KEYS = Object.entries({ meter: ["metrics"], reader: ["read"], editor: ["read", "run", "cancel"] })
  .map(([name, scopes]) => `[auth.keys.${name}]\nsha256 = "${hash(`key-of-${name}`)}"\nscopes = ${JSON.stringify(scopes)}\n`)
  .join("");

const browser = await chromium.launch({
  executablePath,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
try {
  const port = await freePort();
  const base = `http://127.0.0.1:${port}`;
  let daemon = await serve(port);
  const { page, faults } = await openTab(browser, base);
  await story("a run is started in the form, and its text streams", () => startInTheForm(page, base));
  await story("a run is cancelled", () => cancel(page));
  await story("a call is approved with an edit", () => approveWithAnEdit(page, base));
  await story("questions are answered with their forms", () => answerQuestions(page, base, faults));
  await story("two clicks on one spot approve one call", () => approveOnce(page, base));
  await story("a run is paused, resumed, edited and run again", () => pauseAndRunAgain(page, base));
  await story("Markdown is shown, and only Markdown", () => markdown(page, base));
  await story("runs are searched, and counted by status", () => searchRuns(page, base));
  await story("a run is steered", () => steer(page, base));
  await story("a tree is read, forked, compared and saved", () => treeForkAndCompare(page, base));
  await story("a large tree is shown in parts, or whole", () => largeTree(page, base));
  await story("the form has the fields of the agent's input", () => structuredInput(page, base));
  await story("a conversation has pictures", () => chat(page, base));
  await story("a long answer is shown to its end", () => longAnswers(page, base));
  await story("many runs are cancelled", () => cancelMany(page, base));
  await story("thumbs are shown on the run, in the list and by version", () => thumbs(page, base, tools));
  await story("two versions are evaluated, and a flipped case opens", () => evaluate(page, base, { ...tools, faults }));
  await story("the report of an evaluation is for everybody", () => report(browser, base, tools));
  await story("evaluations are cancelled", () => cancelEvaluations(page, base, tools));
  await story("a run is added to a dataset", () => addToDataset(page, base, tools));
  await story("every page is free of faults", () => everyPage(page, base, faults));
  await story("a link leads to the content, and what is typed stays", () => inANewTab(browser, base, (tab) => skipToTheContent(tab, base)));
  await story("a list that is refused is marked", () => inANewTab(browser, base, (tab) => refusedList(tab, base)));
  await story("pages are read without scripts", () => withoutScripts(browser, base));
  const paths = filter ? [] : await everyAddress(base);
  await story("every page is for everybody, in light, dark and narrow", () => forEverybody(browser, base, paths));
  await story("pages and scripts are small", () => checkSizes(base, paths));
  await story("a page reconnects over a restart", async () => (daemon = await reconnect(page, base, port, daemon)));
  await stop(daemon);
  daemon = await serve(port, KEYS);
  await story("a key sees its own runs, and no buttons without scopes", () => keys(browser, base));
  await story("a link leads to the content with a key too", () => inANewTab(browser, base, async (tab) => {
    await tab.context.addInitScript(() => sessionStorage.setItem("axed.key", "key-of-editor"));
    await skipToTheContent(tab, base);
  }));
  await stop(daemon);
  console.log(`console: ${passed} stories passed`);
} finally {
  await browser.close();
  for (const daemon of daemons) daemon.kill("SIGKILL");
  rmSync(home, { recursive: true, force: true });
}
