"use strict";
// Light, dark, or what the system says. Stands in the head, so that no page flashes up in the wrong colours.
(() => {
  const NAMES = ["system", "light", "dark"];
  const KEY = "loka-onnx-theme";

  function remembered() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // A page from disk may have no storage.
    }
  }

  function remember(name) {
    try {
      localStorage.setItem(KEY, name);
    } catch {
      // It holds for this view only.
    }
  }

  function show(name) {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  }

  // What only a script can draw or undo may depend on it.
  document.documentElement.classList.add("scripted");

  let current = NAMES.includes(remembered()) ? remembered() : "system";
  show(current);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      button.textContent = `Theme: ${current}`;
    };
    label();
    button.hidden = false;
    button.addEventListener("click", () => {
      current = NAMES[(NAMES.indexOf(current) + 1) % NAMES.length];
      show(current);
      remember(current);
      label();
    });
  });
})();
