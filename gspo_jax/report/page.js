"use strict";
const { figures, templates } =
  JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const template = () => templates[dark.matches ? "dark" : "light"];
// Without a mouse, a drag scrolls the page and the buttons, which then are
// always visible, zoom.
const dragmode = matchMedia("(hover: none)").matches ? false : "zoom";

function draw(chart) {
  const { data, layout, title } = figures[chart.id];
  Plotly.newPlot(chart, data, { ...layout, dragmode, template: template() }, {
    responsive: true,
    displaylogo: false,
    showLink: false,
    showSendToCloud: false,
    showEditInChartStudio: false,
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
    toImageButtonOptions: { filename: title, width: 800, height: 480, scale: 2 },
  });
}

// A chart takes up to 0.1 s: it is drawn when it is near the screen.
const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    draw(target);
  }
}, { rootMargin: "600px" });
const charts = [...document.querySelectorAll(".chart")];
for (const chart of charts) near.observe(chart);
addEventListener("beforeprint", () => {
  for (const chart of charts) if (!chart.data) draw(chart);
});
dark.addEventListener("change", () => {
  for (const chart of charts)
    if (chart.data) Plotly.relayout(chart, { template: template() });
});

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
