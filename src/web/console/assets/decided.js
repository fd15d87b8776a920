// Cards of calls that waited for a person.

/** Leaves the card at its place, with what was decided. */
export function markDecided(card, text) {
  card.style.minHeight = `${card.getBoundingClientRect().height}px`;
  card.dataset.decided = "";
  const call = card.querySelector("header a[href]");
  const line = document.createElement("p");
  line.className = "decided";
  line.setAttribute("role", "status");
  line.append(`${text} · `);
  const link = document.createElement("a");
  link.href = call.href;
  link.textContent = "Open the call";
  line.append(link);
  for (const part of card.querySelectorAll("form, form + p")) part.remove();
  card.append(line);
}
