// The model graph: drawn when it comes into sight, moved by mouse, fingers and keys. It knows of the rest of
// the page only the events `loka:site` (someone chose a site) and `loka:theme` (colours have changed).
//
// This file, graph_drawing.js and graph_moving.js are one function in three parts (graph.html.j2).
const root = document.getElementById("model-graph");
const stage = root.querySelector(".graph-stage");
const canvas = stage.querySelector("canvas");
const tip = root.querySelector(".graph-tip");
const hint = root.querySelector(".graph-hint");
const detail = root.querySelector(".graph-detail");
const query = root.querySelector("input");
const found = root.querySelector("output");
const context = canvas.getContext("2d");

const MOST_SCALE = 3;
const READABLE = 1; // Scale at which what was searched for is shown.
const BOXED_FROM = 12; // Height of a box on the screen, px, from which it is drawn as a box.
const LABELLED_FROM = 6.5; // Size of letters on the screen, px.
const FONT_SIZE = 11;
const MARGIN = 24;
const CELL = 256;
const BUNDLED_FROM = 40; // Lines that meet in one node, from which each is drawn faintly.
const NEAR = 7; // How far beside a mark a finger or a pointer may be, px.
const MOST_NEIGHBOURS = 24; // That are named below the drawing, of either side.
const COLORS = {
  page: "var(--page, #fff)", card: "var(--card, #f6f7f9)", ink: "var(--ink, #16191d)",
  soft: "var(--soft, #545c68)", accent: "var(--accent, #1d5fc4)", safe: "var(--graph-safe)",
  unsafe: "var(--graph-unsafe)", undecided: "var(--graph-undecided)", "not judged": "var(--graph-unjudged)",
  "several sites": "var(--graph-several)",
};
// What asks for attention is drawn last, on top.
const ORDER = ["not judged", "safe", "several sites", "undecided", "unsafe"];
// Borders, as the second carrier beside the mark; a verdict is never told by its colour alone.
const DASHES = { safe: [], unsafe: [], undecided: [7, 3], "not judged": [2, 3], "several sites": [10, 3, 2, 3] };

let nodes = [];
let wires = [];
let sites = [];
let verdicts = [];
let height = 0;
let bounds = { left: 0, top: 0, right: 1, bottom: 1 };
const grid = new Map();
const nodeOfSite = new Map();
const view = { scale: 1, x: 0, y: 0 };
let size = { width: 0, height: 0, ratio: 1 };
let colors = {};
let family = "sans-serif";
let selected = null;
let isFitted = true;
let isStarted = false;
let isQueued = false;

// Reading the data ---------------------------------------------------------------------------------------

function start() {
  if (isStarted) return;
  isStarted = true;
  const data = JSON.parse(document.getElementById("graph-data").textContent);
  height = data.height;
  verdicts = data.verdicts;
  sites = data.sites.map(([name, verdict, precision, reason]) => ({
    name, verdict: verdicts[verdict], precision, reason,
  }));
  nodes = data.nodes.map(([name, kind, op, module, x, y, width, mark, count, members], index) => ({
    index, name, kind, op, module, x, y, width, count,
    verdict: mark < 0 ? "" : verdicts[mark],
    sites: members.map((number) => sites[number]),
    into: [], wire: null, label: null,
  }));
  wires = data.wires.map(([source, trunk, branches]) => readWire(nodes[source], trunk, branches));
  for (const node of nodes) {
    for (const site of node.sites) nodeOfSite.set(site.name, node);
    const key = cellOf(node.x, node.y);
    if (!grid.has(key)) grid.set(key, []);
    grid.get(key).push(node);
  }
  bounds = {
    left: Math.min(...nodes.map((n) => n.x - n.width / 2), ...wires.map((w) => w.left)),
    right: Math.max(...nodes.map((n) => n.x + n.width / 2), ...wires.map((w) => w.right)),
    top: Math.min(...nodes.map((n) => n.y - height / 2), ...wires.map((w) => w.top)),
    bottom: Math.max(...nodes.map((n) => n.y + height / 2), ...wires.map((w) => w.bottom)),
  };
  readColors();
  new ResizeObserver(resize).observe(stage);
  resize();
  draw();
  root.dataset.ready = "true";
}

