"use strict";
// Sorts and filters tables. A row and the notes below it are one entry and move together.
(() => {
  const DIRECTIONS = ["none", "ascending", "descending"];
  const RING_PX = 4;
  const order = new Intl.Collator("en", { numeric: true }).compare;

  function entriesOf(body) {
    const entries = [];
    for (const row of body.rows) {
      if (row.classList.contains("note")) entries.at(-1).rows.push(row);
      else entries.push({ rows: [row], cells: [...row.cells], text: null });
    }
    return entries;
  }

  function valueOf(cell, isNumeric) {
    const text = cell.textContent.trim();
    if (!isNumeric) return text === "–" ? null : text;
    // Every number has its value beside it. Python writes "inf", JavaScript reads "Infinity".
    const value = Number((cell.dataset.value ?? "nan").replace(/^([-+]?)inf$/, "$1Infinity"));
    return Number.isNaN(value) ? null : value;
  }

  function sort(table, entries, column, direction) {
    const body = table.tBodies[0];
    const isNumeric = table.tHead.rows[0].cells[column].classList.contains("numeric");
    let sorted = entries;
    if (direction !== "none") {
      const sign = direction === "ascending" ? 1 : -1;
      const keyed = entries.map((entry) => ({ entry, key: valueOf(entry.cells[column], isNumeric) }));
      keyed.sort((a, b) => {
        // What has no value stands last, in either direction.
        if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
        // Not by subtraction: infinity less infinity is no number.
        return sign * (isNumeric ? (a.key > b.key) - (a.key < b.key) : order(a.key, b.key));
      });
      sorted = keyed.map(({ entry }) => entry);
    }
    // Emptied at once: to take 2,000 rows out one by one costs a browser half a second.
    body.replaceChildren();
    const rows = document.createDocumentFragment();
    for (const entry of sorted) for (const row of entry.rows) rows.append(row);
    body.append(rows);
  }

  function makeSortable(table, entries) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const now = DIRECTIONS.indexOf(head.getAttribute("aria-sort"));
        const next = DIRECTIONS[(now + 1) % DIRECTIONS.length];
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", next);
        sort(table, entries, column, next);
      });
    });
  }

  function labelled(text, control) {
    const label = document.createElement("label");
    const name = document.createElement("span");
    name.textContent = text;
    label.append(name, control);
    return label;
  }

  function makeFilterable(table, entries, tools) {
    const heads = [...table.tHead.rows[0].cells];
    const count = tools.querySelector("output");
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "name, kind, reason";
    const selects = [];
    heads.forEach((head, column) => {
      if (head.dataset.choice === undefined) return;
      const select = document.createElement("select");
      select.dataset.choice = head.textContent.trim().toLowerCase();
      select.append(new Option("all", ""));
      const values = new Set(entries.map((entry) => entry.cells[column].textContent.trim()));
      for (const value of [...values].sort(order)) select.append(new Option(value, value));
      selects.push({ select, column });
      count.before(labelled(head.textContent.trim(), select));
    });
    tools.prepend(labelled("Find", input));

    function apply() {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const entry of entries) {
        entry.text ??= entry.rows.map((row) => row.textContent).join(" ").toLowerCase();
        const isShown =
          words.every((word) => entry.text.includes(word)) &&
          selects.every(
            ({ select, column }) =>
              !select.value || entry.cells[column].textContent.trim() === select.value,
          );
        shown += isShown;
        for (const row of entry.rows) row.hidden = !isShown;
      }
      count.textContent = `${shown} of ${entries.length} shown`;
    }

    input.addEventListener("input", apply);
    for (const { select } of selects) select.addEventListener("change", apply);
    tools.hidden = false;
    apply();
  }

  // The head and the first column stay while the rest is scrolled: a focus is brought out from under them. Browsers
  // take what is seen in part for seen, and what lies below another element, too.
  function uncover(table, control) {
    const region = table.closest(".wide");
    const [box, frame] = [control.getBoundingClientRect(), region.getBoundingClientRect()];
    const corner = table.tHead.rows[0].cells[0];
    if (!control.closest("thead")) {
      const above = box.top - (frame.top + corner.offsetHeight);
      const below = box.bottom - (frame.top + region.clientHeight);
      region.scrollTop += above < 0 ? above - RING_PX : Math.max(below + RING_PX, 0);
    }
    if (control.closest("th, td").cellIndex > 0) {
      const before = box.left - (frame.left + corner.offsetWidth);
      const after = box.right - (frame.left + region.clientWidth);
      region.scrollLeft += before < 0 ? before - RING_PX : Math.max(after + RING_PX, 0);
    }
  }

  document.querySelector("main").addEventListener("focusin", ({ target }) => {
    const table = target.closest("table.data");
    // Not of a click: what is under the pointer stays there.
    if (!table || !target.matches(":focus-visible")) return;
    // The browser itself scrolls first.
    requestAnimationFrame(() => uncover(table, target));
  });

  for (const table of document.querySelectorAll("main table.data")) {
    const entries = entriesOf(table.tBodies[0]);
    if (entries.length > 1) makeSortable(table, entries);
    const tools = table.closest(".table").querySelector(".tools");
    if (tools) makeFilterable(table, entries, tools);
  }
})();
