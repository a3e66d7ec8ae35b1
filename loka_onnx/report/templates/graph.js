"use strict";
// Moves, searches and explains the model graph. It knows of the rest of the page only the event `loka:site`:
// someone chose a site.
(() => {
  const MOST_SCALE = 3;
  const MOST_FITTED = 1.25; // A small graph is shown no larger.
  const FAR = 0.5; // Scale below which no label can be read.
  const STEP = 60; // Of an arrow key, px.
  const MOST_NEIGHBOURS = 24; // That are named below the drawing, of either side.
  const root = document.getElementById("model-graph");
  const stage = root.querySelector(".graph-stage");
  const svg = stage.querySelector("svg");
  const hint = root.querySelector(".graph-hint");
  const detail = root.querySelector(".graph-detail");
  const query = root.querySelector("input");
  const found = root.querySelector("output");
  const whole = svg.getAttribute("viewBox");
  const lines = [...svg.querySelectorAll(".wires path")];
  const nodes = JSON.parse(document.getElementById("graph-data").textContent);
  for (const element of svg.querySelectorAll(".node")) {
    const [x, y] = element.getAttribute("transform").match(/-?\d+/g).map(Number);
    Object.assign(nodes[element.dataset.node], { element, x, y });
  }
  let selected = null;

  // View -------------------------------------------------------------------------------------------------

  // The visible part of the drawing, in its own pixels, and how large they are on the screen.
  function view() {
    const [x, y, width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const scale = Math.min(stage.clientWidth / width, stage.clientHeight / height);
    return { x: x + width / 2, y: y + height / 2, scale };
  }

  function look(x, y, scale) {
    const [left, top, wide, high] = whole.split(" ").map(Number);
    const [width, height] = [stage.clientWidth / scale, stage.clientHeight / scale];
    // Some of the drawing stays in the middle.
    const middleX = Math.min(Math.max(x, left), left + wide);
    const middleY = Math.min(Math.max(y, top), top + high);
    svg.setAttribute("viewBox", [middleX - width / 2, middleY - height / 2, width, height].join(" "));
    label();
  }

  function label() {
    svg.classList.toggle("far", view().scale < FAR);
  }

  function fit() {
    svg.setAttribute("viewBox", whole);
    const { x, y, scale } = view();
    look(x, y, Math.min(scale, MOST_FITTED));
  }

  function zoom(factor, dx = 0, dy = 0) {
    const { x, y, scale } = view();
    const next = Math.min(Math.max(scale * factor, 0.02), MOST_SCALE);
    look(x + dx / scale - dx / next, y + dy / scale - dy / next, next);
  }

  function pan(dx, dy) {
    const { x, y, scale } = view();
    look(x - dx / scale, y - dy / scale, scale);
  }

  // Choosing ---------------------------------------------------------------------------------------------

  function others(node, here, there) {
    const index = String(nodes.indexOf(node));
    return lines.filter((line) => line.dataset[here] === index).map((line) => nodes[line.dataset[there]]);
  }

  const readsFrom = (node) => others(node, "to", "from");
  const readBy = (node) => others(node, "from", "to");

  function paragraph(...content) {
    const element = document.createElement("p");
    element.append(...content);
    return element;
  }

  // Buttons, so that a reader without a mouse can go along the data.
  function neighbours(words, list) {
    const buttons = list.slice(0, MOST_NEIGHBOURS).map((node) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = node.name;
      button.addEventListener("click", () => {
        stage.focus({ preventScroll: true });
        go(node);
      });
      return button;
    });
    const more = list.length > MOST_NEIGHBOURS ? `and ${list.length - MOST_NEIGHBOURS} more` : "";
    return list.length ? [paragraph(`${words} `, ...buttons, more)] : [];
  }

  function select(node) {
    selected?.element.classList.remove("chosen");
    selected = node;
    root.dataset.selected = node ? node.name : "";
    const index = String(nodes.indexOf(node));
    for (const line of lines) line.classList.toggle("near", [line.dataset.from, line.dataset.to].includes(index));
    detail.replaceChildren();
    if (!node) return;
    node.element.classList.add("chosen");
    const head = document.createElement("strong");
    head.textContent = node.name;
    detail.append(head, ...node.lines.map((line) => paragraph(line)));
    detail.append(...neighbours("reads from", readsFrom(node)), ...neighbours("read by", readBy(node)));
  }

  function choose(node) {
    select(node);
    if (node?.sites.length !== 1) return;
    document.dispatchEvent(new CustomEvent("loka:site", { detail: { site: node.sites[0], from: root } }));
  }

  function show(node) {
    look(node.x, node.y, Math.max(view().scale, 1));
  }

  function go(node) {
    choose(node);
    show(node);
  }

  function nearestMiddle() {
    const { x, y } = view();
    const far = (node) => Math.hypot(node.x - x, node.y - y);
    return nodes.reduce((best, node) => (far(node) < far(best) ? node : best));
  }

  function step(along) {
    const [next] = selected ? along(selected) : [nearestMiddle()];
    if (next) go(next);
  }

  document.addEventListener("loka:site", ({ detail: { site, from } }) => {
    const node = from === root ? null : nodes.find(({ sites }) => sites.includes(site));
    if (!node) return;
    select(node);
    show(node);
  });

  function search(isNext) {
    const text = query.value.trim().toLowerCase();
    // A verdict from its first letter on: "safe" is no part of "unsafe" here.
    const matches = nodes.filter((node) => node.text.includes(text) || node.words.some((word) => word.startsWith(text)));
    found.textContent = text && !matches.length ? "none" : "";
    if (!text || !matches.length) return;
    const place = matches.indexOf(selected);
    const next = isNext ? (place + 1) % matches.length : Math.max(place, 0);
    found.textContent = `${next + 1} of ${matches.length}`;
    go(matches[next]);
  }

  query.addEventListener("input", () => search(false));
  query.addEventListener("keydown", ({ key }) => {
    if (key === "Enter") search(true);
  });

  // Moving -----------------------------------------------------------------------------------------------

  let drag = null;
  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { id: event.pointerId, x: event.clientX, y: event.clientY, node: event.target.closest(".node"), far: 0 };
    stage.setPointerCapture(event.pointerId);
    hint.hidden = true;
  });
  stage.addEventListener("pointermove", (event) => {
    if (drag?.id !== event.pointerId) return;
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    drag.far += Math.abs(dx) + Math.abs(dy);
    Object.assign(drag, { x: event.clientX, y: event.clientY });
    stage.classList.add("dragged");
    pan(dx, dy);
  });
  function release(event) {
    if (drag?.id !== event.pointerId) return;
    const { node, far } = drag;
    drag = null;
    stage.classList.remove("dragged");
    if (event.type !== "pointerup" || far >= 5) return;
    stage.focus({ preventScroll: true });
    choose(node ? nodes[node.dataset.node] : null);
  }
  stage.addEventListener("pointerup", release);
  stage.addEventListener("pointercancel", release);

  function say(words) {
    hint.textContent = words;
    hint.hidden = false;
  }

  stage.addEventListener("focus", () => {
    if (!stage.matches(":focus-visible")) return;
    say("Arrows move, + and − zoom, 0 shows all, Enter chooses what is in the middle, N and P go along the data");
  });
  for (const event of ["blur", "pointerleave"]) {
    stage.addEventListener(event, () => {
      hint.hidden = true;
    });
  }
  // A wheel over the drawing scrolls the page, unless the reader has turned to the drawing.
  stage.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== stage) {
      say("Click the drawing to zoom with the wheel, or hold Ctrl");
      return;
    }
    event.preventDefault();
    hint.hidden = true;
    const box = stage.getBoundingClientRect();
    const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : 1);
    const factor = Math.exp(-Math.max(Math.min(pixels, 240), -240) / (event.ctrlKey ? 150 : 500));
    zoom(factor, event.clientX - box.x - box.width / 2, event.clientY - box.y - box.height / 2);
  }, { passive: false });

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
    action();
  });
  for (const button of root.querySelectorAll("[data-act]")) {
    button.addEventListener("click", ACTIONS[button.dataset.act]);
  }
  root.querySelector(".graph-tools").hidden = false;
  new ResizeObserver(label).observe(stage);
  fit();
  root.dataset.ready = "true";

  // Paper shows the whole graph.
  let onScreen = whole;
  addEventListener("beforeprint", () => {
    onScreen = svg.getAttribute("viewBox");
    fit();
  });
  addEventListener("afterprint", () => svg.setAttribute("viewBox", onScreen));
})();
