// Checks of pages of the console, for tests/console.mjs: what axe-core finds, the width, the focus, and the size.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { get } from "node:http";
import { createRequire } from "node:module";
import { gunzipSync } from "node:zlib";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const MAX_SCRIPTS = 40_000;
const MAX_FIRST_VIEW = 80_000;

/** Findings of axe-core, except minor ones, and parts that are wider than the window. */
export async function faultsOf(page) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const faults = violations
    .filter((it) => it.impact !== "minor")
    .flatMap((it) => it.nodes.map((node) => `${it.id}: ${node.failureSummary.replaceAll("\n", " ")} ${node.html.slice(0, 200)}`));
  const wide = await page.evaluate(() => {
    const width = document.documentElement.scrollWidth;
    if (width <= innerWidth) return [];
    const scrolls = (it) => it.parentElement && (getComputedStyle(it.parentElement).overflowX !== "visible" || scrolls(it.parentElement));
    const beyond = [...document.querySelectorAll("body *")].filter((it) => it.getBoundingClientRect().right > innerWidth + 0.5 && !scrolls(it));
    return [`${width} px wide in ${innerWidth}: ${beyond.slice(-2).map((it) => it.outerHTML.slice(0, 160))}`];
  });
  const twice = await page.evaluate(() => {
    const ids = [...document.querySelectorAll("[id]")].map((it) => it.id);
    return ids.filter((id, n) => ids.indexOf(id) !== n).map((id) => `two elements have the id ${id}`);
  });
  return [...faults, ...wide, ...twice];
}

/** Moves through the page with the tab key. Each stop must be visible, and differ from its look without focus. */
export async function focusFaultsOf(page, stops) {
  const faults = [];
  await page.evaluate(() => document.activeElement?.blur());
  for (let n = 0; n < stops; n++) {
    await page.keyboard.press("Tab");
    const fault = await page.evaluate(() => {
      const element = document.activeElement;
      if (!element || element === document.body) return null;
      const { width, height } = element.getBoundingClientRect();
      const framed = element.closest(".compose") ?? element;
      const target = element.matches("input.sr") ? element.previousElementSibling : element;
      const hasOutline = (it) => getComputedStyle(it).outlineStyle !== "none" && parseFloat(getComputedStyle(it).outlineWidth) >= 2;
      const isSeen = hasOutline(target) || hasOutline(framed);
      return width > 0 && height > 0 && isSeen ? null : `the focus is not visible: ${element.outerHTML.slice(0, 160)}`;
    });
    if (fault) faults.push(fault);
  }
  return faults;
}

/** A response as a browser gets it. */
function load(url) {
  return new Promise((resolve, reject) => {
    get(url, { headers: { "accept-encoding": "gzip" } }, (response) => {
      const chunks = [];
      response.on("data", (chunk) => chunks.push(chunk));
      response.on("error", reject);
      response.on("end", () => {
        const bytes = Buffer.concat(chunks);
        const isZipped = response.headers["content-encoding"] === "gzip";
        resolve({ size: bytes.length, text: (isZipped ? gunzipSync(bytes) : bytes).toString() });
      });
    }).on("error", reject);
  });
}

/** Checks how many bytes a browser loads for the first page of a visit, and how many of them are scripts. */
export async function checkSizes(base, paths) {
  const loaded = new Map();
  let scripts = 0;
  const loadAsset = async (path) => {
    if (loaded.has(path)) return;
    const { size, text } = await load(base + path);
    loaded.set(path, size);
    if (!path.endsWith(".js")) return;
    scripts += size;
    for (const [, name] of text.matchAll(/from "\.\/([^"]+)"/g)) await loadAsset(path.replace(/[^/]+$/, name));
  };
  for (const path of paths) {
    const page = await load(`${base}/ui/${path}`);
    for (const [, asset] of page.text.matchAll(/(?:src|href)="(\/ui\/assets\/[^"]+)"/g)) await loadAsset(asset);
    const assets = [...loaded.values()].reduce((sum, size) => sum + size, 0);
    const sum = page.size + assets;
    assert.ok(sum < MAX_FIRST_VIEW, `the first view of /ui/${path} has ${sum} bytes`);
  }
  assert.ok(scripts > 0 && scripts < MAX_SCRIPTS, `the scripts have ${scripts} bytes`);
  return scripts;
}
