// The timeline: what each worker did when. Spans are drawn from arrays; of those that are narrower
// than a pixel only one is drawn in each pixel, so that a trace of any length is drawn in a moment.
import { ask, COLOURS, duration, fit, h, hint, matcher, problem, soon, theme } from "/static/dom.js";

const ROW = 16, GAP = 6, TRACK = 34, AXIS = 22, MARGIN = 150;
const WAITING = "#b9c0c8", ON_DARK = new Set(["#0072b2", "#d55e00", "#009e73", "#8a7a00", "#7f7f7f"]);
const AGAIN_MS = 150; // until a trace that is being read is asked for again

// The arrays of a trace, as rlinf_async/view/spans.py lays them out.
function decode(buffer) {
  const view = new DataView(buffer), length = view.getUint32(4, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  let at = 8 + length;
  const take = (Kind, count) => { const end = at + count * Kind.BYTES_PER_ELEMENT, made = new Kind(buffer.slice(at, end)); at = end; return made; };
  const trace = {
    ...head, start: take(Float64Array, head.spans), lasting: take(Float32Array, head.spans),
    name: take(Uint16Array, head.spans), at: take(Float64Array, head.values), value: take(Float64Array, head.values),
  };
  let first = 0, top = 0, worker = null;
  for (const row of trace.rows) {
    if (row.worker !== worker) { top += GAP; worker = row.worker; row.begins = true; }
    row.first = first; row.after = first += row.count; row.top = top; top += ROW;
  }
  first = 0;
  for (const track of trace.tracks) { track.first = first; track.after = first += track.count; }
  trace.shownTracks = trace.tracks.filter((one) => /^channel .* depth$/.test(one.name) && one.largest > 0);
  for (const track of trace.shownTracks) { track.top = top + GAP; top += TRACK; }
  trace.height = top + GAP;
  trace.total = totals(trace);
  // Those that took longest have the colours that are told apart best.
  trace.rank = new Uint16Array(trace.names.length);
  const order = [...trace.names.keys()].filter((one) => !trace.waits[one]).sort((a, b) => trace.total[b] - trace.total[a]);
  for (const [place, one] of order.entries()) trace.rank[one] = place % COLOURS.length;
  return trace;
}

function totals(trace) {
  const seconds = new Float64Array(trace.names.length);
  for (let at = 0; at < trace.spans; at++) if (trace.name[at] < seconds.length) seconds[trace.name[at]] += trace.lasting[at] / 1e6;
  return seconds;
}

// The first place in array[from, to) whose value is above the wanted one.
function above(array, wanted, from, to) {
  while (from < to) { const middle = (from + to) >> 1; if (array[middle] > wanted) to = middle; else from = middle + 1; }
  return from;
}

export const timeline = {
  id: "timeline", title: "Timeline",
  keys: [["← →", "move; + − zoom; Home: all of it"], ["↑ ↓", "scroll; wheel: zoom, Shift + wheel: scroll, drag: move"], ["n p", "the next span, the span before, in the row that is chosen"]],

  make(panel, app) {
    this.app = app; this.known = new Map(); this.trace = null; this.chosen = null; this.from = 0; this.to = 1;
    this.draw = soon(() => this.paint());
    this.search = h("input", { type: "search", placeholder: "search spans  ( / )", "aria-label": "search spans", value: app.place.span || "", on: { input: () => { app.keep("span", this.search.value); this.draw(); } } });
    const button = (text, label, work) => h("button", { text, "aria-label": label, title: label, on: { click: work } });
    this.count = h("span", { class: "count", role: "status" });
    this.bar = h("div", { class: "bar" }, this.search, button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)), button("all", "show all of it", () => this.all()), this.count);
    this.canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": "timeline of the workers; arrows move it, plus and minus zoom" });
    this.space = h("div", { class: "space" });
    this.scroller = h("div", { class: "rows" }, this.canvas, this.space);
    this.legend = h("div", { class: "legend" });
    this.details = h("div", { class: "details hint", role: "status", "aria-live": "polite" });
    this.message = h("div");
    panel.append(this.bar, this.message, this.scroller, this.legend, this.details);
    this.listen();
  },

  listen() {
    const canvas = this.canvas;
    this.scroller.addEventListener("scroll", () => this.draw());
    canvas.addEventListener("wheel", (event) => {
      if (!this.trace) return;
      event.preventDefault();
      if (event.shiftKey) this.scroller.scrollTop += event.deltaY || event.deltaX;
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / this.width());
      else this.zoom(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 100) / 250), this.timeAt(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { this.drag = { x: event.clientX, from: this.from, to: this.to, far: false }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (this.drag) {
        const by = (this.drag.x - event.clientX) / this.width() * (this.drag.to - this.drag.from);
        if (Math.abs(this.drag.x - event.clientX) > 3) this.drag.far = true;
        this.show(this.drag.from + by, this.drag.to + by);
      } else { const found = this.spanAt(event.offsetX, event.offsetY); canvas.title = found === null ? "" : this.said(found); }
    });
    canvas.addEventListener("pointerup", (event) => {
      if (this.drag && !this.drag.far) this.choose(this.spanAt(event.offsetX, event.offsetY));
      this.drag = null;
    });
    canvas.addEventListener("keydown", (event) => {
      const work = {
        ArrowLeft: () => this.move(-0.15), ArrowRight: () => this.move(0.15), "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6),
        Home: () => this.all(), ArrowUp: () => { this.scroller.scrollTop -= 3 * ROW; }, ArrowDown: () => { this.scroller.scrollTop += 3 * ROW; },
        n: () => this.neighbour(1), p: () => this.neighbour(-1),
      }[event.key];
      if (!work || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      work();
    });
  },

  async update() {
    const run = this.app.run();
    if (!run) return this.say(hint("no runs"));
    if (this.id !== run.id) { this.id = run.id; this.trace = null; this.chosen = null; this.details.textContent = ""; this.stamp = null; }
    if (!run.stamps.trace) { this.trace = null; return this.say(hint(run.live ? "The timeline is there when the run has ended: it writes its trace (trace.json.gz) then. The graph shows what goes on now." : "This run has left no trace (trace.json.gz).")); }
    if (this.stamp !== run.stamps.trace) { this.stamp = run.stamps.trace; await this.load(run); }
    this.draw();
  },

  // The trace of a run, asked for once; those of the last runs are kept.
  read(run) {
    const key = `${run.id} ${run.stamps.trace}`;
    if (!this.known.has(key)) {
      this.known.set(key, (async () => {
        for (;;) {
          const told = await ask("/api/timeline", { run: run.id });
          if (told instanceof ArrayBuffer) return decode(told);
          await new Promise((done) => setTimeout(done, AGAIN_MS));
        }
      })());
      if (this.known.size > 4) this.known.delete(this.known.keys().next().value);
    }
    return this.known.get(key);
  },

  prefetch() {
    const run = this.app.run();
    if (run && run.stamps.trace) this.read(run).catch(() => {}); // said where it is looked at
  },

  async load(run) {
    this.say(hint("the trace is being read …"));
    let read;
    try { read = await this.read(run); }
    catch (error) { if (this.id === run.id) this.say(problem(error.message)); return; }
    if (this.id !== run.id) return;
    this.trace = read;
    this.say(null);
    this.makeLegend();
    this.space.style.height = `${this.trace.height + AXIS}px`;
    this.all();
  },

  say(what) {
    this.message.replaceChildren(...(what ? [what] : []));
    this.scroller.hidden = this.legend.hidden = this.bar.hidden = this.details.hidden = Boolean(what);
  },

  makeLegend() {
    const order = [...this.trace.names.keys()].sort((a, b) => this.trace.total[b] - this.trace.total[a]).slice(0, 40);
    this.legend.replaceChildren(...order.map((at) => {
      const box = h("svg:rect", { x: 6, y: 0, width: 14, height: 12, fill: this.colour(at) });
      return h("span", {}, h("svg:svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, box), `${this.trace.names[at]} ${duration(this.trace.total[at])}`);
    }));
    this.count.textContent = `${this.trace.spans.toLocaleString("en")} spans, ${duration(this.trace.end / 1e6)}`;
  },

  colour(name) { return this.trace.waits[name] ? WAITING : COLOURS[this.trace.rank[name] || 0]; },
  width() { return Math.max(50, this.canvas.clientWidth - MARGIN); },
  timeAt(x) { return this.from + (x - MARGIN) / this.width() * (this.to - this.from); },
  all() { if (this.trace) this.show(0, Math.max(1, this.trace.end)); },
  move(share) { const by = share * (this.to - this.from); this.show(this.from + by, this.to + by); },

  zoom(by, around = (this.from + this.to) / 2) {
    if (!this.trace) return;
    const wide = Math.min(Math.max((this.to - this.from) * by, 0.05), this.trace.end || 1), share = (around - this.from) / (this.to - this.from);
    this.show(around - wide * share, around + wide * (1 - share));
  },

  show(from, to) {
    const wide = to - from, end = Math.max(1, this.trace ? this.trace.end : 1);
    this.from = Math.min(Math.max(from, 0), Math.max(0, end - wide));
    this.to = this.from + wide;
    this.draw();
  },

  paint() {
    if (this.app.tab !== this || !this.trace || this.scroller.hidden) return;
    const began = performance.now();
    this.canvas.style.height = `${this.scroller.clientHeight}px`;
    this.space.style.marginTop = `-${this.scroller.clientHeight}px`;
    const sheet = fit(this.canvas);
    if (!sheet) return;
    const { pen, width, height } = sheet, tones = theme(), top = this.scroller.scrollTop - AXIS;
    const match = this.search.value ? matcher(this.search.value) : null;
    const faded = this.trace.names.map((name) => match !== null && !match(name));
    pen.save();
    pen.beginPath(); pen.rect(0, AXIS, width, height - AXIS); pen.clip();
    pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    for (const row of this.trace.rows) {
      const y = row.top - top;
      if (y > height || y < -ROW) continue;
      this.paintRow(pen, row, y, width, faded, tones);
    }
    for (const track of this.trace.shownTracks) {
      const y = track.top - top;
      if (y <= height && y > -TRACK) this.paintTrack(pen, track, y, width, tones);
    }
    pen.restore();
    this.paintAxis(pen, width, height, tones);
    this.painted = performance.now() - began; // milliseconds of the last picture, for tests
  },

  paintRow(pen, row, y, width, faded, tones) {
    const { start, lasting, name } = this.trace, { from, to } = this;
    const scale = (width - MARGIN) / (to - from);
    if (row.begins) { pen.fillStyle = tones.ink; pen.textAlign = "left"; pen.fillText(row.worker, 6, y + ROW / 2, MARGIN - 12); }
    let at = above(start, from, row.first, row.after);
    if (at > row.first && start[at - 1] + lasting[at - 1] >= from) at--;
    let filled = -1;
    for (; at < row.after && start[at] <= to; at++) {
      const left = MARGIN + (start[at] - from) * scale, right = left + lasting[at] * scale;
      if (right <= filled) { at = this.skip(row, at, filled, scale); continue; }
      const x = Math.max(left, MARGIN), wide = Math.max(1, Math.min(right, width) - x);
      pen.globalAlpha = faded[name[at]] ? 0.15 : 1;
      pen.fillStyle = this.colour(name[at]);
      pen.fillRect(x, y + 1, wide > 3 ? wide - 0.5 : wide, ROW - 2);
      if (at === this.chosen) { pen.strokeStyle = tones.ink; pen.lineWidth = 2; pen.strokeRect(x, y + 1, wide, ROW - 2); }
      if (wide > 34) this.paintName(pen, this.trace.names[name[at]] || "", x, y, wide);
      filled = Math.max(right, Math.floor(x) + 1);
    }
    pen.globalAlpha = 1;
  },

  // The last span before the next pixel: what is between is narrower than it.
  skip(row, at, filled, scale) {
    const until = this.from + (filled - MARGIN) / scale;
    const next = above(this.trace.start, until, at, row.after);
    return Math.max(at, next - 2);
  },

  paintName(pen, text, x, y, wide) {
    pen.fillStyle = ON_DARK.has(pen.fillStyle) ? "#fff" : "#000"; pen.textAlign = "left";
    const fits = Math.floor((wide - 6) / 6);
    pen.save(); pen.beginPath(); pen.rect(x, y, wide - 2, ROW); pen.clip();
    pen.fillText(text.length > fits ? `${text.slice(0, Math.max(1, fits - 1))}…` : text, x + 3, y + ROW / 2 + 0.5);
    pen.restore();
  },

  paintTrack(pen, track, y, width, tones) {
    const { at, value } = this.trace, scale = (width - MARGIN) / (this.to - this.from);
    const label = track.name.replace(/^channel (.*) depth$/, "$1");
    pen.fillStyle = tones.ink; pen.textAlign = "left";
    pen.fillText(label, 6, y + 9, MARGIN - 12);
    pen.fillStyle = tones.faint;
    pen.fillText(`depth, up to ${track.largest}`, 6, y + 22, MARGIN - 12);
    pen.fillStyle = COLOURS[0]; pen.globalAlpha = 0.6;
    let one = Math.max(track.first, above(at, this.from, track.first, track.after) - 1);
    while (one < track.after && at[one] <= this.to) {
      const left = Math.max(MARGIN, MARGIN + (at[one] - this.from) * scale);
      let next = one + 1, most = value[one];
      while (next < track.after && MARGIN + (at[next] - this.from) * scale < left + 1) { most = Math.max(most, value[next]); next++; }
      const right = next < track.after ? Math.min(width, MARGIN + (at[next] - this.from) * scale) : left + 1;
      const high = most / track.largest * (TRACK - 6);
      pen.fillRect(left, y + TRACK - 4 - high, Math.max(1, right - left), high);
      one = next;
    }
    pen.globalAlpha = 1;
  },

  paintAxis(pen, width, height, tones) {
    pen.fillStyle = tones.card; pen.fillRect(0, 0, width, AXIS);
    pen.strokeStyle = tones.line; pen.fillStyle = tones.faint; pen.textAlign = "center"; pen.lineWidth = 1; pen.textBaseline = "middle";
    const count = Math.max(2, Math.floor((width - MARGIN) / 110)), rough = (this.to - this.from) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5, 10].find((one) => one * power >= rough) || 10);
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = MARGIN + (at - this.from) / (this.to - this.from) * (width - MARGIN);
      pen.beginPath(); pen.moveTo(x, AXIS - 4); pen.lineTo(x, height); pen.globalAlpha = 0.5; pen.stroke(); pen.globalAlpha = 1;
      if (x < width - 30) pen.fillText(duration(at / 1e6), x, AXIS / 2 - 1);
    }
  },

  rowAt(y) {
    const top = y + this.scroller.scrollTop - AXIS;
    return y < AXIS ? undefined : this.trace.rows.find((row) => row.top <= top && top < row.top + ROW);
  },

  spanAt(x, y) {
    const row = this.trace && this.rowAt(y);
    if (!row || x < MARGIN) return null;
    const time = this.timeAt(x), slack = (this.to - this.from) / this.width();
    const at = above(this.trace.start, time + slack, row.first, row.after) - 1;
    return at >= row.first && this.trace.start[at] + this.trace.lasting[at] >= time - slack ? at : null;
  },

  rowOf(span) { return this.trace.rows.find((row) => row.first <= span && span < row.after); },

  said(span) {
    const { start, lasting, name, names } = this.trace;
    return `${this.rowOf(span).worker}: ${names[name[span]]}, ${duration(lasting[span] / 1e6)} from ${duration(start[span] / 1e6)} on`;
  },

  async choose(span) {
    this.chosen = span;
    this.draw();
    if (span === null) { this.details.textContent = ""; return; }
    const said = this.details.textContent = this.said(span);
    try {
      const told = await ask("/api/span", { run: this.id, span });
      const text = Object.entries(told).map(([name, value]) => `${name} ${value}`).join(", ");
      if (this.chosen === span && text) this.details.textContent = `${said}\n${text}`;
    } catch (error) { this.details.textContent = `${said}\n${error.message}`; }
  },

  neighbour(by) {
    if (!this.trace || !this.trace.spans) return;
    if (this.chosen === null) { const row = this.trace.rows[0]; return this.reveal(Math.min(row.after - 1, above(this.trace.start, this.from, row.first, row.after))); }
    const row = this.rowOf(this.chosen);
    this.reveal(Math.min(row.after - 1, Math.max(row.first, this.chosen + by)));
  },

  // Choose a span, and move so far that it is seen.
  reveal(span) {
    const start = this.trace.start[span], wide = this.to - this.from;
    if (start < this.from || start > this.to) this.show(start - wide / 4, start + wide * 3 / 4);
    this.choose(span);
  },
};
