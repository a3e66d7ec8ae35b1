"use strict";
// Unpacks plotly.js when the first chart is needed, and draws what comes into sight. `window.loka.draw` is for
// the other scripts of the page.
(() => {
  const CONFIG = { displayModeBar: false, displaylogo: false, responsive: true };
  const TOO_OLD = "This browser cannot draw the charts; the tables have all of their numbers.";
  const drawn = new Map();
  let library = null;

  async function unpack() {
    const packed = atob(document.getElementById("plotly").textContent.trim());
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(plain).text();
    document.head.append(script);
    return window.Plotly;
  }

  function plotly() {
    library ??= unpack();
    return library;
  }

  // Colours of text, grid and hover labels are those of the style sheet, so that they follow the theme.
  function completed(layout) {
    const isNarrow = window.innerWidth < 640;
    const axis = { automargin: true, zeroline: true };
    return {
      margin: { l: 60, r: 16, t: 24, b: 50 },
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: isNarrow ? 11 : 13 },
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom" },
      dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom",
      hoverlabel: { align: "left" },
      xaxis: { ...axis, ...layout.xaxis, title: { standoff: 10, ...layout.xaxis.title } },
      yaxis: { ...axis, ...layout.yaxis, title: { standoff: 10, ...layout.yaxis.title } },
    };
  }

  async function draw(place, figure) {
    try {
      const Plotly = await plotly();
      await Plotly.react(place, figure.data, completed(figure.layout), CONFIG);
      place.removeAttribute("aria-busy");
      drawn.set(place, true);
    } catch (error) {
      place.textContent = TOO_OLD;
      place.classList.add("failed");
      // It is a sentence now, which the name of a picture would hide.
      for (const name of ["role", "aria-label", "aria-busy"]) place.removeAttribute(name);
      throw error;
    }
  }

  const waiting = new Map();

  // Draws once the place is seen, or when the page has nothing else to do: a printer sees everything.
  function drawWhenSeen(place, figure) {
    waiting.set(place, figure);
    seen.observe(place);
  }

  function drawWaiting(place) {
    const figure = waiting.get(place);
    if (!figure || !isLaidOut(place)) return null;
    waiting.delete(place);
    seen.unobserve(place);
    return draw(place, figure());
  }

  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) if (entry.isIntersecting) drawWaiting(entry.target);
    },
    { rootMargin: "300px" },
  );

  function isLaidOut(place) {
    return place.offsetParent !== null;
  }

  async function drawAll() {
    for (const place of [...waiting.keys()]) await drawWaiting(place);
  }

  window.loka = { draw, drawWhenSeen };

  for (const group of document.querySelectorAll("figure.charts")) {
    const charts = [...group.querySelectorAll(".chart")];
    for (const chart of charts) {
      const place = chart.querySelector(".plot");
      if (!place) continue;
      drawWhenSeen(place, () => JSON.parse(chart.querySelector("script").textContent));
    }
    const select = group.querySelector("select");
    if (!select) continue;
    select.closest("label").hidden = false;
    select.addEventListener("change", () => {
      charts.forEach((chart, index) => {
        chart.hidden = index !== Number(select.value);
      });
      for (const place of group.querySelectorAll(".plot")) {
        drawWaiting(place);
        // What was hidden while the window changed has the width of before.
        if (drawn.has(place) && isLaidOut(place)) window.Plotly.Plots.resize(place);
      }
    });
  }

  if (document.getElementById("plotly")) {
    const idle = window.requestIdleCallback ?? ((task) => setTimeout(task, 500));
    window.addEventListener("load", () => idle(() => drawAll(), { timeout: 3000 }));
  }

  // Charts are as wide as the window; paper is narrower.
  const PAPER_PX = 900;
  let onPaper = [];
  window.addEventListener("beforeprint", () => {
    onPaper = [...drawn.keys()].filter(isLaidOut);
    for (const place of onPaper) {
      window.Plotly.relayout(place, { width: Math.min(PAPER_PX, place.clientWidth), autosize: false });
    }
  });
  window.addEventListener("afterprint", () => {
    for (const place of onPaper) window.Plotly.relayout(place, { width: null, autosize: true });
  });
})();
