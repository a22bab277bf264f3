// Curves of every metric: search, smoothing, log scale, runs side by side, values under the pointer.
import { ask, colourOf, dashOf, fit, h, hint, matcher, short, soon, theme } from "/static/dom.js";

const STEP = "step";
const BATCH = 24; // columns of one request

// The cells of a run, as text and as numbers, asked for by column when they are first drawn.
class Cells {
  constructor(id) { this.id = id; this.generation = 0; this.columns = new Map(); this.asked = Promise.resolve(); }

  column(name) {
    if (!this.columns.has(name)) this.columns.set(name, { text: [], number: [], present: [] });
    return this.columns.get(name);
  }

  // Ask for what is not there yet, after what was asked for before. Whether anything was new.
  load(run, names) {
    const asked = this.asked.then(() => this.ask(run, names));
    this.asked = asked.catch(() => {}); // said by whoever asked
    return asked;
  }

  async ask(run, names) {
    if (run.metrics.generation > this.generation) { this.columns.clear(); this.generation = run.metrics.generation; }
    const lengths = new Map();
    for (const name of new Set([STEP, ...names])) {
      const length = this.column(name).text.length;
      if (length < run.metrics.rows) lengths.set(length, [...(lengths.get(length) || []), name]);
    }
    for (const [after, wanted] of lengths)
      for (let at = 0; at < wanted.length; at += BATCH)
        this.add(await ask("/api/metrics", { run: this.id, after, generation: this.generation, name: wanted.slice(at, at + BATCH) }), after);
    return lengths.size > 0;
  }

  add(told, after) {
    if (told.generation !== this.generation || told.after !== after) { this.columns.clear(); this.generation = told.generation; if (told.after) return; }
    const rows = told.rows - told.after;
    for (const [name, joined] of Object.entries(told.columns)) {
      const column = this.column(name);
      if (column.text.length !== told.after || !rows) continue;
      for (const text of joined.split(",")) {
        if (text !== "") column.present.push(column.text.length);
        column.text.push(text);
        column.number.push(text === "" ? NaN : toNumber(text));
      }
    }
  }
}

export function toNumber(text) {
  if (text === "inf") return Infinity;
  if (text === "-inf") return -Infinity;
  return Number(text);
}

// Exponential smoothing that begins without a bias; what is no number is left as it is.
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, size = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    mean = mean * weight + value * (1 - weight);
    size = size * weight + (1 - weight);
    return mean / size;
  });
}

// Round numbers between two others. Halves are subtracted: the largest floats have no difference.
export function ticks(low, high, count) {
  const span = high / 2 - low / 2;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const rough = span / count * 2, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((one) => one * power >= rough * 0.999) || 10);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high && found.length < 20; at++) found.push(at * step);
  return found.length ? found : [low];
}

// From values to a place between 0 and 1.
function scale(low, high, log) {
  if (log) { const a = Math.log10(low), b = Math.log10(high); return b > a ? (v) => (Math.log10(v) - a) / (b - a) : () => 0.5; }
  const half = high / 2 - low / 2;
  return half > 0 ? (v) => (v / 2 - low / 2) / half : () => 0.5;
}

function range(values, log) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (Number.isFinite(value) && (!log || value > 0)) { if (value < low) low = value; if (value > high) high = value; }
  return low > high ? null : [low, high];
}

const LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 22;

