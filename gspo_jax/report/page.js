"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const read = document.getElementById("read");
const make = (name) =>
  document.createElementNS("http://www.w3.org/2000/svg", name);
const digits = (v) => v === null ? "-" : Math.abs(v) >= 1e4 || v && Math.abs(v) < 1e-3
  ? v.toExponential(2) : String(Number(v.toPrecision(3)));
const say = (v, unit) => v === null ? "-" : unit === "%"
  ? digits(100 * v) + "%" : digits(v) + (unit ? " " + unit : "");

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return x - xs[low] <= xs[high] - x ? low : high;
}

function place([low, high, start, end, log], v) {
  const f = log ? Math.log : (w) => w;
  v = Math.min(Math.max(v, low), high);
  return start + (f(v) - f(low)) / (f(high) - f(low)) * (end - start);
}

function show(svg, chart, event) {
  const box = svg.getBoundingClientRect();
  const [low, high, start, end] = chart.x;
  const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
  if (at < start - 8 || at > end + 8) return hide(svg);
  const step = low + (at - start) / (end - start) * (high - low);
  const found = chart.s.map((s) => [s, nearest(s.x, step)]);
  const best = found.reduce((a, b) =>
    Math.abs(b[0].x[b[1]] - step) < Math.abs(a[0].x[a[1]] - step) ? b : a);
  const shown = best[0].x[best[1]];
  hide(svg);
  const cursor = make("g"), line = make("path");
  cursor.setAttribute("class", "cursor-of");
  line.setAttribute("class", "cursor");
  const x = place([...chart.x, 0], shown);
  line.setAttribute("d", `M${x} ${chart.y[2]}V${chart.y[3]}`);
  cursor.append(line);
  read.replaceChildren("step " + shown.toLocaleString("en"));
  for (const [s, i] of found) {
    const row = document.createElement("div"), name = document.createElement("b");
    const v = s.v[i], old = s.x[i] === shown ? "" : ` (step ${s.x[i].toLocaleString("en")})`;
    row.className = name.className = "c" + s.c;
    name.textContent = s.n;
    const band = s.a && v !== null && s.a[i] !== s.b[i]
      ? `, ${say(s.a[i], chart.u)} to ${say(s.b[i], chart.u)}` : "";
    row.append(name, " " + say(v, chart.u) + band + old);
    read.append(row);
    if (v === null) continue;
    const dot = make("circle");
    dot.setAttribute("class", "c" + s.c);
    dot.setAttribute("r", 3.2);
    dot.setAttribute("cx", place([...chart.x, 0], s.x[i]));
    dot.setAttribute("cy", place(chart.y, v));
    cursor.append(dot);
  }
  svg.append(cursor);
  read.style.display = "block";
  const width = read.offsetWidth, height = read.offsetHeight;
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  read.style.left = Math.max(4, left) + "px";
  read.style.top = Math.min(event.clientY + 12, innerHeight - height - 4) + "px";
}

function hide(svg) {
  read.style.display = "none";
  svg.querySelector(".cursor-of")?.remove();
}

for (const [id, chart] of Object.entries(data)) {
  const svg = document.querySelector(`#${id} svg`);
  svg.addEventListener("pointermove", (event) => show(svg, chart, event));
  svg.addEventListener("pointerleave", () => hide(svg));
}

for (const block of document.querySelectorAll(".samples")) {
  const steps = [...block.querySelectorAll("section[data-step]")];
  const slider = block.querySelector("input"), output = block.querySelector("output");
  const pick = () => steps.forEach((step, i) => {
    step.hidden = i !== Number(slider.value);
    step.querySelector("h4").hidden = true;
    if (!step.hidden) output.textContent = Number(step.dataset.step).toLocaleString("en");
  });
  block.querySelector(".picker").hidden = steps.length < 2;
  slider.addEventListener("input", pick);
  pick();
}
