// Loads pages: the next one if this tab has a key, which a browser would not send, and newer versions of the one shown.

import { dropKey, getKey, request, setKey } from "./client.js";
import { markDecided } from "./decided.js";

let generation = 0;
/** The path and the query of the page that is shown. */
let shown = addressOf(location);
/** The addresses of pictures in this page, and of their bytes in this tab. */
const pictures = new Map();

function addressOf({ pathname, search }) {
  return pathname + search;
}

async function load(address) {
  const response = await request(address, { headers: { Accept: "text/html" } });
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  return { page, status: response.status, url: response.url };
}

/** Scrolls the bars and lists that scroll by themselves to what is current in them. */
function showCurrent() {
  for (const current of document.querySelectorAll("header.top nav [aria-current], .tree [aria-current]")) {
    const list = current.closest("nav, .tree-pane");
    const [inner, outer] = [current.getBoundingClientRect(), list.getBoundingClientRect()];
    if (inner.right > outer.right) list.scrollLeft += inner.right - outer.right;
    if (inner.bottom > outer.bottom - 40) list.scrollTop += inner.top - outer.top - outer.height / 2;
  }
}

/** Shows the pictures of a server with keys, to which a browser would not send one. */
async function showPictures(root) {
  for (const image of root.querySelectorAll("img[data-picture]:not([src])")) {
    const address = image.dataset.picture;
    if (!pictures.has(address)) {
      const response = await request(address, { cache: "default" }).catch(() => null);
      if (!response?.ok) continue;
      pictures.set(address, URL.createObjectURL(await response.blob()));
    }
    image.src = pictures.get(address);
  }
}

function announce() {
  shown = addressOf(location);
  showCurrent();
  showPictures(document);
  document.dispatchEvent(new Event("console:page"));
}

/** Gives the page that is shown another address. */
export function replaceAddress(address) {
  history.replaceState(null, "", address);
  shown = addressOf(location);
}

/** Shows another page without a new document, because only scripts can send the key. `push` is false for the current address. */
export async function visit(address, { push = true, scroll = true } = {}) {
  if (!getKey()) {
    if (push) location.assign(address);
    // An assignment would only scroll if the address has a fragment.
    else location.reload();
    return;
  }
  const mine = ++generation;
  document.body.setAttribute("aria-busy", "true");
  let loaded;
  try {
    loaded = await load(address);
  } catch {
    document.body.removeAttribute("aria-busy");
    notice("The server cannot be reached.");
    return;
  }
  if (mine !== generation) return;
  // The address of a response has no fragment.
  const { hash } = new URL(address, location.href);
  if (push) history.pushState(null, "", loaded.url + hash);
  for (const address of pictures.values()) URL.revokeObjectURL(address);
  pictures.clear();
  document.title = loaded.page.title;
  document.body.replaceWith(document.adoptNode(loaded.page.body));
  if (scroll) window.scrollTo(0, 0);
  document.getElementById("main")?.focus({ preventScroll: true });
  if (scroll && hash) document.getElementById(hash.slice(1))?.scrollIntoView();
  announce();
}

/**
 * Replaces the live parts of the page by their newest versions. What a person has open or typed stays. Throws an error if the
 * server does not give the page.
 */
export async function refresh() {
  const mine = generation;
  const { page, status } = await load(shown);
  if (mine !== generation) return;
  // The sign-in page has the status 200 too.
  if (status !== 200 || page.querySelector("[data-sign-in]")) throw new Error(`The server answered ${status}.`);
  for (const part of document.querySelectorAll("[data-live]")) {
    const newer = page.getElementById(part.id);
    if (!newer) continue;
    await showPictures(newer);
    part.dataset.live = newer.dataset.live;
    replace(part, newer);
  }
  document.dispatchEvent(new Event("console:refreshed"));
}

/**
 * Gives the new list the order of the old one. What is gone stays at its place and is marked, what is new comes last, and a
 * form that somebody fills in stays.
 */
function merge(old, newer) {
  const fresh = new Map([...newer.children].map((child) => [child.id, child]));
  const kept = [...old.children].map((child) => {
    const next = fresh.get(child.id);
    fresh.delete(child.id);
    if (!next && !("decided" in child.dataset)) markDecided(child, "Does not wait any more");
    const stays = !next || "decided" in child.dataset || child.querySelector("form[data-dirty]");
    return stays ? child : next;
  });
  newer.replaceChildren(...kept, ...fresh.values());
}

