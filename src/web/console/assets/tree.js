// The tree of a run: rows fold, and the divider of its first column moves.

const SHARES = { min: 0.2, max: 0.7, step: 0.02 };
/** The runs whose rows are folded. */
const folded = new Set();

function fold() {
  const buttons = [...document.querySelectorAll("[data-fold]")];
  const all = document.querySelector(".tree")?.children ?? [];
  let hiddenBelow = Infinity;
  for (const row of all) {
    const level = Number(row.dataset.level);
    if (level <= hiddenBelow) hiddenBelow = Infinity;
    row.hidden = level > hiddenBelow;
    const button = row.querySelector("[data-fold]");
    if (!row.hidden && button && folded.has(button.dataset.fold)) hiddenBelow = level;
  }
  for (const button of buttons) button.setAttribute("aria-expanded", String(!folded.has(button.dataset.fold)));
}

function toggle(button) {
  const { fold: run } = button.dataset;
  if (!folded.delete(run)) folded.add(run);
  fold();
}

function setShare(share) {
  const clamped = Math.max(SHARES.min, Math.min(SHARES.max, share));
  document.documentElement.style.setProperty("--share", clamped.toFixed(3));
  sessionStorage.setItem("axed.share", clamped.toFixed(3));
  showShare();
}

function share() {
  return Number(sessionStorage.getItem("axed.share")) || 0.42;
}

function showShare() {
  document.querySelector(".divider")?.setAttribute("aria-valuenow", String(Math.round(share() * 100)));
}

function drag(event) {
  const divider = event.target.closest?.(".divider");
  if (!divider) return;
  event.preventDefault();
  const head = divider.parentElement.getBoundingClientRect();
  const move = ({ clientX }) => setShare((clientX - head.left - 18) / (head.width - 36));
  const end = () => {
    document.removeEventListener("pointermove", move);
    document.removeEventListener("pointerup", end);
  };
  document.addEventListener("pointermove", move);
  document.addEventListener("pointerup", end);
}

function show() {
  fold();
  showShare();
}

export function start() {
  if (sessionStorage.getItem("axed.share")) setShare(share());
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-fold]");
    if (button) toggle(button);
  });
  document.addEventListener("pointerdown", drag);
  document.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -SHARES.step, ArrowRight: SHARES.step };
    if (!event.target.matches?.(".divider") || !(event.key in steps)) return;
    event.preventDefault();
    setShare(share() + steps[event.key]);
  });
  document.addEventListener("console:page", show);
  document.addEventListener("console:refreshed", show);
  show();
}
