"use strict";
// Sorts and filters tables. A row and the notes below it are one entry and move together. Of a long table only
// the first entries are laid out (`tr.later`); more come when a reader nears the last of them, or asks for all.
(() => {
  const UNITS = {
    ns: 1e-3, "µs": 1, ms: 1e3, s: 1e6, min: 6e7,
    B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3,
  };
  const NUMBER = /[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?/;
  const DIRECTIONS = ["none", "ascending", "descending"];
  const MORE = 200;
  const NEAR_PX = 800;
  const RING_PX = 4;
  const order = new Intl.Collator("en", { numeric: true }).compare;

  function entriesOf(body) {
    const entries = [];
    for (const row of body.rows) {
      if (row.classList.contains("note")) entries.at(-1).rows.push(row);
      else entries.push({ rows: [row], cells: [...row.cells], text: null, isShown: true });
    }
    return entries;
  }

  function valueOf(cell, isNumeric) {
    const text = cell.textContent.trim();
    if (!isNumeric) return text === "–" ? null : text;
    if (cell.dataset.value !== undefined) {
      // Python writes "inf", JavaScript reads "Infinity".
      const value = Number(cell.dataset.value.replace(/^([-+]?)inf$/, "$1Infinity"));
      return Number.isNaN(value) ? null : value;
    }
    const found = NUMBER.exec(text);
    if (!found) return null;
    const unit = text.slice(found.index + found[0].length).trim().split(/[\s,;]/)[0];
    return Number(found[0].replaceAll(",", "")) * (UNITS[unit] ?? 1);
  }

  // Entries that the filter leaves, in the order of the table, up to a number of them.
  function show(table, most) {
    table.lokaMost = most;
    let shown = 0;
    for (const entry of table.lokaOrder) {
      shown += entry.isShown;
      for (const row of entry.rows) {
        row.hidden = !entry.isShown;
        row.classList.toggle("later", shown > most);
      }
    }
    tell(table, shown);
  }

  // How many entries there are, beside those that are laid out: in words, and to a screen reader.
  function tell(table, shown) {
    const { lokaMost: most, lokaCount: count, lokaMore: more } = table;
    const isAll = shown <= most;
    const total = table.lokaEntries.length;
    if (count) {
      count.textContent = isAll ? `${shown} of ${total} shown` : `${shown} of ${total} match, first ${most} shown`;
    }
    if (!more) return;
    more.parentElement.hidden = isAll;
    more.textContent = `Show all ${shown} rows`;
    if (isAll) {
      table.removeAttribute("aria-rowcount");
    } else {
      const found = table.lokaEntries.filter((entry) => entry.isShown);
      const rows = found.reduce((sum, entry) => sum + entry.rows.length, table.tHead.rows.length);
      table.setAttribute("aria-rowcount", String(rows));
    }
  }

  function makeLong(table) {
    const region = table.closest(".wide");
    table.lokaFirst = table.lokaEntries.filter((entry) => !entry.rows[0].classList.contains("later")).length;
    table.lokaMost = table.lokaFirst;
    if (table.lokaFirst === table.lokaEntries.length) return;
    const more = document.createElement("button");
    more.type = "button";
    more.addEventListener("click", () => showAll(table));
    const place = document.createElement("p");
    place.className = "more";
    place.append(more);
    region.before(place);
    table.lokaMore = more;
    tell(table, table.lokaEntries.length);
    region.addEventListener("scroll", () => {
      const isNear = region.scrollTop + region.clientHeight > region.scrollHeight - NEAR_PX;
      if (isNear && table.lokaMost < table.lokaEntries.length) show(table, table.lokaMost + MORE);
    });
  }

  // The button goes away: the reader goes on at the first row that it brought.
  function showAll(table) {
    const next = table.lokaOrder.find((entry) => entry.isShown && entry.rows[0].classList.contains("later"));
    show(table, table.lokaEntries.length);
    (next?.rows[0].querySelector("button") ?? table.closest(".wide")).focus();
  }

  // For whoever leads to a row.
  document.addEventListener("loka:row", (event) => {
    const table = event.target.closest("table.data");
    if (event.target.classList.contains("later")) show(table, table.lokaEntries.length);
  });

  // The browser's own search finds only what is laid out.
  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "f") return;
    for (const table of document.querySelectorAll("main table.data")) show(table, table.lokaEntries.length);
  });

  function sort(table, column, direction) {
    const body = table.tBodies[0];
    const isNumeric = table.tHead.rows[0].cells[column].classList.contains("numeric");
    const entries = table.lokaEntries;
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
    table.lokaOrder = sorted;
    show(table, table.lokaFirst);
    // Emptied at once: to take 2,000 rows out one by one costs a browser half a second.
    body.replaceChildren();
    const rows = document.createDocumentFragment();
    for (const entry of sorted) for (const row of entry.rows) rows.append(row);
    body.append(rows);
  }

  function makeSortable(table) {
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
        sort(table, column, next);
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

  function makeFilterable(table, tools) {
    const heads = [...table.tHead.rows[0].cells];
    const entries = table.lokaEntries;
    const count = tools.querySelector("output");
    table.lokaCount = count;
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
      for (const entry of entries) {
        entry.text ??= entry.rows.map((row) => row.textContent).join(" ").toLowerCase();
        entry.isShown =
          words.every((word) => entry.text.includes(word)) &&
          selects.every(
            ({ select, column }) =>
              !select.value || entry.cells[column].textContent.trim() === select.value,
          );
      }
      show(table, table.lokaFirst);
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
    table.lokaEntries = entriesOf(table.tBodies[0]);
    table.lokaOrder = table.lokaEntries;
    makeLong(table);
    if (table.lokaEntries.length > 1) makeSortable(table);
    const tools = table.closest(".table").querySelector(".tools");
    if (tools) makeFilterable(table, tools);
  }
})();