function replace(part, newer) {
  const split = document.querySelector(".split");
  if (part.isEqualNode(newer)) return;
  // A form that somebody fills in is not taken away.
  const dirty = [...part.querySelectorAll("form[data-dirty]")];
  if (dirty.some((form) => !form.closest("[data-merge]") || form.contains(document.activeElement))) return;
  const open = [...part.querySelectorAll("details[open][id]")].map((it) => it.id);
  const checked = [...part.querySelectorAll("input[type=checkbox]:checked")].map((it) => it.value);
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const scroll = [part.scrollTop, part.parentElement.scrollTop];
  document.adoptNode(newer);
  for (const list of part.querySelectorAll("[data-merge]")) {
    const same = newer.querySelector(`#${list.id}`);
    if (same && list.dataset.merge === same.dataset.merge) merge(list, same);
  }
  part.replaceChildren(...newer.childNodes);
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  for (const box of part.querySelectorAll("input[type=checkbox]")) box.checked = checked.includes(box.value);
  [part.scrollTop, part.parentElement.scrollTop] = scroll;
  if (focused && split !== undefined) {
    const same = focused.id
      ? document.getElementById(focused.id)
      : [...part.querySelectorAll("a[href]")].find((link) => link.href === focused.href);
    same?.focus({ preventScroll: true });
  }
}

export function notice(text) {
  const place = document.getElementById("notice");
  if (place) place.textContent = text;
}

/** Has a screen reader speak a sentence. */
export function speak(text) {
  const place = document.getElementById("spoken");
  if (!place || !text.trim()) return;
  const line = document.createElement("p");
  line.textContent = text;
  place.append(line);
  if (place.childElementCount > 20) place.firstElementChild.remove();
}

/** Stays on this page although another one is being loaded. */
function abandonVisit() {
  generation += 1;
  document.body.removeAttribute("aria-busy");
}

function follow(event) {
  if (!getKey() || event.defaultPrevented || event.button !== 0) return;
  if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const link = event.target.closest?.("a[href]");
  if (!link || link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
  if (link.hash && link.pathname === location.pathname && link.search === location.search) return;
  event.preventDefault();
  visit(link.href);
}

async function signIn(event) {
  event.preventDefault();
  const form = event.target;
  const refuse = (why) => {
    dropKey();
    form.querySelector(".error").textContent = why;
    form.elements.key.select();
  };
  try {
    setKey(form.elements.key.value.trim());
  } catch {
    return refuse("The key has characters that cannot be sent.");
  }
  let page;
  try {
    ({ page } = await load(location.href));
  } catch {
    return refuse("The server cannot be reached. Try again.");
  }
  // The page for a key that is refused is the form again, with the reason. Another error is a page that the key may see.
  const again = page.querySelector("[data-sign-in] .error");
  if (again) return refuse(again.textContent || "The server did not receive the key.");
  document.title = page.title;
  document.body.replaceWith(document.adoptNode(page.body));
  announce();
}

export function start() {
  showCurrent();
  document.addEventListener("click", (event) => {
    if (event.target.closest?.("[data-sign-out]")) {
      dropKey();
      location.reload();
      return;
    }
    follow(event);
  });
  document.addEventListener("submit", (event) => {
    if (event.target.matches("[data-sign-in]")) signIn(event);
    if (event.target.matches("[data-navigate]") && getKey()) {
      event.preventDefault();
      const query = new URLSearchParams(new FormData(event.target));
      for (const [name, value] of [...query]) if (!value) query.delete(name);
      visit(`${event.target.action}?${query}`);
    }
  });
  window.addEventListener("popstate", () => {
    // Links to parts of the page fire this event too.
    if (addressOf(location) !== shown) visit(location.href, { push: false });
    else if (document.body.hasAttribute("aria-busy")) abandonVisit();
  });
  // The first page of a tab that has a key, such as after a reload.
  if (getKey() && document.querySelector("[data-sign-in]")) visit(location.href, { push: false, scroll: false });
}
