// The graph: groups of workers and channels, with depth and rates, who waits for whom, and the
// bottleneck by name. Items flow from left to right; what goes back is drawn below.
import { ask, duration, h, hint, problem, short } from "/static/dom.js";

const WIDE = 170, HIGH = 64, ACROSS = 74, DOWN = 26, EDGE = 52;
const DRIVER = "g the run"; // where items begin, and where they come back to

// Layers of a graph by the longest way from a source; edges that would close a ring go back.
export function layers(nodes, edges) {
  const next = new Map(nodes.map((one) => [one, []]));
  for (const { from, to } of edges) next.get(from).push(to);
  const back = new Set(), state = new Map(), order = [];
  const visit = (node) => {
    state.set(node, 1);
    for (const to of next.get(node)) {
      if (state.get(to) === 1) back.add(`${node}\u0000${to}`);
      else if (!state.has(to)) visit(to);
    }
    state.set(node, 2);
    order.unshift(node);
  };
  const entered = new Set(edges.map((one) => one.to));
  for (const node of [...nodes.filter((one) => one === DRIVER || !entered.has(one)), ...nodes]) if (!state.has(node)) visit(node);
  const layer = new Map(nodes.map((one) => [one, 0]));
  for (const node of order) for (const to of next.get(node)) if (!back.has(`${node}\u0000${to}`)) layer.set(to, Math.max(layer.get(to), layer.get(node) + 1));
  return { layer, back };
}

