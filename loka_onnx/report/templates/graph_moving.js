// What a reader can do with the model graph, and what it says. A part of graph.js.

// Words --------------------------------------------------------------------------------------------------

function linesOf(node) {
  const lines = [];
  const place = [node.kind === "operator" ? node.op : node.kind];
  if (node.kind === "folded") place.push(`${node.count} nodes`);
  if (node.module) place.push(`in ${node.module}`);
  lines.push(place.join(" · "));
  if (node.sites.length === 1) {
    const [site] = node.sites;
    if (site.name !== node.name) lines.push(`site ${site.name}`);
    lines.push([site.verdict, site.precision].filter(Boolean).join(" · "));
    if (site.reason) lines.push(site.reason);
  } else if (node.sites.length) {
    const counts = new Map();
    for (const site of node.sites) counts.set(site.verdict, (counts.get(site.verdict) ?? 0) + 1);
    lines.push(`${node.sites.length} sites: ${[...counts].map(([verdict, n]) => `${n} ${verdict}`).join(", ")}`);
  }
  return lines;
}

function write(element, node) {
  const head = document.createElement("strong");
  head.textContent = node.name;
  const lines = linesOf(node).map((line) => {
    const paragraph = document.createElement(element === tip ? "div" : "p");
    paragraph.textContent = line;
    return paragraph;
  });
  element.replaceChildren(head, ...lines);
}

function readBy(node) {
  return [...new Set(node.wire?.branches.map(({ target }) => target))];
}

function readsFrom(node) {
  return [...new Set(node.into.map(({ wire }) => wire.source))];
}

// Buttons, so that a reader without a mouse can go along the data.
function neighbours(words, others) {
  const paragraph = document.createElement("p");
  paragraph.append(`${words} `);
  for (const other of others.slice(0, MOST_NEIGHBOURS)) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = other.name;
    button.addEventListener("click", () => {
      stage.focus({ preventScroll: true });
      go(other);
    });
    paragraph.append(button);
  }
  if (others.length > MOST_NEIGHBOURS) paragraph.append(`and ${others.length - MOST_NEIGHBOURS} more`);
  return paragraph;
}

// Choosing -----------------------------------------------------------------------------------------------

function nodeAt(x, y) {
  const worldX = (x - view.x) / view.scale;
  const worldY = (y - view.y) / view.scale;
  const slack = NEAR / view.scale;
  let best = null;
  let least = Infinity;
  // Boxes are wider than high, and a cell knows the middles of its boxes.
  const reach = { x: 100 + slack, y: height + slack };
  for (let column = Math.floor((worldX - reach.x) / CELL); column <= Math.floor((worldX + reach.x) / CELL); column += 1) {
    for (let row = Math.floor((worldY - reach.y) / CELL); row <= Math.floor((worldY + reach.y) / CELL); row += 1) {
      for (const node of grid.get(`${column},${row}`) ?? []) {
        const dx = Math.max(Math.abs(worldX - node.x) - node.width / 2, 0);
        const dy = Math.max(Math.abs(worldY - node.y) - height / 2, 0);
        // From afar a site is drawn larger than it is.
        const distance = Math.hypot(dx, dy) + (node.verdict ? 0 : slack / 4);
        if (Math.hypot(dx, dy) <= slack && distance < least) [best, least] = [node, distance];
      }
    }
  }
  return best;
}

function select(node) {
  selected = node;
  root.dataset.selected = node ? node.name : "";
  if (node) {
    write(detail, node);
    const [before, after] = [readsFrom(node), readBy(node)];
    if (before.length) detail.append(neighbours("reads from", before));
    if (after.length) detail.append(neighbours("read by", after));
  } else {
    detail.replaceChildren();
  }
  redraw();
}

function choose(node) {
  select(node);
  if (node && node.sites.length === 1) {
    isOwn = true;
    document.dispatchEvent(new CustomEvent("loka:site", { detail: { site: node.sites[0].name } }));
    isOwn = false;
  }
}

function go(node) {
  choose(node);
  centerOn(node);
}

// What an arrow key has brought to the middle.
function nearestMiddle() {
  const x = (size.width / 2 - view.x) / view.scale;
  const y = (size.height / 2 - view.y) / view.scale;
  const far = (node) =>
    Math.hypot(Math.max(Math.abs(x - node.x) - node.width / 2, 0), Math.max(Math.abs(y - node.y) - height / 2, 0));
  return nodes.reduce((best, node) => (far(node) < far(best) ? node : best));
}

function step(others) {
  const [next] = selected ? others(selected) : [nearestMiddle()];
  if (next) go(next);
}

let isOwn = false;
document.addEventListener("loka:site", (event) => {
  if (isOwn) return;
  start();
  const node = nodeOfSite.get(event.detail?.site);
  if (!node) return;
  select(node);
  centerOn(node);
});

function search(isNext) {
  start();
  const text = query.value.trim().toLowerCase();
  if (!text) {
    found.textContent = "";
    return;
  }
  const matches = nodes.filter((node) => textOf(node).includes(text) || isJudged(node, text));
  if (!matches.length) {
    found.textContent = "none";
    return;
  }
  const place = matches.indexOf(selected);
  const next = isNext ? (place + 1) % matches.length : Math.max(place, 0);
  found.textContent = `${next + 1} of ${matches.length}`;
  go(matches[next]);
}

function textOf(node) {
  return [node.name, node.op, node.module, ...node.sites.map((site) => site.name)].join("\n").toLowerCase();
}

// From its first letter on: "safe" is no part of "unsafe" here.
function isJudged(node, text) {
  return node.sites.some((site) => site.verdict.startsWith(text) || site.precision.startsWith(text));
}

