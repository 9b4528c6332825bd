// Follow a run: when the server says that it has changed, load the page again and replace its live part.
"use strict";
(() => {
  const part = document.querySelector("[data-live]");
  if (!part || !window.EventSource) return;
  const LEAST = 2000; // ms between two loads
  let source = null, due = 0, loaded = 0;

  async function load() {
    due = 0;
    loaded = Date.now();
    const answer = await fetch(location.href, { credentials: "same-origin" });
    if (!answer.ok || answer.redirected) return location.reload();
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("live");
    const live = document.getElementById("live");
    if (!fresh || live.contains(document.activeElement) && document.activeElement.matches("input, select, textarea")) return;
    const focused = live.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    live.replaceChildren(...fresh.childNodes);
    if (focused) live.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
  }

  function changed() {
    if (!due) due = setTimeout(() => load().catch(() => {}), Math.max(0, loaded + LEAST - Date.now()) + Math.random() * 500);
  }

  function follow() { // a hidden page needs no connection: browsers open few to one server
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source) {
      source = new EventSource(part.dataset.live);
      source.addEventListener("change", changed);
    }
  }

  document.addEventListener("visibilitychange", () => { follow(); if (!document.hidden) changed(); });
  follow();
})();
