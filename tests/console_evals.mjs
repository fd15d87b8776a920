// Stories of scores, evaluations and datasets, for tests/console.mjs, with the agents and the dataset that they need.

import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

import { faultsOf } from "./console_checks.mjs";

/** What tickets are about, and how many of each there are. */
const KINDS = { refund: 12, delivery: 10, password: 8, invoice: 7, discount: 3 };
const tickets = Object.entries(KINDS).flatMap(([kind, count]) => Array.from({ length: count }, (_, n) => `${kind}-${n + 1}`));
const ticket = (id) => JSON.stringify({ id, input: `Ticket ${id}: what about my ${id.split("-")[0]}?` });

/** Replies by what the ticket is about. */
const script = (replies) =>
  Object.entries(replies)
    .map(([kind, [text, output]]) => `[[replies]]\nmatch = "${kind}"\ntext = "${text}"\noutput_tokens = ${output}\n`)
    .join("");
const support = (name, rest) => `name = "${name}"\ndescription = "Answers tickets."\nmodel = "scripted/${name}"\nsystem_prompt = "You answer tickets."\n${rest}`;

export const EVAL_FILES = {
  "agents/support.toml": support(
    "support",
    `workdir = "notes"
tools = ["read_file"]
[[scorers]]
name = "grounded"
kind = "judge"
agent = "grounding-judge"
[[scorers]]
name = "cites"
kind = "assert"
expect = { contains = "article" }
[[scorers]]
name = "polite"
kind = "assert"
expect = { matches = "Sorry|Thank|Please" }
[[scorers]]
name = "short"
kind = "assert"
expect = { matches = "^.{1,90}$" }
`,
  ),
  "agents/support-old.toml": support("support-old", ""),
  "agents/grounding-judge.toml": `name = "grounding-judge"\nmodel = "scripted/grounding-judge"\nsystem_prompt = "You judge whether an answer is grounded."\n`,
  "scripts/support.toml": `${script({
    "discount-3": ["[[replies.tool_calls]]", 1],
    refund: ["Sorry for the trouble. By article 7, the refund takes five days.", 18],
    delivery: ["Thank you for asking. By article 3, deliveries are insured until they are opened.", 22],
    password: ["Please use the link on the sign-in page; it is valid for an hour.", 17],
    invoice: ["By article 9, invoices are sent on the first day of each month.", 15],
    discount: ["Thank you. By article 12, a discount needs a code, and yours has ended; the next codes come in the spring, by letter.", 31],
  }).replace('text = "[[replies.tool_calls]]"\noutput_tokens = 1\n', '[[replies.tool_calls]]\nname = "read_file"\narguments = { path = "codes.md" }\n')}`,
  "scripts/support-old.toml": script({
    refund: ["Thank you. A refund takes some days; we will write to you as soon as we know more.", 24],
    delivery: ["Thank you for asking. By article 3, deliveries are insured until they are opened.", 23],
    password: ["Please use the link on the sign-in page, by article 1, which is valid for an hour.", 21],
    invoice: ["Thank you. Invoices are sent each month, as you can read on the page of your account, below Settings.", 27],
    discount: ["Please send us the code. By article 12, discounts end.", 16],
  }),
  "scripts/grounding-judge.toml": [["article 7", 0.95], ["some days", 0.6], ["article 9", 0.8], ["each month", 0.65], ["article 1,", 0.85], ["an hour", 0.8], ["in the spring", 0.7]]
    .map(([text, value]) => `[[replies]]\nmatch = "${text}"\ntext = '{"value": ${value}, "comment": ""}'\n`)
    .concat(`[[replies]]\ntext = '{"value": 0.9, "comment": ""}'\n`)
    .join(""),
  "datasets/tickets.jsonl": `${tickets.map(ticket).join("\n")}\n`,
};
export const EVAL_PRICES = ["support", "support-old"].map((model) => `[prices."scripted/${model}"]\ninput = 3.0\noutput = 15.0\n`).join("");