query.addEventListener("input", () => search(false));
query.addEventListener("keydown", (event) => {
  if (event.key === "Enter") search(true);
});

// Moving -------------------------------------------------------------------------------------------------

const pointers = new Map();
let travelled = 0;

function at(event) {
  const box = stage.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}

stage.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  if (event.pointerType === "mouse") stage.focus({ preventScroll: true });
  if (!pointers.size) travelled = 0;
  pointers.set(event.pointerId, at(event));
  stage.setPointerCapture(event.pointerId);
  tip.hidden = true;
  hint.hidden = true;
});

stage.addEventListener("pointermove", (event) => {
  const now = at(event);
  const before = pointers.get(event.pointerId);
  if (!before) {
    point(now);
    return;
  }
  const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
  pointers.set(event.pointerId, now);
  travelled += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
  if (travelled < 5) return;
  stage.classList.add("dragged");
  if (!others.length) {
    pan(now.x - before.x, now.y - before.y);
    return;
  }
  const [other] = others;
  const apart = (place) => Math.max(Math.hypot(place.x - other.x, place.y - other.y), 1);
  pan((now.x - before.x) / 2, (now.y - before.y) / 2);
  zoom(apart(now) / apart(before), (now.x + other.x) / 2, (now.y + other.y) / 2);
});

function release(event) {
  const wasDown = pointers.delete(event.pointerId);
  stage.classList.remove("dragged");
  if (event.type !== "pointerup" || !wasDown || pointers.size || travelled >= 5) return;
  stage.focus({ preventScroll: true });
  const place = at(event);
  choose(nodeAt(place.x, place.y));
}
stage.addEventListener("pointerup", release);
stage.addEventListener("pointercancel", release);
stage.addEventListener("pointerleave", () => {
  tip.hidden = true;
});

let pointed = null;
let isPointing = false;
function point(place) {
  pointed = place;
  if (isPointing) return;
  isPointing = true;
  requestAnimationFrame(() => {
    isPointing = false;
    const node = isStarted ? nodeAt(pointed.x, pointed.y) : null;
    stage.classList.toggle("pointed", Boolean(node));
    tip.hidden = !node;
    if (!node) return;
    write(tip, node);
    const left = Math.min(pointed.x + 14, size.width - tip.offsetWidth - 4);
    const below = pointed.y + 16;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${below + tip.offsetHeight > size.height ? Math.max(pointed.y - tip.offsetHeight - 10, 4) : below}px`;
  });
}

// A wheel over the drawing scrolls the page, unless the reader has turned to the drawing.
const HOW = "Arrows move, + and − zoom, 0 shows all, Enter chooses what is in the middle, N and P go along the data";
let hintTimer = 0;
stage.addEventListener("focus", () => {
  if (!stage.matches(":focus-visible")) return;
  clearTimeout(hintTimer);
  hint.textContent = HOW;
  hint.hidden = false;
});
stage.addEventListener("blur", () => {
  hint.hidden = true;
});
stage.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey && document.activeElement !== stage) {
    hint.textContent = "Click the drawing to zoom with the wheel, or hold Ctrl";
    hint.hidden = false;
    clearTimeout(hintTimer);
    hintTimer = setTimeout(() => {
      hint.hidden = true;
    }, 1500);
    return;
  }
  event.preventDefault();
  hint.hidden = true;
  tip.hidden = true;
  const place = at(event);
  const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? size.height : 1);
  zoom(Math.exp(-Math.max(Math.min(pixels, 240), -240) / (event.ctrlKey ? 150 : 500)), place.x, place.y);
}, { passive: false });

const STEP = 60;
const ACTIONS = { in: () => zoom(1.4), out: () => zoom(1 / 1.4), fit, next: () => search(true) };
const KEYS = {
  "+": ACTIONS.in, "=": ACTIONS.in, "-": ACTIONS.out, 0: fit, Escape: () => stage.blur(),
  ArrowLeft: () => pan(STEP, 0), ArrowRight: () => pan(-STEP, 0),
  ArrowUp: () => pan(0, STEP), ArrowDown: () => pan(0, -STEP),
  Enter: () => choose(nearestMiddle()), n: () => step(readBy), p: () => step(readsFrom),
};
stage.addEventListener("keydown", (event) => {
  const action = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  start();
  action();
});
for (const button of root.querySelectorAll("[data-act]")) {
  button.addEventListener("click", () => {
    start();
    ACTIONS[button.dataset.act]();
  });
}

// When ---------------------------------------------------------------------------------------------------

function recolor() {
  if (!isStarted) return;
  readColors();
  draw();
}
document.addEventListener("loka:theme", recolor);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);

// Paper is light, and shows the whole graph. The page is laid out for it only after the event: what an A4 sheet
// across leaves between its margins, 16 cm high (graph.css), is drawn for.
const PAPER_PX = { width: 1032, height: 604 };
const onScreen = {};
addEventListener("beforeprint", () => {
  start();
  Object.assign(onScreen, view, { isFitted });
  root.style.colorScheme = "light";
  readColors();
  measure(PAPER_PX.width, PAPER_PX.height);
  fit();
  draw();
});
addEventListener("afterprint", () => {
  root.style.colorScheme = "";
  measure(stage.clientWidth, stage.clientHeight);
  ({ isFitted } = onScreen);
  Object.assign(view, { scale: onScreen.scale, x: onScreen.x, y: onScreen.y });
  recolor();
});

new IntersectionObserver((entries, observer) => {
  if (!entries.some((entry) => entry.isIntersecting)) return;
  observer.disconnect();
  start();
}, { rootMargin: "300px" }).observe(stage);
