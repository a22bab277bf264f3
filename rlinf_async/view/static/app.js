// The page: runs at the left, one tab for each way of looking, and what is new once a second.
import { ago, ask, h, mark, problem } from "/static/dom.js";
import { curves } from "/static/curves.js";
import { timeline } from "/static/timeline.js";
import { graph } from "/static/graph.js";
import { samples } from "/static/samples.js";
import { settings, videos } from "/static/settings.js";

const VIEWS = [curves, timeline, graph, samples, videos, settings];
const LIVE_MS = 1000, STILL_MS = 4000;

// What all tabs know: `runs` as the server told, `shown` the ids that are compared, `current` the
// one that is looked at where only one can be.
const app = { runs: [], shown: new Set(), current: null, tab: null, place: readPlace(), visibleRuns, run, keep };
const seen = new Set(); // ids that were told of before
let asked = performance.now();

function visibleRuns() { return app.runs.filter((one) => app.shown.has(one.id)); }
function run() { return app.runs.find((one) => one.id === app.current) || null; }

// What is open stands in the address, so that a reload shows the same.
function readPlace() { return Object.fromEntries(new URLSearchParams(location.hash.slice(1))); }
function keep(name, value) {
  if (value === "" || value === null || value === undefined || value === false) delete app.place[name];
  else app.place[name] = String(value);
  history.replaceState(null, "", `#${new URLSearchParams(app.place)}`);
}

function makeTabs() {
  const tabs = document.getElementById("tabs"), panels = document.getElementById("panels");
  for (const [at, view] of VIEWS.entries()) {
    view.tab = h("button", {
      role: "tab", id: `tab-${view.id}`, "aria-controls": `panel-${view.id}`, "aria-selected": "false",
      tabindex: "-1", text: view.title, title: `key ${at + 1}`, on: { click: () => open(view) },
    });
    view.panel = h("section", { role: "tabpanel", id: `panel-${view.id}`, "aria-labelledby": `tab-${view.id}`, tabindex: "-1", hidden: true });
    tabs.append(view.tab);
    panels.append(view.panel);
    view.make(view.panel, app);
  }
  tabs.addEventListener("keydown", (event) => {
    const at = VIEWS.indexOf(app.tab), last = VIEWS.length - 1;
    const to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    open(VIEWS[to]);
    VIEWS[to].tab.focus();
  });
}

function open(view) {
  if (app.tab && app.tab !== view && app.tab.leave) app.tab.leave();
  app.tab = view;
  for (const one of VIEWS) {
    one.tab.setAttribute("aria-selected", String(one === view));
    one.tab.tabIndex = one === view ? 0 : -1;
    one.panel.hidden = one !== view;
  }
  keep("tab", view.id);
  view.update();
}

function choose(id) {
  if (app.current !== id) { app.current = id; keep("run", run().name); }
  app.shown.add(id);
  drawRuns();
  app.tab.update();
}

function sentence(one) {
  const waited = one.ago === null ? null : one.ago + (performance.now() - asked) / 1000;
  const parts = [one.state];
  if (waited !== null) parts.push(one.live ? `last seen ${ago(waited)}` : ago(waited));
  if (one.iteration !== null) parts.push(one.iterations ? `iteration ${one.iteration}/${one.iterations}` : `iteration ${one.iteration}`);
  if (one.starts > 1) parts.push(`start ${one.starts}`);
  return parts.join(" · ");
}

const rows = new Map(); // id -> elements of the run's row, which stay while they have the focus

function drawRuns() {
  const list = document.getElementById("runs");
  for (const one of app.runs) {
    if (!rows.has(one.id)) rows.set(one.id, makeRow(list, one.id));
    const { item, box, name, about, problems } = rows.get(one.id);
    item.classList.toggle("current", one.id === app.current);
    box.checked = app.shown.has(one.id);
    name.textContent = one.name;
    name.title = one.folder;
    name.setAttribute("aria-current", String(one.id === app.current));
    about.textContent = [sentence(one), one.note, one.error].filter(Boolean).join(" — ");
    const told = Object.values(one.problems).join("\n");
    if (problems.dataset.told !== told) {
      problems.dataset.told = told;
      problems.replaceChildren(...(told ? [problem(told)] : []));
    }
  }
}

