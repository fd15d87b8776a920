// Stories of links within a page and of pages that the server refuses, for tests/console.mjs.

import assert from "node:assert/strict";

/** Skips to the content of a form that somebody fills in. */
export async function skipToTheContent({ page, faults }, base) {
  const form = `${base}/ui/agents/notes`;
  await page.goto(form);
  const input = page.getByLabel("Input");
  await input.fill("A long task");
  let loads = 0;
  page.on("request", (request) => (loads += request.isNavigationRequest() ? 1 : 0));
  // This event follows the one of the history.
  await page.evaluate(() => window.addEventListener("hashchange", () => (window.hasSkipped = true)));
  await page.locator("a.skip").focus();
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => window.hasSkipped && document.getElementById("main").contains(document.activeElement));
  assert.equal(await input.inputValue(), "A long task");
  assert.equal(loads, 0);
  assert.deepEqual(faults, []);
}

/** A list that the server refuses is marked as stale until it can be loaded again. */
export async function refusedList({ page }, base) {
  const list = `${base}/ui/`;
  await page.goto(list);
  for (const status of [404, 500]) {
    await page.route(list, (route) => route.fulfill({ status, contentType: "text/html", body: "<h1>Not now</h1>" }));
    await page.locator("body[data-disconnected]").waitFor();
    await page.unroute(list);
    await page.locator("body:not([data-disconnected])").waitFor();
  }
}