export const graph = {
  id: "graph", title: "Graph",
  keys: [["Tab", "to the next worker or channel; Enter: more about it"]],

  make(panel, app) {
    this.app = app; this.key = null;
    this.named = h("div"); this.message = h("div");
    this.picture = h("div", { class: "graph" });
    this.details = h("div", { class: "details", role: "status", "aria-live": "polite" });
    this.lists = h("div");
    panel.append(this.named, this.message, this.picture, this.details, this.lists);
  },

  async update() {
    const run = this.app.run();
    if (!run) return this.say(hint("no runs"));
    const key = [run.id, run.stamps.status, run.stamps.trace, run.stamps.waits].join();
    if (this.key === key) return;
    if (this.id !== run.id) { this.id = run.id; this.chosen = null; this.details.textContent = ""; this.drawn = null; }
    this.key = key;
    if (!run.stamps.status && !run.stamps.trace) return this.say(hint("Nothing is known of its workers yet: a run that goes on writes status.json, one that ends trace.json.gz."));
    try {
      for (;;) {
        const told = await ask("/api/graph", { run: run.id });
        if (this.key !== key) return;
        if (!told.waiting) { this.say(null); this.draw(told, run); return; }
        this.say(hint("the trace is being read …"));
        await new Promise((done) => setTimeout(done, 150));
      }
    } catch (error) { if (this.key === key) this.say(problem(error.message)); }
  },

  say(what) {
    this.message.replaceChildren(...(what ? [what] : []));
    this.picture.hidden = this.lists.hidden = this.named.hidden = Boolean(what);
  },

  draw(told, run) {
    this.told = told;
    const about = told.bottleneck;
    this.named.replaceChildren(...(about ? [h("p", { class: "named", text: about.sentence })] : []), ...(told.problem ? [problem(told.problem)] : []));
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.node : null;
    this.picture.replaceChildren(this.svg(told));
    if (focused) { const again = [...this.picture.querySelectorAll("[data-node]")].find((one) => one.dataset.node === focused); if (again) again.focus(); }
    if (this.chosen) this.tell(this.chosen);
    this.lists.replaceChildren(...[this.shares(told), this.waits(told, run)].filter(Boolean));
  },

  svg(told) {
    const groups = new Map(told.groups.map((one) => [`g ${one.name}`, one])), channels = new Map(told.channels.map((one) => [`c ${one.name}`, one]));
    const edges = told.edges.map((one) => {
      const worker = `g ${one.group}`, channel = `c ${one.channel}`;
      return one.way === "out" ? { ...one, from: worker, to: channel } : { ...one, from: channel, to: worker };
    });
    const nodes = [...groups.keys(), ...channels.keys()], { layer, back } = layers(nodes, edges);
    const columns = [];
    for (const node of nodes) (columns[layer.get(node)] ||= []).push(node);
    this.order(columns, edges);
    const tall = Math.max(...columns.map((one) => one.length)), place = new Map();
    for (const [x, column] of columns.entries()) for (const [y, node] of column.entries())
      place.set(node, { x: EDGE + x * (WIDE + ACROSS), y: 20 + (y + (tall - column.length) / 2) * (HIGH + DOWN) });
    const below = edges.filter((one) => back.has(`${one.from}\u0000${one.to}`)).length;
    const width = EDGE * 2 + columns.length * (WIDE + ACROSS) - ACROSS, height = 40 + tall * (HIGH + DOWN) - DOWN + below * 18 + (below ? 16 : 0);
    const arrow = h("svg:marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, orient: "auto", markerUnits: "userSpaceOnUse" }, h("svg:path", { d: "M0 0 8 4 0 8z", fill: "context-stroke" }));
    const root = h("svg:svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "workers and channels" }, h("svg:defs", {}, arrow));
    const waited = new Map((told.shares || []).map((one) => [`${one.group} ${one.channel} ${one.operation}`, one.share]));
    let lane = 0;
    for (const edge of edges) {
      const returning = back.has(`${edge.from}\u0000${edge.to}`);
      root.append(...this.edge(edge, place.get(edge.from), place.get(edge.to), returning ? height - 12 - 18 * lane++ : null, waited.get(`${edge.group} ${edge.channel} ${edge.way === "out" ? "put" : "get"}`) || 0));
    }
    for (const [node, one] of groups) root.append(this.group(node, one, place.get(node), told));
    for (const [node, one] of channels) root.append(this.channel(node, one, place.get(node), told));
    return root;
  },

  // Put the nodes of a column beside those that they are joined to, so that few edges cross.
  order(columns, edges) {
    const at = new Map();
    for (const column of columns) {
      const wish = new Map(column.map((node, now) => {
        const near = edges.filter((one) => one.to === node && at.has(one.from)).map((one) => at.get(one.from));
        return [node, near.length ? near.reduce((a, b) => a + b, 0) / near.length : now];
      }));
      column.sort((a, b) => wish.get(a) - wish.get(b));
      for (const [y, node] of column.entries()) at.set(node, y);
    }
  },

  edge(edge, from, to, lane, waited) {
    const x1 = from.x + WIDE, y1 = from.y + HIGH / 2, x2 = to.x, y2 = to.y + HIGH / 2;
    const name = edge.way === "out" ? `${edge.group} → ${edge.channel}` : `${edge.channel} → ${edge.group}`;
    const much = waited >= 0.2, share = much ? `waits ${Math.round(waited * 100)} %` : "";
    const rate = edge.rate ? `${short(edge.rate)}/s` : "";
    let path, tx = (x1 + x2) / 2, ty = (y1 + y2) / 2 - 5;
    if (lane !== null) { // around everything, back to the left
      path = `M${x1} ${y1 + 12}C${x1 + 40} ${y1 + 12} ${x1 + 40} ${lane} ${x1 - 10} ${lane}L${x2 + 10} ${lane}C${x2 - 40} ${lane} ${x2 - 40} ${y2 + 12} ${x2} ${y2 + 12}`;
      ty = lane - 4;
    } else path = `M${x1} ${y1}C${x1 + ACROSS / 2} ${y1} ${x2 - ACROSS / 2} ${y2} ${x2} ${y2}`;
    return [
      h("svg:path", { class: much ? "edge waited" : "edge", d: path, "marker-end": "url(#arrow)" }, h("svg:title", { text: `${name}${rate && `, ${rate}`}` })),
      h("svg:text", { class: "small", x: tx, y: ty, "text-anchor": "middle", text: lane === null ? rate : [rate, share].filter(Boolean).join(", ") }),
      lane === null && share ? h("svg:text", { class: "small", x: tx, y: ty + 18, "text-anchor": "middle", text: share }) : "",
    ];
  },

  box(node, place, kind, title, lines, extra) {
    const say = () => { this.chosen = node; this.tell(node); };
    const rect = h("svg:rect", { class: "node", x: place.x, y: place.y, width: WIDE, height: HIGH, rx: kind === "channel" ? 18 : 5 });
    const texts = lines.map((text, at) => h("svg:text", { class: "small", x: place.x + 12, y: place.y + 36 + at * 14, text: cut(text, 28) }));
    return h("svg:g", { class: kind + (extra.class || ""), tabindex: 0, role: "button", "data-node": node, "aria-label": [title, ...lines].join(", "), on: { click: say, keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); say(); } } } },
      rect, extra.fill || null, h("svg:text", { x: place.x + 12, y: place.y + 19, text: cut(title, 23) }), texts, h("svg:title", { text: [title, ...lines].join("\n") }));
  },

  group(node, one, place, told) {
    const count = one.workers.length, waiting = one.workers.filter((worker) => worker.waiting);
    const lines = [];
    if (count && told.when === "now") {
      const on = [...new Set(waiting.map((worker) => worker.waiting))].join(", ");
      const doing = [...new Set(one.workers.map((worker) => worker.doing).filter(Boolean))].join(", ");
      if (waiting.length) lines.push(`${waiting.length} of ${count} wait: ${on}`);
      if (doing) lines.push(doing);
    }
    if (one.busy !== null && one.busy !== undefined) lines.push(`busy ${Math.round(one.busy * 100)} %`);
    const limit = told.bottleneck && told.bottleneck.role === one.name.toLowerCase();
    if (limit) lines.unshift("⚠ bottleneck");
    return this.box(node, place, "group", count > 1 ? `${one.name} × ${count}` : one.name, lines.slice(0, 2), { class: limit ? " limit" : "" });
  },

  channel(node, one, place) {
    const depth = one.capacity ? `${one.depth} of ${one.capacity}` : one.largest !== undefined ? `depth ${short(one.depth)}, most ${one.largest}` : `depth ${one.depth}`;
    const share = one.capacity ? Math.min(1, one.depth / one.capacity) : one.largest ? one.depth / one.largest : 0;
    const fill = share > 0 ? h("svg:rect", { class: "fill", x: place.x + 12, y: place.y + HIGH - 7, width: Math.max(1, (WIDE - 24) * share), height: 4 }) : null;
    const full = one.capacity && one.depth >= one.capacity;
    return this.box(node, place, "channel", one.name, [full ? `${depth} (full)` : depth, one.rate === null || one.rate === undefined ? "" : `${short(one.rate)} items/s`].filter(Boolean).slice(0, 2), { fill, class: full ? " blocked" : "" });
  },

  // All that is known of a node, in words.
  tell(node) {
    const kind = node[0], name = node.slice(2), told = this.told, lines = [];
    if (kind === "g") {
      const one = told.groups.find((group) => group.name === name);
      for (const worker of one ? one.workers : []) {
        const state = worker.live === false ? "not running" : worker.waiting ? `waits for ${worker.waiting} since ${duration(worker.seconds)}` : worker.doing || "";
        lines.push([`${worker.name}: ${state}`, worker.host && `on ${worker.host}`, worker.devices && worker.devices.join(" "), worker.restarts ? `${worker.restarts} restarts` : ""].filter(Boolean).join(", "));
      }
    }
    for (const edge of told.edges.filter((one) => (kind === "g" ? one.group : one.channel) === name)) {
      const way = edge.way === "out" ? `${edge.group} → ${edge.channel}` : `${edge.channel} → ${edge.group}`;
      lines.push(edge.rate === undefined ? way : `${way}: ${short(edge.rate)} items/s, ${short(edge.bytes / 1e6)} MB/s`);
    }
    this.details.replaceChildren(h("h3", { text: name }), h("div", { text: lines.join("\n") || "nothing more is known" }));
  },

  // Who waited for whom over the last iterations.
  shares(told) {
    if (!told.shares || !told.shares.length) return null;
    const head = h("tr", {}, ...["who", "waits for", "share of its time, as far as it was idle", "who can end it"].map((text) => h("th", { scope: "col", text })));
    const rows = told.shares.slice(0, 30).map((one) => h("tr", {}, h("td", { text: one.group }), h("td", { text: `${one.operation} ${one.channel}` }), h("td", { class: "number", text: `${(one.share * 100).toFixed(1)} %` }), h("td", { text: one.unblockers.join(", ") })));
    const [first, last] = told.iterations;
    return h("section", {}, h("h2", { text: `Who waited for whom, iterations ${first} to ${last}` }), h("table", { class: "shares" }, h("thead", {}, head), h("tbody", {}, rows)));
  },

  waits(told, run) {
    if (told.when !== "now") return hint(`Depths and rates are means over the whole run (${run.name} has ended).`);
    if (!told.waits.length) return hint("Nobody waits just now.");
    const head = h("tr", {}, ...["who", "waits for", "since", "until one of these goes on"].map((text) => h("th", { scope: "col", text })));
    const rows = told.waits.slice(0, 40).map((one) => h("tr", {}, h("td", { text: one.party }), h("td", { text: `${one.operation} ${one.channel}` }), h("td", { class: "number", text: duration(one.seconds) }), h("td", { text: one.unblockers.join(", ") })));
    return h("table", { "aria-label": "who waits for whom" }, h("thead", {}, head), h("tbody", {}, rows));
  },
};

function cut(text, most) { return text.length > most ? `${text.slice(0, most - 1)}…` : text; }