// Draw lines, each { x, y, raw, colour, dash }, and the pointer's column. Returns how to get x from a place.
export function drawChart(canvas, lines, { log, at }) {
  const sheet = fit(canvas);
  if (!sheet) return null;
  const { pen, width, height } = sheet, { ink, faint, line: grid } = theme();
  pen.font = "11px system-ui, sans-serif";
  const every = (pick) => lines.flatMap((one) => range(pick(one), false) || []);
  const across = range(every((one) => one.x), false);
  let up = range(lines.flatMap((one) => [...(range(one.y, log) || []), ...(range(one.raw, log) || [])]), log);
  if (!across) return drawNothing(pen, width, height, faint, "no values yet");
  const only = up === null;
  if (only) up = log ? [1, 10] : [0, 1];
  if (!log && up[0] === up[1]) { const room = Math.abs(up[0]) > 1e300 ? 0 : Math.abs(up[0]) * 0.1 || 1; up = [up[0] - room, up[1] + room]; }
  const toX = scale(across[0], across[1], false), toY = scale(up[0], up[1], log);
  const px = (v) => LEFT + toX(v) * (width - LEFT - RIGHT), py = (v) => height - BOTTOM - toY(v) * (height - TOP - BOTTOM);
  drawAxes(pen, { width, height, across, up, log, px, py, faint, grid, only });
  for (const line of lines) {
    pen.strokeStyle = pen.fillStyle = line.colour;
    if (line.raw !== line.y) { pen.globalAlpha = 0.25; pen.lineWidth = 1; pen.setLineDash([]); trace(pen, line.x, line.raw, px, py, log, height, width); pen.globalAlpha = 1; }
    pen.lineWidth = 1.8;
    pen.setLineDash(line.dash);
    trace(pen, line.x, line.y, px, py, log, height, width);
    pen.setLineDash([]);
  }
  if (at !== null && at !== undefined && across[0] <= at && at <= across[1]) {
    pen.strokeStyle = ink; pen.lineWidth = 1; pen.globalAlpha = 0.6;
    pen.beginPath(); pen.moveTo(px(at), TOP); pen.lineTo(px(at), height - BOTTOM); pen.stroke(); pen.globalAlpha = 1;
  }
  return { across, toValue: (place) => { const share = Math.min(1, Math.max(0, (place - LEFT) / (width - LEFT - RIGHT))); return across[0] * (1 - share) + across[1] * share; } };
}

function drawNothing(pen, width, height, faint, text) {
  pen.fillStyle = faint; pen.textAlign = "center";
  pen.fillText(text, width / 2, height / 2);
  return null;
}

function drawAxes(pen, { width, height, across, up, log, px, py, faint, grid, only }) {
  pen.strokeStyle = grid; pen.fillStyle = faint; pen.lineWidth = 1; pen.setLineDash([]);
  pen.textAlign = "right"; pen.textBaseline = "middle";
  const marks = log ? logTicks(up) : ticks(up[0], up[1], 5);
  for (const value of marks) {
    const y = Math.round(py(value)) + 0.5;
    pen.beginPath(); pen.moveTo(LEFT, y); pen.lineTo(width - RIGHT, y); pen.stroke();
    if (!only) pen.fillText(short(value), LEFT - 5, y);
  }
  pen.textBaseline = "top";
  // One point has one label, of its own value: no round number is near it.
  const along = across[0] === across[1] ? [across[0]] : ticks(across[0], across[1], Math.max(2, Math.floor(width / 64)));
  for (const value of along) {
    const x = px(value), text = short(value), half = pen.measureText(text).width / 2;
    pen.textAlign = "center";
    pen.fillText(text, Math.min(x, width - RIGHT - half), height - BOTTOM + 5);
  }
}

function logTicks([low, high]) {
  const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
  if (last - first < 1) return low === high ? [low] : [low, high];
  const by = Math.max(1, Math.ceil((last - first) / 5)), found = [];
  for (let at = first; at <= last; at += by) found.push(10 ** at);
  return found;
}

// One line. Where there are many more points than pixels, each column has its least and its greatest.
function trace(pen, x, y, px, py, log, height, width) {
  const drawable = (v) => Number.isFinite(v) && (!log || v > 0);
  pen.beginPath();
  let open = false, points = 0, lastX = 0, lastY = 0;
  const many = x.length > 3 * width;
  let column = -1, first = 0, least = 0, most = 0, last = 0;
  const flush = () => {
    if (column < 0) return;
    if (open) pen.lineTo(column, first); else pen.moveTo(column, first);
    if (most > least) { pen.lineTo(column, least); pen.lineTo(column, most); pen.lineTo(column, last); }
    open = true; column = -1;
  };
  const beyond = [];
  for (let at = 0; at < x.length; at++) {
    const value = y[at];
    if (!Number.isFinite(x[at])) continue;
    if (!drawable(value)) {
      flush(); open = false;
      if (value === Infinity || value === -Infinity) beyond.push([px(x[at]), value > 0]);
      continue;
    }
    points++;
    const left = px(x[at]), top = py(value);
    lastX = left; lastY = top;
    if (!many) { if (open) pen.lineTo(left, top); else { pen.moveTo(left, top); pen.lineTo(left + 0.01, top); } open = true; continue; }
    const place = Math.round(left);
    if (place !== column) { flush(); column = place; first = least = most = last = top; }
    else { if (top < least) least = top; if (top > most) most = top; last = top; }
  }
  flush();
  pen.lineJoin = pen.lineCap = "round";
  pen.stroke();
  if (points === 1) { pen.beginPath(); pen.arc(lastX, lastY, 3.5, 0, 7); pen.fill(); }
  for (const [left, above] of beyond) { // infinity: a triangle at the edge that it is beyond of
    const edge = above ? TOP : height - BOTTOM, tip = above ? -6 : 6;
    pen.beginPath(); pen.moveTo(left - 4, edge - tip); pen.lineTo(left + 4, edge - tip); pen.lineTo(left, edge); pen.fill();
  }
}

