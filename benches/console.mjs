// Times pages in Chromium, from the click to the drawn page, and the frames while the tree is scrolled. benches/console.py
// starts it: node console.mjs CHROMIUM BASE RUN

import { chromium } from "playwright-core";

const [executablePath, base, run] = process.argv.slice(2);
const REPEATS = 5;
const MAX_FRAME = 50;

const median = (numbers) => numbers.toSorted((a, b) => a - b)[Math.floor(numbers.length / 2)];
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
const page = await browser.newPage({ viewport: { width: 1360, height: 850 } });
let failed = false;

async function open(name, path, limit) {
  const times = [];
  for (let n = 0; n < REPEATS; n++) {
    const start = performance.now();
    await page.goto(base + path);
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
    times.push(performance.now() - start);
  }
  const elements = await page.evaluate(() => document.querySelectorAll("*").length);
  const time = median(times);
  failed ||= time > limit;
  console.log(`${time.toFixed(0)} ms until ${name} is drawn, ${elements} elements${time > limit ? "  TOO SLOW" : ""}`);
}

await open("the first view", "/ui/", 200);
await open("the usage", "/ui/usage", 400);
await open("the tree", `/ui/runs/${run}`, 1000);
const frames = await page.evaluate(async () => {
  const pane = document.querySelector(".tree-pane");
  const times = [];
  let last = performance.now();
  for (let n = 0; n < 60; n++) {
    pane.scrollTop += 400;
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  return times;
});
const frame = median(frames);
failed ||= frame > MAX_FRAME;
console.log(`${frame.toFixed(0)} ms a frame while the tree scrolls, the longest ${Math.max(...frames).toFixed(0)} ms`);
await browser.close();
process.exit(failed ? 1 : 0);
