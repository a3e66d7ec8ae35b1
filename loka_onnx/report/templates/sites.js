"use strict";
// One site at a time: its rows in the tables, its histogram, its node in the graph. Whoever is clicked says so
// by the event `loka:site` on the document; everyone shows the site that it names.
(() => {
  const holder = document.getElementById("site-data");
  if (!holder) return;
  const BINS_PER_OCTAVE = 8;
  // Mid tones that can be told apart on a white and on a black page.
  const REGIONS = [
    { name: "becomes 0", color: "rgba(214, 69, 69, 0.22)" },
    { name: "subnormal", color: "rgba(201, 138, 20, 0.22)" },
    { name: "normal", color: "rgba(26, 154, 92, 0.16)" },
    { name: "saturates", color: "rgba(214, 69, 69, 0.22)" },
  ];
  const data = JSON.parse(holder.textContent);
  const known = new Map(data.sites.map((site) => [site.name, site]));
  const panel = document.getElementById("site-panel");
  const choice = document.getElementById("site-choice");
  const tensorChoice = document.getElementById("site-tensor");
  const logarithmic = document.getElementById("site-log");
  const plot = document.getElementById("site-plot");
  let current = null;

  function choose(site) {
    document.dispatchEvent(new CustomEvent("loka:site", { detail: { site } }));
  }

  // Tables -----------------------------------------------------------------------------------------------

  const rows = new Map();
  for (const cell of document.querySelectorAll("main button.site")) {
    const name = cell.dataset.site;
    if (!rows.has(name)) rows.set(name, []);
    rows.get(name).push(cell.closest("tr"));
    cell.setAttribute("aria-pressed", "false");
  }

  function mark(name, isChosen) {
    for (const row of rows.get(name) ?? []) {
      row.classList.toggle("selected", isChosen);
      row.querySelector("button.site").setAttribute("aria-pressed", String(isChosen));
      if (isChosen) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
      if (isChosen) bringIntoView(row);
    }
  }

  // Only inside of its table: the page itself stays where the reader is.
  function bringIntoView(row) {
    if (row.hidden) return;
    const region = row.closest(".wide");
    if (region.scrollHeight <= region.clientHeight) return;
    const head = region.querySelector("thead").offsetHeight;
    const top = row.offsetTop - head;
    if (top < region.scrollTop || row.offsetTop + row.offsetHeight > region.scrollTop + region.clientHeight) {
      region.scrollTop = top;
    }
  }

  function mainRow(row) {
    return row.classList.contains("note") ? mainRow(row.previousElementSibling) : row;
  }

  document.querySelector("main").addEventListener("click", (event) => {
    const row = event.target.closest("table.data tbody tr");
    const ofRow = row && !String(getSelection()) ? mainRow(row).querySelector("button.site") : null;
    const named = event.target.closest("button.site") ?? ofRow;
    if (named) choose(named.dataset.site);
  });

  // Histogram --------------------------------------------------------------------------------------------

  function edge(index) {
    const octave = Math.floor(index / BINS_PER_OCTAVE);
    const part = index % BINS_PER_OCTAVE;
    return octave === 0 ? Math.log2(part) - 129 : Math.log2(BINS_PER_OCTAVE + part) + octave - 130;
  }

  function shareBelow(bins, bound) {
    let found = 0;
    for (const bin of bins) {
      const [low, high, at] = [2 ** bin.low, 2 ** bin.high, 2 ** bound];
      found += bin.share * Math.min(Math.max((at - low) / (high - low), 0), 1);
    }
    return found;
  }

  function percent(share) {
    if (share === 0) return "0 %";
    const value = 100 * share;
    return value < 0.001 ? "< 0.001 %" : `${Number(value.toPrecision(3))} %`;
  }

  // What the bins tell of an activation, and where the ranges of its format lie.
  function readOff(activation) {
    const tensor = data.tensors[activation.tensor];
    const bins = tensor.counts.map((count, index) => ({
      low: edge(tensor.first + index),
      high: edge(tensor.first + index + 1),
      share: count / tensor.total,
    }));
    const ends = bins.length ? [bins[0].low, bins.at(-1).high] : [-1, 1];
    const bounds = activation.bounds ?? [];
    const range = [Math.min(...ends, ...bounds) - 1.5, Math.max(...ends, ...bounds) + 1.5];
    const limits = bounds.length ? [range[0], ...bounds, range[1]] : [];
    const below = limits.map((limit) => shareBelow(bins, limit));
    // What saturates was counted, and stands in the facts; a bin that the bound divides cannot tell.
    const shares = bounds.map((_, i) => below[i + 1] - below[i]);
    return { bins, range, limits, shares };
  }

  function figureOf(activation) {
    const { bins, range, limits, shares } = readOff(activation);
    const isNarrow = window.innerWidth < 640;
    const shapes = [];
    const annotations = [];
    for (let i = 0; i + 1 < limits.length; i += 1) {
      shapes.push({
        type: "rect", layer: "below", yref: "paper", x0: limits[i], x1: limits[i + 1], y0: 0, y1: 1,
        fillcolor: REGIONS[i].color, line: { width: 0 },
      });
      const share = i < shares.length ? `<br>${percent(shares[i])}` : "";
      annotations.push({
        xref: "x", yref: "paper", x: (limits[i] + limits[i + 1]) / 2, y: 1, yanchor: "bottom",
        showarrow: false, text: `${REGIONS[i].name}${share}`, textangle: 0,
        font: { size: isNarrow ? 10 : 12 },
        // Narrow ranges lie side by side: their names take turns in height.
        yshift: isNarrow && i % 2 === 1 ? 26 : 0,
      });
    }
    const step = [1, 2, 4, 8, 16, 32].find((octaves) => (range[1] - range[0]) / octaves <= (isNarrow ? 7 : 14)) ?? 64;
    const ticks = [];
    for (let k = Math.ceil(range[0] / step) * step; k <= range[1]; k += step) ticks.push(k);
    return {
      data: [
        {
          type: "bar",
          x: bins.map((bin) => (bin.low + bin.high) / 2),
          width: bins.map((bin) => bin.high - bin.low),
          // Bins are not equally wide in the logarithm: per octave they can be compared.
          y: bins.map((bin) => (100 * bin.share) / (bin.high - bin.low)),
          hovertext: bins.map(
            (bin) =>
              `${(2 ** bin.low).toPrecision(3)} to ${(2 ** bin.high).toPrecision(3)}: ${percent(bin.share)}`,
          ),
          hoverinfo: "text",
          marker: { color: "#3b82f6", line: { width: 0 } },
        },
      ],
      layout: {
        bargap: 0,
        margin: { l: 60, r: 16, t: isNarrow ? 66 : 44, b: 50 },
        shapes,
        annotations,
        showlegend: false,
        xaxis: {
          title: { text: "magnitude" }, range, tickvals: ticks, zeroline: false,
          ticktext: ticks.map((k) => `2<sup>${k}</sup>`),
        },
        yaxis: { title: { text: "% of elements per octave" }, type: logarithmic.checked ? "log" : "linear" },
      },
    };
  }

  function term(list, name, value) {
    const group = document.createElement("div");
    const dt = document.createElement("dt");
    const dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = value;
    group.append(dt, dd);
    list.append(group);
  }

  function showActivation() {
    const activation = current.activations[Number(tensorChoice.value)];
    const facts = document.getElementById("site-facts");
    facts.replaceChildren();
    for (const [name, value] of activation?.facts ?? []) term(facts, name, value);
    const tensor = activation && data.tensors[activation.tensor];
    const hasBins = Boolean(tensor?.counts.length);
    plot.hidden = !hasBins;
    const none = document.getElementById("site-none");
    none.hidden = hasBins;
    none.textContent = tensor?.total
      ? "Every sampled element of this activation is zero, so there is nothing to draw."
      : "No histogram was kept of this site.";
    document.getElementById("site-no-format").hidden = !hasBins || Boolean(activation.bounds);
    if (!hasBins) return;
    readOff(activation).shares.forEach((share, i) => {
      term(facts, `Sampled elements: ${REGIONS[i].name}`, percent(share));
    });
    // Without the role it holds a sentence (charts.js).
    if (plot.hasAttribute("role")) {
      plot.setAttribute("aria-label", `Histogram of the magnitudes of ${activation.tensor}, read by ${current.name}`);
    }
    window.loka.drawWhenSeen(plot, () => figureOf(activation));
  }

  function show(name) {
    const site = known.get(name);
    if (!site || site === current) return;
    if (current) mark(current.name, false);
    current = site;
    mark(name, true);
    choice.value = String(data.sites.indexOf(site));
    document.getElementById("site-reason").textContent =
      `${site.name}: ${site.verdict}, ${site.precision}${site.reason ? `: ${site.reason}` : ""}`;
    tensorChoice.replaceChildren(
      ...site.activations.map((activation, index) => new Option(activation.tensor, String(index))),
    );
    tensorChoice.parentElement.hidden = site.activations.length < 2;
    showActivation();
  }

  choice.addEventListener("change", () => choose(data.sites[Number(choice.value)].name));
  tensorChoice.addEventListener("change", showActivation);
  logarithmic.addEventListener("change", showActivation);
  document.addEventListener("loka:site", (event) => show(event.detail.site));
  panel.hidden = false;
  const first = data.sites.find((site) => site.activations.some((one) => one.bounds)) ?? data.sites[0];
  if (first) show(first.name);
})();
