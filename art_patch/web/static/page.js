"use strict";
// What pages need beside htmx: charts, the state of the live stream, the one-time link, and keys.

const KINDS = ["calls", "scores", "groups", "moves", "cycle", "apps", "sums"]; // of events, as `live.py` has them

const COLOURS = ["#2563eb", "#d97706", "#16a34a", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626"];

function colour(name, index) {
  return name === "upstream" ? "#6b7280" : COLOURS[index % COLOURS.length];
}

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Draw moments, such as promotions, as vertical lines. */
function lines(marks) {
  return {
    hooks: {
      draw: (plot) => {
        const { ctx, bbox } = plot;
        ctx.save();
        ctx.strokeStyle = ink("--soft");
        ctx.setLineDash([4, 4]);
        for (const mark of marks) {
          const x = Math.round(plot.valToPos(mark, "x", true));
          if (x < bbox.left || x > bbox.left + bbox.width) continue;
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        }
        ctx.restore();
      },
    },
  };
}

/** A moment as a date whose local parts are those of the server's clock, so that charts and tables tell the same time. */
function there(at) {
  const shifted = new Date((at + Number(document.body.dataset.offset || 0)) * 1000);
  return new Date(shifted.getTime() + shifted.getTimezoneOffset() * 60000);
}

/** A moment as the pages write it; without the hour where a chart spans many days, without the day where it spans few. */
function moment(at, span) {
  const two = (number) => String(number).padStart(2, "0");
  const when = there(at);
  const day = `${two(when.getMonth() + 1)}-${two(when.getDate())}`;
  const hour = `${two(when.getHours())}:${two(when.getMinutes())}`;
  if (span === 0) return `${when.getFullYear()}-${day} ${hour}`;
  if (span > 5 * 86400) return day;
  return span > 86400 ? `${day} ${hour}` : hour;
}

/** `data-chart` of a figure: {x: moments (or, with numbers: true, numbers), series: {name: values}, marks: moments}. */
function draw(figure) {
  const place = figure.querySelector(".plot");
  const { x, series, marks, numbers } = JSON.parse(figure.dataset.chart);
  const names = Object.keys(series);
  const axis = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line") } };
  // Times as everywhere on the pages; the chart's own are American.
  const span = x.length ? x[x.length - 1] - x[0] : 0;
  const times = (_, values) => values.map((at) => moment(at, span));
  const whole = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]; // no step is half a step
  const wide = (_, labels) => 26 + 7 * Math.max(3, ...(labels || []).map((label) => String(label ?? "").length));
  const fromZero = { pad: 0.1, soft: 0, mode: 1 }; // else a small change looks large
  const bottom = numbers ? { ...axis, incrs: whole } : { ...axis, values: times, space: 90 };
  place.replaceChildren();
  new uPlot(
    {
      width: place.clientWidth,
      height: 190,
      cursor: { y: false },
      legend: { live: true },
      plugins: [lines(marks || [])],
      tzDate: there,
      scales: { x: { time: !numbers }, y: numbers ? {} : { range: { min: fromZero, max: fromZero } } },
      axes: [bottom, { ...axis, size: wide }],
      series: [
        numbers ? { label: "Step" } : { label: "When", value: (_, at) => (at === null || at === undefined ? "-" : moment(at, 0)) },
        ...names.map((name, index) => ({
          label: name,
          stroke: colour(name, index),
          width: 2,
          spanGaps: true,
          points: { show: true, size: 5 },
          value: (_, value) => (value === null || value === undefined ? "-" : String(Math.round(value * 1000) / 1000)),
        })),
      ],
    },
    [x, ...names.map((name) => series[name])],
    place,
  );
}

// A part may become wide after it was drawn: a scroll bar appears, or a fold is opened.
const widths = new ResizeObserver(() => reachWide());

/** What is wide scrolls in itself: let the keyboard reach it there. */
function reachWide() {
  for (const part of document.querySelectorAll("main section, .scroll")) {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
    for (const each of [part, ...part.children]) widths.observe(each);
  }
}

function drawAll(root) {
  for (const figure of root.querySelectorAll("[data-chart]")) draw(figure);
  reachWide();
}

function enterByLink() {
  const form = document.getElementById("enter");
  if (form === null || location.hash.length < 10) return;
  form.elements.token.value = location.hash.slice(1);
  history.replaceState(null, "", location.pathname); // so that no bookmark and no history holds it
  form.submit();
}

function live(words) {
  const place = document.getElementById("live");
  if (place !== null) place.textContent = words;
}

/** Press what has the key of an event in `data-key`, unless somebody types a text. */
function pressKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, [contenteditable]")) return;
  for (const place of document.querySelectorAll("[data-key]")) {
    if (place.dataset.key !== event.key) continue;
    event.preventDefault();
    place.click();
    return;
  }
}

/** Keep what is typed into fields with `data-remember` in this browser, and fill them with it. */
function remember(root) {
  for (const field of root.querySelectorAll("[data-remember]")) {
    const name = `art_patch.${field.dataset.remember}`;
    if (field.value === "") field.value = localStorage.getItem(name) || "";
    field.addEventListener("change", () => localStorage.setItem(name, field.value));
  }
}

const late = new Set(); // kinds of events that came while a part was asked for or exchanged
let settlesAt = 0;

/** Tell the parts of the page that name an event in `hx-trigger`, such as `sse:calls`, that it came. */
function tell(kind) {
  for (const part of document.querySelectorAll(`[hx-trigger*="sse:${kind}"]`)) {
    // The answer on its way may be older than the event, and htmx forgets what is asked of a part that it exchanges.
    if (part.classList.contains("htmx-request") || performance.now() < settlesAt) late.add(kind);
    else htmx.trigger(part, `sse:${kind}`);
  }
}

function tellLate() {
  const kinds = [...late];
  late.clear();
  kinds.forEach(tell);
}

/** Follow the server's events while somebody looks: a browser has six connections to a server, for all of its tabs. */
function follow() {
  const address = document.body.dataset.live;
  if (address === undefined) return;
  let source = null;
  const open = () => {
    source = new EventSource(address);
    source.addEventListener("open", () => live("Live"));
    source.addEventListener("error", () =>
      live(source.readyState === EventSource.CLOSED ? "Not live; load the page again" : "Not live; trying again"),
    );
    for (const kind of KINDS) source.addEventListener(kind, () => tell(kind));
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      source?.close();
    } else {
      open();
      KINDS.forEach(tell); // whatever came meanwhile
    }
  });
  if (!document.hidden) open();
}

document.addEventListener("DOMContentLoaded", () => {
  enterByLink();
  follow();
  drawAll(document);
  remember(document);
  for (const field of document.querySelectorAll("[data-here]")) field.value = location.origin + field.value;
});
document.addEventListener("htmx:afterSettle", (event) => drawAll(event.detail.elt.parentNode || document));
document.addEventListener("htmx:afterSwap", () => (settlesAt = performance.now() + 50)); // htmx takes 20 ms
document.addEventListener("htmx:afterRequest", () => setTimeout(tellLate, 60));
document.addEventListener("keydown", pressKey);
window.addEventListener("resize", () => drawAll(document));
// A page that "back" takes out of the browser's memory may show what was erased since, or a session that has ended.
window.addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(document));