/** A thumb shows on the run, in the list, and by version on the agent's page. */
export async function thumbs(page, base, { api, shot }) {
  const run = await api(base, "POST", "/agents/editor/runs?wait=30", { input: "The page about thumbs" });
  await page.goto(`${base}/ui/runs/${run.id}`);
  const score = page.locator("#state div", { hasText: "Scores" }).locator("b");
  for (const [button, value] of [["Good", "1"], ["Bad", "0"]]) {
    await page.getByRole("button", { name: button, exact: true }).click();
    await score.filter({ hasText: new RegExp(`^${value}$`) }).waitFor();
  }
  const { scores } = await api(base, "GET", `/runs/${run.id}`);
  assert.deepEqual(scores, { thumbs: { n: 1, mean: 0 } }, "the second thumb replaces the first");
  await page.locator("summary", { hasText: /^Score$/ }).click();
  await page.getByLabel("What is scored").fill("clear");
  await page.getByLabel("A number or a label").fill("0.75");
  await page.locator("#score").getByRole("button", { name: "Score" }).click();
  await score.filter({ hasText: "0.75" }).waitFor();
  await page.goto(`${base}/ui/?agent=editor&score=${encodeURIComponent("thumbs<1")}`);
  const row = page.locator("table.runs tbody tr", { hasText: "about thumbs" });
  await row.locator("td.why", { hasText: "thumbs 0" }).waitFor();
  await page.locator("table.runs th", { hasText: "Scores" }).waitFor();
  await page.goto(`${base}/ui/agents/editor`);
  const version = page.getByRole("region", { name: "Versions" }).locator("tr", { hasText: "current" });
  const bars = await version.locator("meter").evaluateAll((all) => all.map((it) => [it.getAttribute("aria-label"), it.value]));
  assert.deepEqual(bars, [["clear", 0.75], ["thumbs", 0]]);
  await shot(page, "scores");
}

