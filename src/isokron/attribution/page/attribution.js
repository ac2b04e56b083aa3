// A filter over the queries, and the exact score of the token that is pointed at or has the focus.
// Without scripts all is there: lists are whole, and styles show the scores.
const tools = document.querySelector(".tools");
if (tools) {
  tools.hidden = false;
  const filter = document.getElementById("filter");
  const matches = document.getElementById("matches");
  const queries = [...document.querySelectorAll(".query")];
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const element of document.querySelectorAll("[data-words]")) {
      element.hidden = !wanted.every((word) => element.dataset.words.includes(word));
    }
    const left = queries.filter((query) => !query.hidden).length;
    matches.textContent = wanted.length ? `${left} of ${queries.length}` : "";
  });
  tools.addEventListener("click", (event) => {
    const open = event.target.dataset.open;
    if (open === undefined) return;
    for (const query of queries) if (!query.hidden) query.open = Boolean(open);
  });
}

// Browsers that do not unfold what a link leads into.
const unfold = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let at = target; at; at = at.parentElement) {
    if (at.tagName === "DETAILS") at.open = true;
    if (at.hidden) at.hidden = false;
  }
  target.scrollIntoView();
};
addEventListener("hashchange", unfold);
if (location.hash) unfold();

const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "status");
document.body.append(tip);
const token = (event) => event.target.closest?.(".tokens b");
const show = (piece) => {
  tip.textContent = piece ? `${JSON.stringify(piece.textContent)}  ${piece.dataset.s}` : "";
  if (!piece) return;
  const box = piece.getClientRects()[0] ?? piece.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 0 ? above : box.bottom + 6}px`;
};
const focused = () => document.activeElement?.closest(".tokens b");
document.addEventListener("pointerover", (event) => show(token(event) ?? focused()));
document.addEventListener("focusin", (event) => show(token(event)));
document.addEventListener("focusout", () => show(null));
addEventListener("scroll", () => show(focused()), { capture: true, passive: true });
// One token of a text is in the tab order: the one last visited.
const visit = (piece, next) => {
  for (const each of piece.parentElement.querySelectorAll("[tabindex]")) each.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
};
document.addEventListener("click", (event) => {
  const piece = token(event);
  if (piece) visit(piece, piece);
});
document.addEventListener("keydown", (event) => {
  const piece = token(event);
  if (!piece) return;
  const all = [...piece.parentElement.querySelectorAll("b")];
  const to = { ArrowLeft: -1, ArrowRight: 1, Home: -all.length, End: all.length }[event.key];
  if (event.key === "Escape") show(null);
  if (to === undefined) return;
  event.preventDefault();
  visit(piece, all[Math.min(all.length - 1, Math.max(0, all.indexOf(piece) + to))]);
});