// The place in a column of x that is nearest to a value.
export function nearest(x, value) {
  let best = -1, least = Infinity;
  for (let at = 0; at < x.length; at++) { const off = Math.abs(x[at] - value); if (off < least) { least = off; best = at; } }
  return best;
}

export const curves = {
  id: "curves", title: "Curves",
  keys: [["← →", "move along a curve that has the focus"], ["Enter", "make it large"]],

  make(panel, app) {
    this.app = app; this.cards = new Map(); this.cells = new Map(); this.at = null;
    this.draw = soon(() => this.drawCards());
    const place = app.place;
    this.search = h("input", { type: "search", placeholder: "search metrics  ( / )", "aria-label": "search metrics", value: place.metrics || "", on: { input: () => { app.keep("metrics", this.search.value); this.update(); } } });
    this.smooth = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: place.smooth || 0, on: { input: () => { app.keep("smooth", Number(this.smooth.value) || ""); this.smoothness.textContent = this.smooth.value; this.draw(); } } });
    this.smoothness = h("output", { text: this.smooth.value });
    this.log = h("input", { type: "checkbox", checked: place.log === "1", on: { change: () => { app.keep("log", this.log.checked ? 1 : ""); this.draw(); } } });
    this.along = h("select", { on: { change: () => { app.keep("along", this.along.value === STEP ? "" : this.along.value); this.update(); } } });
    this.count = h("span", { class: "count", role: "status" });
    this.grid = h("div", { class: "cards" });
    panel.append(
      h("div", { class: "bar" }, this.search, h("label", {}, "smoothing", this.smooth, this.smoothness), h("label", {}, this.log, "log scale"), h("label", {}, "along", this.along), this.count),
      this.grid,
    );
    this.near = new IntersectionObserver((seen) => { for (const one of seen) one.target.near = one.isIntersecting; this.fetch(); }, { root: panel, rootMargin: "300px" });
  },

  names() {
    const names = new Set();
    for (const run of this.app.visibleRuns()) for (const name of Object.keys(run.metrics.columns)) if (name !== STEP) names.add(name);
    return [...names];
  },

  update() {
    const names = this.names(), match = matcher(this.search.value);
    const wanted = names.filter(match), known = new Set(names);
    this.chooseAlong(names);
    for (const [name, card] of this.cards) if (!known.has(name)) { this.near.unobserve(card.element); card.element.remove(); this.cards.delete(name); }
    for (const [at, name] of names.entries()) { // a card that is not wanted is hidden, and is there again at once
      if (!this.cards.has(name)) this.cards.set(name, this.makeCard(name));
      const element = this.cards.get(name).element;
      element.hidden = !match(name);
      if (this.grid.children[at] !== element) { this.grid.insertBefore(element, this.grid.children[at] || null); this.near.observe(element); }
    }
    const rows = this.app.visibleRuns().map((run) => run.metrics.rows);
    this.count.textContent = names.length
      ? `${wanted.length} of ${names.length} metrics, ${Math.max(0, ...rows)} rows`
      : this.app.runs.length ? "no rows yet" : "no runs";
    this.fetch();
  },

  chooseAlong(names) {
    const now = [STEP, ...names.filter((name) => ["iteration", "train_seconds", "samples", "env_steps", "version"].includes(name))];
    if (this.options === now.join()) return;
    const chosen = this.along.value || this.app.place.along || STEP;
    this.options = now.join();
    this.along.replaceChildren(...now.map((name) => h("option", { value: name, text: name, selected: name === chosen })));
  },

  makeCard(name) {
    const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": `curve of ${name}` });
    const values = h("div", { class: "values" });
    const element = h("article", { class: "card", "data-metric": name }, h("h3", { text: name }), canvas, values);
    const card = { name, element, canvas, values, map: null };
    const leave = () => { this.at = null; this.draw(); };
    canvas.addEventListener("pointermove", (event) => { if (card.map) { this.at = card.map.toValue(event.offsetX); this.draw(); } });
    canvas.addEventListener("pointerleave", leave);
    canvas.addEventListener("blur", leave);
    canvas.addEventListener("dblclick", () => this.enlarge(card));
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by && card.map) this.walk(card, by);
      else if (event.key === "Enter") this.enlarge(card);
      else if (event.key === "Escape") leave();
      else return;
      event.preventDefault();
    });
    return card;
  },

  enlarge(card) { card.element.classList.toggle("wide"); card.element.scrollIntoView({ block: "nearest" }); this.draw(); },

  // To the next row of the runs that are drawn.
  walk(card, by) {
    const every = [...new Set(card.lines.flatMap((line) => line.x))].filter(Number.isFinite).sort((a, b) => a - b);
    if (!every.length) return;
    const from = this.at === null ? (by > 0 ? -1 : every.length) : nearest(every, this.at);
    this.at = every[Math.min(every.length - 1, Math.max(0, from + by))];
    this.draw();
  },

  // Ask for the cells of what is seen and was not asked for, then draw.
  async fetch() {
    const near = [...this.cards.values()].filter((card) => card.element.near).map((card) => card.name);
    this.draw();
    if (!near.length) return;
    const along = this.along.value || STEP;
    await Promise.all(this.app.visibleRuns().map(async (run) => {
      if (!this.cells.has(run.id)) this.cells.set(run.id, new Cells(run.id));
      try {
        const names = near.filter((name) => name in run.metrics.columns);
        if (along in run.metrics.columns) names.push(along);
        if (await this.cells.get(run.id).load(run, names)) this.draw();
      } catch (error) { run.problems.metrics = error.message; }
    }));
  },

  drawCards() {
    if (this.app.tab !== this) return;
    const along = this.along.value || STEP, log = this.log.checked, weight = Number(this.smooth.value);
    for (const card of this.cards.values()) {
      if (!card.element.near) continue;
      card.lines = this.linesOf(card.name, along, weight);
      card.map = drawChart(card.canvas, card.lines, { log, at: this.at });
      this.tell(card, log);
    }
  },

  linesOf(name, along, weight) {
    const lines = [];
    for (const run of this.app.visibleRuns()) {
      const cells = this.cells.get(run.id);
      const column = cells && cells.columns.get(name), steps = cells && cells.columns.get(along);
      if (!column || !steps) continue;
      const key = `${cells.generation} ${column.text.length} ${steps.text.length} ${along} ${weight}`;
      if (column.key !== key) { // as it was drawn last, as long as nothing is new
        const rows = column.present.filter((row) => row < steps.text.length && steps.text[row] !== "");
        const raw = rows.map((row) => column.number[row]);
        Object.assign(column, { key, drawn: { rows, x: rows.map((row) => steps.number[row]), raw, y: smoothed(raw, weight) } });
      }
      lines.push({ ...column.drawn, run, text: column.text, along: steps.text, colour: colourOf(run.id), dash: dashOf(run.id) });
    }
    return lines;
  },

  // The values under the pointer, or the newest, as they were written.
  tell(card, log) {
    const parts = [];
    for (const line of card.lines) {
      const at = this.at === null ? line.x.length - 1 : nearest(line.x, this.at);
      if (at < 0) continue;
      const row = line.rows[at], name = card.lines.length > 1 ? `${line.run.name}: ` : "";
      parts.push(`${name}${line.text[row]} at ${line.along[row]}`);
    }
    const left = log ? card.lines.reduce((sum, line) => sum + line.raw.filter((v) => v <= 0).length, 0) : 0;
    if (left) parts.push(`${left} not above 0, left out`);
    const text = parts.join("; ");
    if (card.values.textContent !== text) card.values.textContent = text;
  },
};
