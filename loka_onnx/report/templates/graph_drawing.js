// How the model graph looks: boxes with labels close by, marks from afar. A part of graph.js.

// Drawing ------------------------------------------------------------------------------------------------

function draw() {
  const { scale } = view;
  context.setTransform(size.ratio, 0, 0, size.ratio, 0, 0);
  context.fillStyle = colors.page;
  context.fillRect(0, 0, size.width, size.height);
  const sight = {
    left: -view.x / scale, right: (size.width - view.x) / scale,
    top: -view.y / scale, bottom: (size.height - view.y) / scale,
  };
  const isBoxed = height * scale >= BOXED_FROM;
  drawWires(sight, isBoxed);
  if (selected) drawNeighbours(isBoxed);
  const visible = nodes.filter(
    (n) => n.x + n.width / 2 >= sight.left && n.x - n.width / 2 <= sight.right
      && n.y + height / 2 >= sight.top && n.y - height / 2 <= sight.bottom,
  );
  if (isBoxed) drawBoxes(visible);
  else drawMarks(visible);
  if (selected) outline(selected, colors.accent, 3);
  root.dataset.scale = scale.toFixed(4);
  root.dataset.middle = [sight.left + sight.right, sight.top + sight.bottom]
    .map((v) => (v / 2).toFixed(1)).join(",");
}

function across(x) {
  return x * view.scale + view.x;
}

function down(y) {
  return y * view.scale + view.y;
}

function drawWires(sight, isBoxed) {
  const path = new Path2D();
  const bundled = new Path2D();
  for (const wire of wires) {
    if (wire.right < sight.left || wire.left > sight.right) continue;
    if (wire.bottom < sight.top || wire.top > sight.bottom) continue;
    traceTrunk(path, wire, wire.trunk.length);
    for (const { target, passed } of wire.branches) {
      const isOneOfMany = Math.max(wire.branches.length, target.into.length) > BUNDLED_FROM;
      traceBranch(isOneOfMany ? bundled : path, wire, target, passed, isBoxed && !isOneOfMany);
    }
  }
  context.strokeStyle = colors.soft;
  context.lineWidth = isBoxed ? Math.max(view.scale, 0.7) : 0.6;
  context.globalAlpha = isBoxed ? 0.6 : 0.35;
  context.stroke(path);
  context.globalAlpha = 0.12;
  context.stroke(bundled);
  context.globalAlpha = 1;
}

function traceTrunk(path, wire, length) {
  path.moveTo(across(wire.source.x), down(wire.source.y + height / 2));
  for (let i = 0; i < length; i += 2) path.lineTo(across(wire.trunk[i]), down(wire.trunk[i + 1]));
}

function traceBranch(path, wire, target, passed, isBoxed) {
  const x = across(passed ? wire.trunk[2 * passed - 2] : wire.source.x);
  const y = down(passed ? wire.trunk[2 * passed - 1] : wire.source.y + height / 2);
  const endX = across(target.x);
  const endY = down(target.y - height / 2);
  path.moveTo(x, y);
  if (!isBoxed) {
    path.lineTo(endX, endY);
    return;
  }
  const bend = Math.max((endY - y) / 2, 0);
  path.bezierCurveTo(x, y + bend, endX, endY - bend, endX, endY);
  const tipSize = 4 * view.scale;
  path.moveTo(endX - tipSize, endY - 1.5 * tipSize);
  path.lineTo(endX, endY);
  path.lineTo(endX + tipSize, endY - 1.5 * tipSize);
}

function drawNeighbours(isBoxed) {
  const path = new Path2D();
  for (const { wire, passed } of selected.into) {
    traceTrunk(path, wire, 2 * passed);
    traceBranch(path, wire, selected, passed, isBoxed);
  }
  if (selected.wire) {
    traceTrunk(path, selected.wire, selected.wire.trunk.length);
    for (const { target, passed } of selected.wire.branches) {
      traceBranch(path, selected.wire, target, passed, isBoxed);
    }
  }
  context.strokeStyle = colors.accent;
  context.lineWidth = 2;
  context.stroke(path);
}

// From afar: a mark for each site, a dot for everything else.
function drawMarks(visible) {
  const { scale } = view;
  context.fillStyle = colors.soft;
  context.globalAlpha = 0.55;
  context.beginPath();
  const least = Math.max(height * scale * 0.7, 1.5);
  for (const node of visible) {
    if (node.verdict) continue;
    const width = Math.max(node.width * scale * 0.8, least);
    context.rect(across(node.x) - width / 2, down(node.y) - least / 2, width, least);
  }
  context.fill();
  context.globalAlpha = 1;
  const radius = Math.max(0.5 * height * scale, 2.5);
  for (const verdict of ORDER) {
    const path = new Path2D();
    for (const node of visible) {
      if (node.verdict === verdict) traceMark(path, verdict, across(node.x), down(node.y), radius);
    }
    paintMark(context, path, verdict, radius);
  }
}