/** Two versions are compared from the agent's page; a flipped case opens where its runs differ first. */
export async function evaluate(page, base, { api, shot, faults }) {
  await page.goto(`${base}/ui/evals`);
  await page.getByRole("heading", { name: "No evaluations" }).waitFor();
  await page.goto(`${base}/ui/agents/support`);
  const form = page.locator("#evaluate");
  await form.getByLabel("Dataset").fill("nowhere");
  await form.getByRole("button", { name: "Evaluate" }).click();
  await form.locator(".error", { hasText: "there is no dataset nowhere" }).waitFor();
  assert.match(faults.pop(), /status of 422/);
  await form.getByLabel("Dataset").fill("tickets");
  await form.getByLabel("Against").fill("support-old");
  await form.getByLabel("Budget").fill("5");
  await form.locator("summary").click();
  await form.getByLabel("Gates").fill("grounded >= 0\npolite >= -0.05");
  await form.getByRole("button", { name: "Evaluate" }).click();
  await page.waitForURL(/\/ui\/evals\/eval_/);
  await page.locator("#state .status", { hasText: "completed" }).waitFor({ timeout: 240_000 });
  const scorer = (name) => page.locator("table.scorers tr", { hasText: name });
  await scorer("grounded").locator("svg.interval.better").waitFor();
  await scorer("polite").locator("svg.interval.worse").waitFor();
  await scorer("short").locator("svg.interval.even").waitFor();
  await scorer("short").getByText("This difference would show with").waitFor();
  const gates = page.getByRole("region", { name: "Gates" });
  await gates.locator("tr", { hasText: "grounded >= 0" }).locator(".held").waitFor();
  await gates.locator("tr", { hasText: "polite >= -0.05" }).locator(".fell").waitFor();
  await page.getByRole("region", { name: "Runs that do not count" }).getByText("Diverged").waitFor();
  await shot(page, "evaluation-top");
  const id = page.url().match(/eval_[0-9a-f-]{36}/)[0];
  const { result } = await api(base, "GET", `/evals/${id}`);
  await page.getByRole("link", { name: "More cases" }).click();
  await page.waitForURL(/cursor=25/);
  await page.locator("table.cases tr", { hasText: "discount-3" }).first().waitFor();
  await page.locator("table.cases", { hasText: "calls read_file in turn 1" }).waitFor();
  const flipped = page.getByRole("region", { name: "Flipped cases", exact: true }).locator("tbody tr");
  assert.equal(await flipped.count(), Math.min(25, result.flipped.length));
  await flipped.first().getByRole("link").first().click();
  await page.waitForURL(/\/ui\/compare\?.*#difference$/);
  const { top } = await page.locator("#difference").evaluate((it) => it.getBoundingClientRect());
  assert.ok(top >= 0 && top < 850, `the first difference is at ${top}`);
  await page.locator("section.diff").first().waitFor();
  assert.ok(page.url().includes(result.flipped[0].a) && page.url().includes(result.flipped[0].b));
  await page.goto(`${base}/ui/evals`);
  const row = page.locator("table.evals tbody tr", { hasText: "support over tickets" });
  await row.locator(".status.fell").waitFor();
  await row.getByText("80 of 80 runs").waitFor();
  await page.keyboard.press("j");
  await page.keyboard.press("Enter");
  await page.waitForURL(new RegExp(`${id}$`));
  await page.setViewportSize({ width: 1440, height: 1000 });
  await page.evaluate(() => window.scrollTo(0, 0));
  await shot(page, "evaluation");
  await page.setViewportSize({ width: 1360, height: 850 });
}

/** The progress moves by itself, and an evaluation is cancelled on its page and in the list. */
export async function cancelEvaluations(page, base, { api }) {
  const cases = ["one", "two", "three"].map((id) => ({ id, input: `A long story, ${id}` }));
  const [first, second] = [await api(base, "POST", "/evals", { agent: "writer", cases }), await api(base, "POST", "/evals", { agent: "writer", cases })];
  await page.goto(`${base}/ui/evals/${first.id}`);
  await page.locator("progress.wide").waitFor();
  await page.locator("table.cases", { hasText: "running" }).waitFor();
  await page.locator("#actions summary", { hasText: "Cancel" }).click();
  await page.getByLabel("Why").fill("the story is too long");
  await page.getByRole("button", { name: "Cancel the evaluation" }).click();
  await page.locator("#state .status", { hasText: "cancelled" }).waitFor();
  await page.locator(".warning", { hasText: "the story is too long" }).waitFor();
  await page.locator("progress").waitFor({ state: "detached" });
  await page.locator("#cancel").waitFor({ state: "detached" });
  await page.goto(`${base}/ui/evals?agent=writer`);
  await page.getByRole("button", { name: "Cancel the evaluation of writer" }).click();
  await page.waitForFunction(() => [...document.querySelectorAll("table.evals .status")].every((it) => it.textContent === "cancelled"));
  assert.equal((await api(base, "GET", `/evals/${second.id}`)).state, "cancelled");
  const unknown = await fetch(`${base}/ui/evals/eval_unknown`);
  assert.equal(unknown.status, 404);
  assert.match(await unknown.text(), /there is no evaluation/);
}

/** The page of a run shows the line that `axed dataset add` writes. */
export async function addToDataset(page, base, { api, shot, axed, home }) {
  const body = { input: "A short one for the dataset", context: "It is about \u202e walls.", session: "for-the-dataset" };
  await api(base, "POST", "/agents/writer/runs?wait=30", { ...body, input: "A short one before" });
  const run = await api(base, "POST", "/agents/writer/runs?wait=30", body);
  await page.goto(`${base}/ui/runs/${run.id}`);
  await page.getByRole("link", { name: "Add to dataset" }).click();
  const line = await page.locator("#line").textContent();
  const written = JSON.parse(line);
  assert.deepEqual(Object.keys(written), ["input", "context", "messages", "expected", "run"]);
  assert.equal(written.expected, run.content);
  assert.equal(written.context, body.context);
  assert.ok(!line.includes("\u202e"), "what changes the order of the text is visible");
  const download = page.waitForEvent("download");
  await page.getByRole("button", { name: "Download" }).click();
  const file = await download;
  assert.equal(file.suggestedFilename(), "writer.jsonl");
  assert.equal(readFileSync(await file.path(), "utf8"), `${line}\n`);
  await shot(page, "add-to-dataset");
  const command = (await page.locator("pre", { hasText: "axed dataset add" }).textContent()).replace("NAME", "shown").split(" ").slice(1);
  execFileSync(axed, command, { cwd: home, env: { HOME: home, PATH: process.env.PATH, AXED_SERVER: base } });
  assert.deepEqual(JSON.parse(readFileSync(join(home, "datasets/shown.jsonl"), "utf8")), written);
  await page.getByRole("link", { name: "Leave it out" }).click();
  await page.getByRole("link", { name: "Expect the answer" }).waitFor();
  assert.equal(JSON.parse(await page.locator("#line").textContent()).expected, undefined);
}

/** The report that `axed eval` writes is one file that everybody can read. */
export async function report(browser, base, { shot, axed, home }) {
  const gates = ["grounded >= 0", "polite >= -0.05", "cost <= 1.1x"].flatMap((gate) => ["--gate", gate]);
  const command = ["eval", "support", "--against", "support-old", "--dataset", "tickets", "--html", "report.html", ...gates];
  const { status, stderr } = spawnSync(axed, command, { cwd: home, env: { HOME: home, PATH: process.env.PATH, AXED_SERVER: base } });
  assert.equal(status, 1, String(stderr));
  for (const [mode, options] of Object.entries({ light: {}, dark: { colorScheme: "dark" }, narrow: { viewport: { width: 390, height: 844 } } })) {
    const page = await browser.newPage({ viewport: { width: 1440, height: 1000 }, ...options });
    await page.goto(pathToFileURL(join(home, "report.html")).href);
    assert.deepEqual(await faultsOf(page), [], mode);
    await shot(page, mode === "light" ? "eval-report" : `eval-report-${mode}`);
    await page.close();
  }
}

/** The addresses of the pages that these stories have filled. */
export async function evalAddresses(base, { api }) {
  const evals = (await api(base, "GET", "/evals")).data;
  const compared = evals.find((it) => it.agent === "support").id;
  const cancelled = evals.find((it) => it.state === "cancelled").id;
  const [run] = (await api(base, "GET", "/runs?agent=writer&status=completed")).data;
  return ["evals", "evals?agent=none", `evals/${compared}`, `evals/${compared}?cursor=25`, `evals/${cancelled}`, "agents/support", `runs/${run.id}/dataset`];
}
