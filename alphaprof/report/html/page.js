// Draws each figure when it comes into view, and shows the drafts and rules that are switched on.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const buttons = [...document.querySelectorAll("#filters button")];
  const plots = [...document.querySelectorAll(".plot")];
  const kindOf = (button) => button.closest(".group").dataset.kind;
  const isOn = (button) => button.getAttribute("aria-pressed") === "true";
  const off = (kind) => new Set(buttons.filter((b) => kindOf(b) === kind && !isOn(b)).map((b) => b.dataset.value));

  function shown(traces) {
    const hidden = { draft: off("draft"), rule: off("rule") };
    return traces.map(({ meta }) => !meta || !(hidden.draft.has(meta.draft) || hidden.rule.has(meta.rule)));
  }

  function draw(plot) {
    const { data, layout } = figures[plot.dataset.figure];
    const visible = shown(data);
    data.forEach((trace, place) => { trace.visible = visible[place]; });
    plot.dataset.drawn = "yes";
    Plotly.newPlot(plot, data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }

  function update() {
    for (const plot of plots) {
      if (plot.dataset.drawn) Plotly.restyle(plot, "visible", shown(plot.data));
    }
    const hidden = off("draft");
    for (const part of document.querySelectorAll("[data-draft]")) part.hidden = hidden.has(part.dataset.draft);
  }

  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(!isOn(button)));
      update();
    });
  }

  // One figure at a time, so that the first is on the screen before the second is begun.
  const waiting = [];
  function drawNext() {
    const plot = waiting.shift();
    if (!plot) return;
    draw(plot);
    requestAnimationFrame(() => setTimeout(drawNext));
  }

  const seen = new IntersectionObserver((entries) => {
    const idle = waiting.length === 0;
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting && !target.dataset.drawn) {
        seen.unobserve(target);
        waiting.push(target);
      }
    }
    if (idle) drawNext();
  }, { rootMargin: "300px" });

  // The library is most of this file: it runs once the verdict and the tables are on the screen.
  function start() {
    const library = document.createElement("script");
    library.textContent = document.getElementById("plotly").textContent;
    document.head.append(library);
    plots.forEach((plot) => seen.observe(plot));
    window.addEventListener("beforeprint", () => {
      waiting.length = 0;
      plots.filter((plot) => !plot.dataset.drawn).forEach(draw);
    });
  }
  requestAnimationFrame(() => setTimeout(start));
})();
