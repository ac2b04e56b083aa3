// Folded queries are JSON until they are opened: a page of many opens at once.
// Without scripts the open ones can be read, only without colours.
const MISSING = "–";
const number = (value) => {
  // as render.number: three digits
  if (!Number.isFinite(value)) return MISSING;
  const size = Math.abs(value);
  let text = size ? size.toPrecision(3) : "0";
  if (size >= 1e7 || (size > 0 && size < 1e-3)) {
    const [digits, power] = size.toExponential(2).split("e");
    const raised = [...power.replace("+", "")].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
    text = `${digits} × 10${raised.join("")}`;
  } else if (size >= 100) text = Math.round(size).toLocaleString("en-US");
  return (value < 0 ? "−" : "") + text;
};
const percent = (share) => {
  // as render.percent: at most three decimals
  if (!Number.isFinite(share)) return MISSING;
  const size = Math.abs(100 * share);
  let text = size > 0 && size < 1e-3 ? "<0.001" : number(Number(size.toFixed(3)));
  if (size < 0.1 && text.includes(".") && !text.startsWith("<")) text = text.replace(/\.?0+$/, "");
  return `${share < 0 ? "−" : share > 0 ? "+" : ""}${text}\u00a0%`;
};

// Tokens: one span of text is cut into pieces, each coloured by its share.
const LEVELS = 5;
const numbers = (box, name) => (box.dataset[name] ? box.dataset[name].split(" ").map(Number) : []);
const scaleOf = (values) => {
  // 98 % of the tokens lie below the deepest colour: one outlier must not pale the others
  const sizes = values.filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.98 * sizes.length))] : 0;
};
const level = (value, scale, [up, down]) => {
  const depth = scale && Number.isFinite(value) ? Math.round(LEVELS * Math.min(1, Math.abs(value) / scale)) : 0;
  return depth ? (value > 0 ? up : down) + depth : "";
};
const cut = (box, scale) => {
  const text = box.textContent;
  const [cuts, shares, losses] = ["cuts", "shares", "losses"].map((name) => numbers(box, name));
  const lossScale = scaleOf(losses);
  const pieces = [];
  let [start, share, loss] = [0, 0, 0];
  cuts.forEach((length, k) => {
    share += shares[k] ?? 0;
    loss += losses[k] ?? 0;
    // bytes of one character are tokens without text: they count with the piece that shows it
    if (!length && k < cuts.length - 1) return;
    const piece = document.createElement("b");
    const content = length ? text.slice(start, start + length) : "∎";
    for (const part of content.split(/(\n)/)) {
      if (part === "\n") piece.append(Object.assign(document.createElement("span"), { className: "nl" }));
      piece.append(part);
    }
    const classes = [shares.length && level(share, scale, "pn"), losses.length && level(loss, lossScale, "ll")];
    piece.className = classes.filter(Boolean).join(" ");
    const tips = [losses.length && `loss ${number(loss)} nats`, shares.length && percent(share)];
    piece.dataset.s = tips.filter(Boolean).join(", ");
    pieces.push([shares.length ? Math.abs(share) : loss, piece]);
    [start, share, loss] = [start + length, 0, 0];
  });
  if (!pieces.length) return;
  // the strongest is in the tab order, and arrow keys lead on
  pieces.reduce((best, next) => (next[0] > best[0] ? next : best))[1].tabIndex = 0;
  box.replaceChildren(...pieces.map(([, piece]) => piece));
};
const colour = (pane) => {
  for (const box of pane.querySelectorAll(".one .tokens")) cut(box, scaleOf(numbers(box, "shares")));
  const boxes = [...pane.querySelectorAll(".cards .tokens")];
  const scale = scaleOf(boxes.flatMap((box) => numbers(box, "shares")));
  for (const box of boxes) cut(box, scale);
  const legend = pane.querySelector(".legend");
  if (!legend || !scale) return;
  legend.hidden = false;
  legend.querySelector(".low").textContent = percent(-scale);
  legend.querySelector(".high").textContent = percent(scale);
};

// Cards of a pane by another number; ranks follow.
const arrange = (pane) => {
  const key = document.querySelector("[name=order]:checked")?.value ?? "share";
  for (const list of pane.querySelectorAll(".cards")) {
    const down = list.closest(".for") ? -1 : 1;
    const rank = (card) => {
      if (key === "share") return Number(card.dataset.card); // as they were written
      return key in card.dataset ? down * card.dataset[key] : Infinity;
    };
    const cards = [...list.children].sort((a, b) => (rank(a) === rank(b) ? 0 : rank(a) - rank(b)));
    cards.forEach((card, k) => (card.querySelector(".rank").textContent = k + 1));
    list.append(...cards);
  }
};
const queries = [...document.querySelectorAll(".query")];
const hideCards = (query) => {
  for (const card of query.querySelectorAll(".card")) {
    card.hidden = query.matching !== undefined && !query.matching[card.dataset.card];
  }
};
const fill = (details) => {
  if (details.dataset.filled) return;
  details.dataset.filled = "yes";
  const script = details.querySelector(":scope > script");
  if (script) {
    script.insertAdjacentHTML("afterend", JSON.parse(script.textContent));
    script.remove();
  }
  colour(details);
  arrange(details);
  hideCards(details);
};
for (const details of document.querySelectorAll(".lazy[open]")) fill(details);
// toggle does not bubble, so it is caught on its way down
document.addEventListener("toggle", (event) => event.target.matches?.(".lazy[open]") && fill(event.target), true);

const tools = document.querySelector(".tools");
if (tools) {
  tools.hidden = false;
  const filter = document.getElementById("filter");
  const matches = document.getElementById("matches");
  let entries = null; // of each query: its words, then those of its cards
  filter.addEventListener("input", () => {
    entries ??= JSON.parse(document.getElementById("words").textContent);
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let [left, examples] = [0, 0];
    queries.forEach((query, k) => {
      const matching = entries[k].map((entry) => wanted.every((word) => entry.includes(word)));
      query.hidden = !matching.includes(true);
      // a query that matches keeps all its examples
      query.matching = matching[0] ? undefined : matching;
      hideCards(query);
      left += !query.hidden;
      examples += matching.slice(1).filter(Boolean).length;
    });
    matches.textContent = wanted.length ? `${left} of ${queries.length} queries, ${examples} examples` : "";
  });
  tools.addEventListener("change", (event) => {
    if (event.target.name === "order") queries.filter((query) => query.dataset.filled).forEach(arrange);
  });
}
for (const button of document.querySelectorAll(".copy")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const source = button.parentElement.querySelector("pre");
    getSelection().selectAllChildren(source);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      // without the permission, what is selected can be copied by hand
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
}

// A link may lead into a query that is folded, hidden by the search, or not yet there.
const follow = () => {
  const id = decodeURIComponent(location.hash.slice(1));
  if (!id) return;
  const holder = id.startsWith("example.") ? "repeated" : id.replace(/\.(for|against)\.\d+$/, "");
  const pane = document.getElementById(holder);
  if (pane?.matches(".lazy")) {
    fill(pane);
    pane.open = true;
  }
  const target = document.getElementById(id);
  for (let at = target; at; at = at.parentElement) at.hidden = false;
  document.querySelector(".here")?.classList.remove("here");
  target?.classList.add("here");
  target?.scrollIntoView();
};
addEventListener("hashchange", follow);
follow();

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
  for (const other of piece.parentElement.querySelectorAll("[tabindex]")) other.tabIndex = -1;
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
