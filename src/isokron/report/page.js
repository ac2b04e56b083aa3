// Pointing at a plot reads the mean curves there; without scripts the captions stay.
for (const figure of document.querySelectorAll("figure[data-curves]")) {
  const curves = JSON.parse(figure.dataset.curves);
  const svg = figure.querySelector("svg");
  const readout = figure.querySelector(".readout");
  const caption = readout.textContent;
  const axis = svg.querySelector("path.axis[d*='H']");
  if (!curves.length || !axis) continue;
  const log = figure.dataset.log === "x";
  const ends = curves.flatMap((curve) => [curve.points[0][0], curve.points.at(-1)[0]]);
  const [first, last] = [Math.min(...ends), Math.max(...ends)];
  // curves over a logarithmic axis have values of many sizes
  const show = (y) => (log ? y.toPrecision(3) : y.toFixed(4));
  svg.addEventListener("pointermove", (event) => {
    const box = axis.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const x = log ? first * (last / first) ** share : first + share * (last - first);
    const read = curves.map(({ label, points }) => {
      const i = points.findIndex((point) => point[0] >= x);
      if (i < 0) return `${label} ${log ? "–" : "done"}`;
      if (i === 0) return `${label} ${show(points[0][1])}`;
      const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
      return `${label} ${show(y0 + ((x - x0) / (x1 - x0)) * (y1 - y0))}`;
    });
    readout.textContent = `${figure.dataset.axis} ${x.toPrecision(3)}: ${read.join(", ")}`;
  });
  svg.addEventListener("pointerleave", () => (readout.textContent = caption));
}
// Heads of a sortable table become buttons; without scripts the rows stay as they came.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const words = column === 0;
      const down = head.ariaSort ? head.ariaSort === "ascending" : !words;
      const key = (row) => row.cells[column].dataset.key;
      const compare = (a, b) => (words ? key(a).localeCompare(key(b), "en", { numeric: true }) : key(a) - key(b));
      const rows = [...body.rows].sort((a, b) => (down ? compare(b, a) : compare(a, b)));
      for (const other of heads) other.ariaSort = null;
      head.ariaSort = down ? "descending" : "ascending";
      body.append(...rows);
    });
  });
}
