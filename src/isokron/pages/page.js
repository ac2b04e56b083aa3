// Pointing at a plot reads the mean curves there; without scripts the captions stay.
for (const figure of document.querySelectorAll("figure[data-curves]")) {
  const curves = JSON.parse(figure.dataset.curves);
  const svg = figure.querySelector("svg");
  const readout = figure.querySelector(".readout");
  const caption = readout.textContent;
  const axis = svg.querySelector("path.axis[d*='H']");
  if (!curves.length || !axis) continue;
  const last = Math.max(...curves.map((curve) => curve.points.at(-1)[0]));
  svg.addEventListener("pointermove", (event) => {
    const box = axis.getBoundingClientRect();
    const x = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * last;
    const read = curves.map(({ label, points }) => {
      const i = points.findIndex((point) => point[0] >= x);
      if (i < 0) return `${label} done`;
      if (i === 0) return `${label} ${points[0][1].toFixed(4)}`;
      const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
      return `${label} ${(y0 + ((x - x0) / (x1 - x0)) * (y1 - y0)).toFixed(4)}`;
    });
    readout.textContent = `${figure.dataset.axis} ${x.toPrecision(3)}: ${read.join(", ")}`;
  });
  svg.addEventListener("pointerleave", () => (readout.textContent = caption));
}
