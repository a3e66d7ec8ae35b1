"use strict";
// Where the reader is, in the list of sections.
(() => {
  const links = new Map();
  for (const link of document.querySelectorAll(".bar a[href^='#']")) {
    links.set(link.getAttribute("href").slice(1), link);
  }
  const visible = new Set();
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) visible.add(entry.target.id);
        else visible.delete(entry.target.id);
      }
      const now = [...links.keys()].find((id) => visible.has(id));
      for (const [id, link] of links) {
        if (id === now) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
      const list = document.querySelector(".bar ul");
      if (now && list.scrollWidth > list.clientWidth) {
        list.scrollLeft = links.get(now).offsetLeft - list.clientWidth / 3;
      }
    },
    { rootMargin: "-20% 0px -60% 0px" },
  );
  for (const id of links.keys()) {
    const section = document.getElementById(id);
    if (section) seen.observe(section);
  }
})();