function drawBoxes(visible) {
  const { scale } = view;
  const bare = new Path2D();
  for (const node of visible) if (!node.verdict) traceBox(bare, node);
  context.fillStyle = colors.card;
  context.fill(bare);
  context.strokeStyle = colors.soft;
  context.lineWidth = Math.max(scale, 0.7);
  context.stroke(bare);
  const radius = 0.2 * height * scale;
  for (const verdict of ORDER) {
    const boxes = new Path2D();
    const marks = new Path2D();
    for (const node of visible) {
      if (node.verdict !== verdict) continue;
      traceBox(boxes, node);
      const x = across(node.x - node.width / 2 + height * 0.42);
      traceMark(marks, verdict, x, down(node.y), radius);
    }
    context.fillStyle = colors.page;
    context.fill(boxes);
    context.globalAlpha = 0.16;
    context.fillStyle = colors[verdict];
    context.fill(boxes);
    context.globalAlpha = 1;
    context.strokeStyle = colors[verdict];
    context.lineWidth = (verdict === "unsafe" ? 2.6 : 1.6) * Math.max(scale, 0.5);
    context.setLineDash(DASHES[verdict].map((length) => length * scale));
    context.stroke(boxes);
    context.setLineDash([]);
    paintMark(context, marks, verdict, radius);
  }
  if (FONT_SIZE * scale >= LABELLED_FROM) for (const node of visible) drawLabel(node);
}

function traceBox(path, node) {
  const { scale } = view;
  const isEnd = node.kind === "input" || node.kind === "output";
  path.roundRect(
    across(node.x - node.width / 2), down(node.y - height / 2), node.width * scale, height * scale,
    (isEnd ? height / 2 : 4) * scale,
  );
}

// The shapes of the accuracy charts: circle, cross and diamond.
function traceMark(path, verdict, x, y, radius) {
  if (verdict === "safe") {
    path.moveTo(x + radius, y);
    path.arc(x, y, radius, 0, 2 * Math.PI);
  } else if (verdict === "unsafe") {
    path.moveTo(x - radius, y - radius);
    path.lineTo(x + radius, y + radius);
    path.moveTo(x + radius, y - radius);
    path.lineTo(x - radius, y + radius);
  } else if (verdict === "undecided") {
    const reach = 1.25 * radius;
    path.moveTo(x, y - reach);
    path.lineTo(x + reach, y);
    path.lineTo(x, y + reach);
    path.lineTo(x - reach, y);
    path.closePath();
  } else if (verdict === "several sites") {
    path.moveTo(x, y - radius);
    path.lineTo(x + radius, y + radius);
    path.lineTo(x - radius, y + radius);
    path.closePath();
  } else {
    path.rect(x - 0.8 * radius, y - 0.8 * radius, 1.6 * radius, 1.6 * radius);
  }
}

function paintMark(target, path, verdict, radius) {
  target.strokeStyle = target.fillStyle = colors[verdict];
  if (verdict === "unsafe" || verdict === "not judged") {
    target.lineWidth = Math.max(radius * (verdict === "unsafe" ? 0.6 : 0.3), 1);
    target.stroke(path);
  } else {
    target.fill(path);
  }
}

function drawLabel(node) {
  const { scale } = view;
  const isSite = Boolean(node.verdict);
  node.label ??= labelOf(node, (isSite ? node.width - height * 0.8 : node.width) - 10);
  const x = across(isSite ? node.x - node.width / 2 + height * 0.8 : node.x);
  context.textAlign = isSite ? "left" : "center";
  context.textBaseline = "middle";
  const [upper, lower] = node.label;
  context.fillStyle = colors.ink;
  context.font = `${FONT_SIZE * scale}px ${family}`;
  context.fillText(upper, x, down(node.y) - (lower ? 0.19 * height * scale : 0));
  if (lower) {
    context.fillStyle = colors.soft;
    context.font = `${0.86 * FONT_SIZE * scale}px ${family}`;
    context.fillText(lower, x, down(node.y) + 0.24 * height * scale);
  }
}

function labelOf(node, room) {
  const lower = node.kind === "operator" ? (node.verdict ? describeShortly(node) : "")
    : node.kind === "folded" ? `${node.count} nodes` : node.kind;
  const upper = node.kind === "operator" && !node.verdict ? node.op : node.name;
  return [shortened(upper, room, FONT_SIZE), lower && shortened(lower, room, 0.86 * FONT_SIZE)];
}

function describeShortly(node) {
  return [node.op, node.sites[0].precision].filter(Boolean).join(" · ");
}

// The end of a name tells more than its beginning.
function shortened(text, room, fontSize) {
  context.font = `${fontSize}px ${family}`;
  if (context.measureText(text).width <= room) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`…${text.slice(-middle)}`).width <= room) low = middle;
    else high = middle - 1;
  }
  return `…${low ? text.slice(-low) : ""}`;
}

function outline(node, color, width) {
  const wide = Math.max(node.width * view.scale, 10) + 8;
  const high = Math.max(height * view.scale, 10) + 8;
  context.strokeStyle = color;
  context.lineWidth = width;
  context.strokeRect(across(node.x) - wide / 2, down(node.y) - high / 2, wide, high);
}

function drawLegend() {
  for (const swatch of root.querySelectorAll(".graph-legend canvas")) {
    const target = swatch.getContext("2d");
    target.clearRect(0, 0, 20, 20);
    const verdict = swatch.dataset.mark;
    const path = new Path2D();
    if (verdict) {
      traceMark(path, verdict, 10, 10, 6);
      paintMark(target, path, verdict, 6);
    } else {
      target.fillStyle = colors.soft;
      target.fillRect(2, 7, 16, 6);
    }
  }
}
