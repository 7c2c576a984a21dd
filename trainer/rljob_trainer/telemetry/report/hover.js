"use strict";
// Shows the values under the pointer. A chart carries its data; without this script the page only loses the hints.
for (const svg of document.querySelectorAll("svg.chart[data-chart]")) {
  const { plot: [left, top, width, height], xRange: [low, high], xLabel, percent, series } = JSON.parse(svg.dataset.chart);
  const card = svg.closest("figure");
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  line.setAttribute("class", "pointer");
  line.setAttribute("y1", top);
  line.setAttribute("y2", top + height);
  line.style.display = "none";
  svg.append(line);
  card.append(tip);

  const nearest = (xs, x) => xs.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(xs[best] - x) ? i : best), 0);
  const shown = (y) => (y === null ? "–" : percent ? `${+(100 * y).toPrecision(3)} %` : `${+y.toPrecision(4)}`);
  const row = (name, value, colour) => {
    const element = document.createElement("div");
    const label = document.createElement("span");
    if (colour !== undefined) {
      label.append(Object.assign(document.createElement("i"), { className: `dot ${colour}` }));
    }
    label.append(name);
    element.append(label, Object.assign(document.createElement("b"), { textContent: value }));
    return element;
  };

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const wanted = low + ((high - low) * ((event.clientX - box.left) / scale - left)) / width;
    const longest = series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    if (!longest.x.length) return;
    const x = longest.x[nearest(longest.x, wanted)];
    const at = left + (width * (x - low)) / (high - low);
    line.setAttribute("x1", at);
    line.setAttribute("x2", at);
    line.style.display = "";
    tip.replaceChildren(
      row(xLabel, `${Math.round(x)}`),
      ...series.filter((s) => s.x.length).map((s) => row(s.name, shown(s.y[nearest(s.x, x)]), s.colour)),
    );
    tip.hidden = false;
    const place = svg.offsetLeft || svg.getBoundingClientRect().left - card.getBoundingClientRect().left;
    const offset = place + at * scale;
    const flip = offset > card.clientWidth / 2;
    tip.style.left = flip ? "" : `${offset + 12}px`;
    tip.style.right = flip ? `${card.clientWidth - offset + 12}px` : "";
    tip.style.top = `${svg.getBoundingClientRect().top - card.getBoundingClientRect().top + top * scale}px`;
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    line.style.display = "none";
  });
}