function makeRow(list, id) {
  const box = h("input", { type: "checkbox", "aria-label": "show its curves", on: { change: () => {
    if (box.checked) app.shown.add(id); else app.shown.delete(id);
    keep("hidden", app.runs.filter((one) => !app.shown.has(one.id)).map((one) => one.name).join("|"));
    app.tab.update();
  } } });
  const name = h("button", { class: "name", on: { click: () => choose(id) } });
  const about = h("div", { class: "about" }), problems = h("div", { class: "about" });
  const item = h("li", {}, box, mark(id), name, about, problems);
  list.append(item);
  return { item, box, name, about, problems };
}

function banner(text) {
  const place = document.getElementById("banner");
  place.hidden = !text;
  if (place.textContent !== text) place.textContent = text;
}

async function look() {
  try {
    const told = await ask("/api/state");
    asked = performance.now();
    app.runs = told.runs;
    const hidden = (app.place.hidden || "").split("|");
    for (const one of app.runs) {
      if (!seen.has(one.id) && !hidden.includes(one.name)) app.shown.add(one.id);
      seen.add(one.id);
    }
    if (app.current === null && app.runs.length) {
      const kept = app.runs.find((one) => one.name === app.place.run);
      const live = app.runs.find((one) => one.live);
      app.current = (kept || live || app.runs[0]).id;
    }
    banner("");
    drawRuns();
    app.tab.update();
  } catch (error) {
    const how = error.status === 401 ? error.message : `no answer from the server (${error.message}): is rlinf-async view still running? What is shown may be old.`;
    banner(how);
  }
}

async function follow() {
  for (;;) {
    const live = app.runs.some((one) => one.live);
    await new Promise((done) => setTimeout(done, live ? LIVE_MS : STILL_MS));
    if (!document.hidden) await look();
  }
}

function makeKeys() {
  const keys = [
    ["1 … " + VIEWS.length, "open a tab; ← → between tabs"],
    ["/", "search in this tab"],
    ["[ ]", "the run before, the next run"],
    ["?", "this list"],
    ["Esc", "leave a search field"],
    ...VIEWS.flatMap((view) => (view.keys || []).map(([key, text]) => [key, `${view.title}: ${text}`])),
  ];
  const list = document.getElementById("keys"), help = document.getElementById("help");
  for (const [key, text] of keys) list.append(h("dt", { text: key }), h("dd", { text }));
  document.getElementById("help-button").addEventListener("click", () => help.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    const typing = event.target.matches("input:not([type=checkbox]):not([type=range]), select, textarea");
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "?") help.showModal();
    else if (event.key === "/") { const field = app.tab.panel.querySelector("input[type=search]"); if (!field) return; field.focus(); field.select(); }
    else if (event.key === "[" || event.key === "]") step(event.key === "]" ? 1 : -1);
    else if (/^[1-9]$/.test(event.key) && VIEWS[event.key - 1]) { const view = VIEWS[event.key - 1]; open(view); view.tab.focus(); }
    else return;
    event.preventDefault();
  });
}

function step(by) {
  const at = app.runs.findIndex((one) => one.id === app.current);
  const to = app.runs[(at + by + app.runs.length) % app.runs.length];
  if (to) choose(to.id);
}

makeTabs();
makeKeys();
open(VIEWS.find((one) => one.id === app.place.tab) || VIEWS[0]);
await look();
document.body.dataset.ready = "true";
timeline.prefetch(); // it takes a moment to be read, and nobody waits for it yet
window.addEventListener("resize", () => app.tab.update(true));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.tab.update(true));
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
setInterval(drawRuns, 5000);
follow();
