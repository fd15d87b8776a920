// Keyboard: j and k move through rows, enter opens one, ? shows the help.

import { visit } from "./pages.js";

let at = -1;
let first = "";

const rows = () => [...document.querySelectorAll("[data-row]")].filter((row) => row.getClientRects().length > 0);

function linkOf(row) {
  return row.matches("a") ? row : row.querySelector("a[href]");
}

function move(step) {
  const all = rows();
  if (all.length === 0) return;
  const focused = all.findIndex((row) => row.contains(document.activeElement));
  const current = all.findIndex((row) => row.matches("[aria-current]"));
  at = focused >= 0 ? focused : at >= 0 && at < all.length ? at : current;
  at = Math.max(0, Math.min(all.length - 1, at + step));
  const link = linkOf(all[at]);
  link?.focus();
  all[at].scrollIntoView({ block: "nearest" });
}

function help() {
  const dialog = document.getElementById("help");
  if (!dialog) return;
  if (dialog.open) dialog.close();
  else dialog.showModal();
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches?.("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const go = first === "g" ? document.querySelectorAll("header.top nav a") : [];
  first = event.key;
  if (go.length && event.key === "r") return visit(go[0].href);
  if (go.length && event.key === "a") return visit(go[1].href);
  switch (event.key) {
    case "j":
      return move(1);
    case "k":
      return move(-1);
    case "?":
      return help();
    case "/": {
      const field = document.querySelector("[data-search], .filters input");
      if (field) {
        event.preventDefault();
        field.focus();
      }
      return;
    }
    case "Escape":
      for (const menu of document.querySelectorAll("details.menu[open]")) menu.removeAttribute("open");
  }
}

function toggleTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  sessionStorage.setItem("axed.theme", root.dataset.theme);
}

/** Copies the text of a message. */
async function copy(button) {
  const source = button.closest("li, section")?.querySelector("[data-source]");
  await navigator.clipboard?.writeText(source?.textContent ?? "").then(
    () => (button.textContent = "Copied"),
    () => (button.textContent = "Not allowed"),
  );
}

export function start() {
  document.addEventListener("keydown", press);
  document.addEventListener("console:page", () => (at = -1));
  document.addEventListener("click", (event) => {
    if (event.target.closest?.("[data-help]")) help();
    if (event.target.closest?.("[data-theme-toggle]")) toggleTheme();
    const copied = event.target.closest?.("[data-copy]");
    if (copied) copy(copied);
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(event.target)) menu.removeAttribute("open");
    }
  });
}
