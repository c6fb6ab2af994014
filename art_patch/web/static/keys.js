"use strict";
// Keys on lists and runs; `page.js` has those that stand in `data-key`. Without scripts, links do the same.

// A block: all scripts of a page share their names.
{
  const KEYS = [
    ["j, k", "next and previous row"],
    ["Enter", "open it"],
    ["n", "next page"],
    ["/", "search"],
    ["u", "up to the list"],
    ["?", "these keys"],
  ];

  function rows() {
    return [...document.querySelectorAll("#main [data-row]")].filter((row) => row.offsetParent !== null);
  }

  function walk(step) {
    const all = rows();
    if (all.length === 0) return;
    const here = all.indexOf(document.activeElement);
    const next = here === -1 ? (step > 0 ? 0 : all.length - 1) : Math.min(Math.max(here + step, 0), all.length - 1);
    all[next].focus();
    all[next].scrollIntoView({ block: "nearest" });
  }

  function help() {
    let dialog = document.getElementById("keys");
    if (dialog === null) {
      dialog = document.createElement("dialog");
      dialog.id = "keys";
      dialog.setAttribute("aria-label", "Keys");
      const list = document.createElement("dl");
      for (const [key, words] of KEYS) {
        const name = document.createElement("dt");
        const about = document.createElement("dd");
        name.textContent = key;
        about.textContent = words;
        list.append(name, about);
      }
      const form = document.createElement("form");
      const close = document.createElement("button");
      form.method = "dialog";
      close.textContent = "Close";
      form.append(close);
      dialog.append(list, form);
      document.body.append(dialog);
    }
    if (!dialog.open) dialog.showModal();
  }

  function isTyping(target) {
    return target instanceof Element && target.closest("input, textarea, select, dialog, [contenteditable]") !== null;
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || isTyping(event.target)) return;
    const search = document.querySelector("[data-search]");
    const known = {
      j: () => walk(1),
      k: () => walk(-1),
      "/": () => search !== null && (search.focus(), search.select()),
      "?": help,
    };
    if (!(event.key in known)) return;
    event.preventDefault();
    known[event.key]();
  });

  /** Empty fields would only make the address of a search longer. */
  document.addEventListener("submit", (event) => {
    if (event.target.method !== "get") return;
    for (const field of event.target.elements) if (field.name && field.value === "") field.disabled = true;
    setTimeout(() => {
      for (const field of event.target.elements) field.disabled = false;
    });
  });
}