function readWire(source, trunk, branches) {
  const wire = { source, trunk, branches: [], left: source.x, right: source.x, top: source.y, bottom: source.y };
  const reach = (x, y) => {
    wire.left = Math.min(wire.left, x);
    wire.right = Math.max(wire.right, x);
    wire.top = Math.min(wire.top, y);
    wire.bottom = Math.max(wire.bottom, y);
  };
  for (let i = 0; i < trunk.length; i += 2) reach(trunk[i], trunk[i + 1]);
  for (let i = 0; i < branches.length; i += 2) {
    const branch = { target: nodes[branches[i]], passed: branches[i + 1] };
    reach(branch.target.x, branch.target.y);
    wire.branches.push(branch);
    branch.target.into.push({ wire, passed: branch.passed });
  }
  source.wire = wire;
  return wire;
}

function cellOf(x, y) {
  return `${Math.floor(x / CELL)},${Math.floor(y / CELL)}`;
}

// A custom property may read `light-dark(…)`: only the colour of an element is resolved.
function readColors() {
  const probe = document.createElement("span");
  probe.hidden = true;
  root.append(probe);
  for (const [name, value] of Object.entries(COLORS)) {
    probe.style.color = value;
    colors[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  family = getComputedStyle(root).fontFamily;
  drawLegend();
}

// View ---------------------------------------------------------------------------------------------------

function leastScale() {
  return Math.min(fittingScale() / 2, READABLE / 2);
}

function fittingScale() {
  const wide = (size.width - 2 * MARGIN) / (bounds.right - bounds.left);
  const high = (size.height - 2 * MARGIN) / (bounds.bottom - bounds.top);
  return Math.max(Math.min(wide, high, 1.25), 1e-3);
}

function fit() {
  isFitted = true;
  view.scale = fittingScale();
  view.x = (size.width - view.scale * (bounds.left + bounds.right)) / 2;
  view.y = (size.height - view.scale * (bounds.top + bounds.bottom)) / 2;
  redraw();
}

function zoom(factor, x = size.width / 2, y = size.height / 2) {
  const scale = Math.min(Math.max(view.scale * factor, leastScale()), MOST_SCALE);
  view.x = x - ((x - view.x) * scale) / view.scale;
  view.y = y - ((y - view.y) * scale) / view.scale;
  view.scale = scale;
  isFitted = false;
  redraw();
}

function pan(dx, dy) {
  // Some of the drawing stays in sight.
  const keep = 60;
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  view.x = clamp(view.x + dx, keep - view.scale * bounds.right, size.width - keep - view.scale * bounds.left);
  view.y = clamp(view.y + dy, keep - view.scale * bounds.bottom, size.height - keep - view.scale * bounds.top);
  isFitted = false;
  redraw();
}

function centerOn(node) {
  view.scale = Math.max(view.scale, READABLE);
  view.x = size.width / 2 - view.scale * node.x;
  view.y = size.height / 2 - view.scale * node.y;
  isFitted = false;
  redraw();
}

function resize() {
  const middle = { x: (size.width / 2 - view.x) / view.scale, y: (size.height / 2 - view.y) / view.scale };
  measure(stage.clientWidth, stage.clientHeight);
  if (isFitted) {
    fit();
  } else {
    view.x = size.width / 2 - view.scale * middle.x;
    view.y = size.height / 2 - view.scale * middle.y;
  }
  draw();
}

function measure(width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  size = { width, height, ratio };
  canvas.width = Math.max(Math.round(width * ratio), 1);
  canvas.height = Math.max(Math.round(height * ratio), 1);
}

function redraw() {
  if (isQueued || !isStarted) return;
  isQueued = true;
  requestAnimationFrame(() => {
    isQueued = false;
    draw();
  });
}
