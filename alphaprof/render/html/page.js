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

  // Panels in which nothing is shown lose their axes, titles and lines; a figure of such panels says so instead.
  function panels(plot, data, layout, visible) {
    const used = new Set(data.filter((trace, place) => visible[place]).map((trace) => trace.xaxis || "x"));
    const changes = {};
    for (const key of Object.keys(layout)) {
      const number = /^xaxis(\d*)$/.exec(key);
      if (number) changes[`xaxis${number[1]}.visible`] = changes[`yaxis${number[1]}.visible`] = used.has("x" + number[1]);
    }
    (layout.annotations || []).forEach((title, place) => { changes[`annotations[${place}].visible`] = used.has(place ? `x${place + 1}` : "x"); });
    (layout.shapes || []).forEach((line, place) => { changes[`shapes[${place}].visible`] = used.has(line.xref.split(" ")[0]); });
    plot.closest(".figure").querySelector(".empty").hidden = used.size > 0;
    return changes;
  }

  function draw(plot) {
    const { data, layout } = figures[plot.dataset.figure];
    const visible = shown(data);
    data.forEach((trace, place) => { trace.visible = visible[place]; });
    plot.dataset.drawn = "yes";
    Plotly.newPlot(plot, data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
    Plotly.relayout(plot, panels(plot, data, layout, visible));
  }

  function update() {
    for (const plot of plots) {
      if (!plot.dataset.drawn) continue;
      const visible = shown(plot.data);
      Plotly.update(plot, { visible }, panels(plot, plot.data, plot.layout, visible));
    }
    const hidden = off("draft");
    for (const part of document.querySelectorAll("[data-draft]")) part.hidden = hidden.has(part.dataset.draft);
    reach();
  }

  // What is wider than the page scrolls, and the keyboard can get there; what fits is no stop on the way.
  function reach() {
    for (const box of document.querySelectorAll(".wide")) {
      if (box.scrollWidth <= box.clientWidth) {
        for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
        continue;
      }
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", box.querySelector("[aria-label]").getAttribute("aria-label"));
    }
  }

  // Links stop below the bar of buttons, however high that is.
  const bar = document.getElementById("filters");
  const measure = () => document.documentElement.style.setProperty("--bar", `${bar.offsetHeight}px`);
  window.addEventListener("resize", () => { measure(); reach(); });
  measure();
  reach();

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

  // The library is most of this file: it is unpacked, and runs, once the verdict and the tables are on the screen.
  async function start() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const library = document.createElement("script");
    library.textContent = await new Response(stream).text();
    document.head.append(library);
    plots.forEach((plot) => seen.observe(plot));
  }
  requestAnimationFrame(() => setTimeout(start));

  // On paper every figure is drawn, as wide as a sheet and smaller where it is too high, and nothing is folded.
  const SHEET = { width: 690, height: 640 }; // CSS pixels between the margins of A4 and Letter, below a caption
  let folded = [];
  window.addEventListener("beforeprint", () => {
    waiting.length = 0;
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const part of folded) part.open = true;
    for (const plot of plots) {
      if (!plot.dataset.drawn) draw(plot);
      plot.style.zoom = Math.min(1, SHEET.height / plot.layout.height);
      Plotly.relayout(plot, { width: SHEET.width / plot.style.zoom });
    }
  });
  window.addEventListener("afterprint", () => {
    for (const plot of plots) {
      plot.style.zoom = 1;
      Plotly.relayout(plot, { width: null, autosize: true });
    }
    for (const part of folded) part.open = false;
  });

  // A link to a section unfolds it.
  function unfold() {
    const part = location.hash && document.querySelector(`${CSS.escape(location.hash).replace("\\#", "#")} > details`);
    if (part) part.open = true;
  }
  window.addEventListener("hashchange", unfold);
  unfold();

  // What is unfolded may be wider than the page.
  for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", reach);
})();
