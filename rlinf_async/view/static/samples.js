// Samples and episodes: a list that is ordered, filtered and paged by the server, and the tokens of
// the chosen one, coloured by what is known of each.
import { ask, COLOURS, h, hint, problem, short } from "/static/dom.js";

const COUNT = 50, MOST_TOKENS = 20000;
const MODES = [["log-prob", "log_probs"], ["ratio", "prev_log_probs"], ["version", "versions"], ["mask", "mask"], ["none", null]];
const COLUMNS = [["name", "group"], ["iteration", "iteration"], ["tokens", "tokens"], ["reward", "reward"], ["outcome", null], ["prompt", null], ["completion", null]];

export const samples = {
  id: "samples", title: "Samples",
  keys: [["↑ ↓", "the next sample, the one before; in its tokens ← → go through them"], ["PgDn PgUp", "the next page, the page before"], ["c", "colour tokens by something else"]],

  make(panel, app) {
    this.app = app; this.key = null; this.chosen = app.place.sample || null; this.pages = [null]; this.told = null;
    const field = (name, element) => { element.value = app.place[name] || ""; element.addEventListener(element.type === "search" || element.type === "number" ? "input" : "change", () => { app.keep(name, element.value); this.pages = [null]; this.load(); }); return element; };
    this.search = field("samplename", h("input", { type: "search", placeholder: "group or group/index  ( / )", "aria-label": "name of a sample: its group, or group/index" }));
    this.iteration = field("sampleiteration", h("input", { type: "number", min: 0, "aria-label": "iteration", placeholder: "any" }));
    this.kind = field("samplekind", h("select", { "aria-label": "kind" }, ...[["", "training and evaluation"], ["training", "training"], ["evaluation", "evaluation"]].map(([value, text]) => h("option", { value, text }))));
    this.kind.value = app.place.samplekind || "";
    this.failed = h("input", { type: "checkbox", checked: app.place.failed === "1", on: { change: () => { app.keep("failed", this.failed.checked ? 1 : ""); this.pages = [null]; this.load(); } } });
    this.order = app.place.order || "written"; this.descending = app.place.ascending !== "1";
    this.back = h("button", { text: "‹ newer", on: { click: () => this.turn(-1) } });
    this.on = h("button", { text: "older ›", on: { click: () => this.turn(1) } });
    this.count = h("span", { class: "count", role: "status" });
    this.message = h("div");
    this.list = h("div", { class: "list" });
    this.detail = h("section", { class: "sample", "aria-label": "the chosen sample" });
    this.colour = app.place.colour || "log-prob";
    panel.classList.add("samples");
    panel.append(
      h("div", { class: "bar" }, this.search, h("label", {}, "iteration", this.iteration), this.kind, h("label", {}, this.failed, "failed or without success"), this.back, this.on, this.count),
      this.message, h("div", { class: "split" }, this.list, this.detail));
    panel.addEventListener("keydown", (event) => {
      if (event.target.matches("input, select")) return;
      const work = { PageDown: () => this.turn(1), PageUp: () => this.turn(-1), c: () => this.cycle() }[event.key];
      if (!work || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      work();
    });
  },

  update() {
    const run = this.app.run();
    if (!run) return this.say(hint("no runs"));
    if (this.id !== run.id) {
      if (this.id !== undefined) this.chosen = null;
      this.id = run.id; this.pages = [null]; this.key = null; this.detail.replaceChildren();
    }
    const key = `${run.id} ${run.stamps.samples}`;
    if (this.key === key) return;
    this.key = key;
    if (!run.stamps.samples) { this.list.replaceChildren(); this.detail.replaceChildren(); this.count.textContent = ""; return this.say(hint("This run has kept no samples (yet).")); }
    this.load();
  },

  say(what) { this.message.replaceChildren(...(what ? [what] : [])); },

  async load() {
    const asked = this.asked = Symbol("the newest question");
    const run = this.app.run();
    if (!run || !run.stamps.samples) return;
    try {
      const told = await ask("/api/samples", {
        run: run.id, order: this.order, descending: this.descending, kind: this.kind.value, iteration: this.iteration.value,
        name: this.search.value.trim(), failed: this.failed.checked || null, after: this.pages.at(-1), count: COUNT,
      });
      if (this.asked !== asked) return;
      this.say(null);
      this.told = told;
      this.draw();
      if (this.chosen && !this.detail.dataset.key) this.open(this.chosen);
    } catch (error) { if (this.asked === asked) this.say(problem(error.message)); }
  },

  turn(by) {
    if (by > 0 && this.told && this.told.first + this.told.rows.length < this.told.chosen) this.pages.push(this.told.rows.at(-1).key);
    else if (by < 0 && this.pages.length > 1) this.pages.pop();
    else return;
    this.load();
  },

  sort(order) {
    if (this.order === order) this.descending = !this.descending;
    else { this.order = order; this.descending = true; }
    this.app.keep("order", order); this.app.keep("ascending", this.descending ? "" : 1);
    this.pages = [null];
    this.load();
  },

  draw() {
    const { told } = this, last = told.first + told.rows.length;
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.count.textContent = told.chosen ? `${(told.first + 1).toLocaleString("en")} to ${last.toLocaleString("en")} of ${told.chosen.toLocaleString("en")}${told.chosen === told.all ? "" : ` (${told.all.toLocaleString("en")} in all)`}` : `none of ${told.all.toLocaleString("en")}`;
    this.back.disabled = this.pages.length < 2; this.on.disabled = last >= told.chosen;
    this.back.textContent = this.order === "written" && this.descending ? "‹ newer" : "‹ before";
    this.on.textContent = this.order === "written" && this.descending ? "older ›" : "next ›";
    const head = h("tr", {}, ...COLUMNS.map(([text, order]) => {
      if (!order) return h("th", { scope: "col", text });
      const sorted = this.order === order;
      return h("th", { scope: "col", "aria-sort": sorted ? (this.descending ? "descending" : "ascending") : "none" }, h("button", { text: `${text}${sorted ? (this.descending ? " ▼" : " ▲") : ""}`, title: `order by ${text}`, on: { click: () => this.sort(order) } }));
    }));
    const rows = told.rows.map((one, at) => h("tr", {
      tabindex: at === 0 || one.key === this.chosen ? 0 : -1, "data-key": one.key, "aria-selected": String(one.key === this.chosen),
      on: { click: () => this.choose(one.key), keydown: (event) => this.walk(event, one.key) },
    },
    h("td", { text: `${one.name}${one.kind === "evaluation" ? " (evaluation)" : ""}` }), h("td", { class: "number", text: one.iteration }), h("td", { class: "number", text: one.tokens }),
    h("td", { class: "number", text: one.reward === null ? "—" : String(one.reward) }),
    h("td", { text: one.success === null ? one.outcome : one.success ? "success" : "no success" }),
    h("td", { class: "preview", text: one.prompt }), h("td", { class: "preview", text: one.completion })));
    this.list.replaceChildren(h("table", { "aria-label": "samples" }, h("thead", {}, head), h("tbody", {}, rows)));
    if (focused) { const again = this.row(focused); if (again) again.focus(); }
  },

  row(key) { return [...this.list.querySelectorAll("tbody tr")].find((one) => one.dataset.key === key); },

  walk(event, key) {
    const row = this.row(key), to = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
    if (event.key === "Enter" || event.key === " ") this.choose(key);
    else if (to) { to.focus(); this.choose(to.dataset.key); }
    else if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
  },

  choose(key) {
    for (const one of this.list.querySelectorAll("tbody tr")) { const mine = one.dataset.key === key; one.setAttribute("aria-selected", String(mine)); one.tabIndex = mine ? 0 : -1; }
    this.app.keep("sample", key);
    this.open(key);
  },

  async open(key) {
    this.chosen = key; this.detail.dataset.key = key;
    try {
      const told = await ask("/api/sample", { run: this.id, key });
      if (this.chosen !== key) return;
      this.record = told.record;
      this.show();
    } catch (error) { if (this.chosen === key) this.detail.replaceChildren(problem(error.message)); }
  },

  cycle() {
    if (!this.record) return;
    const can = this.modes().map(([name]) => name);
    this.colour = can[(can.indexOf(this.colour) + 1) % can.length];
    this.app.keep("colour", this.colour);
    this.show();
    this.detail.querySelector(".tokens").focus();
  },

  modes() { return MODES.filter(([, field]) => field === null || Array.isArray(this.record[field])); },

  show() {
    const one = this.record, parts = [h("h2", { text: `${one.name}, ${one.kind}, iteration ${one.iteration}` }), this.facts(one)];
    if (one.detail) parts.push(h("pre", { text: one.detail }));
    if (Array.isArray(one.tokens)) {
      if (!this.modes().some(([name]) => name === this.colour)) this.colour = "none";
      parts.push(h("h3", { text: "prompt" }), h("pre", { text: one.prompt }), this.bar(), this.tokens(one), this.saying = h("div", { class: "details hint", role: "status", "aria-live": "polite", text: "a token under the pointer, or the arrow keys in the text, show its numbers here" }));
      if (one.reference) parts.push(h("h3", { text: "reference" }), h("pre", { text: one.reference }));
    }
    parts.push(this.rest(one));
    this.detail.replaceChildren(...parts);
  },

  // What an episode or a sample got, and what it did, in a line each.
  facts(one) {
    const lines = [`reward ${one.reward === null ? "none" : one.reward} (${one.outcome}${one.trained ? ", trained" : ""})`];
    const parts = Object.entries(one.reward_parts || {});
    if (parts.length) lines.push(`of it ${parts.map(([name, value]) => `${name} ${value}`).join(", ")}`);
    if (one.finish) lines.push(`${one.size} tokens, ended by ${one.finish}; rollout rank ${one.rollout_rank}`);
    const episode = one.episode;
    if (episode) {
      const calls = Object.entries(episode.tool_calls || {}), failures = Object.entries(episode.tool_failures || {});
      if (calls.length) lines.push(`tool calls: ${calls.map(([name, count]) => `${name} × ${count}`).join(", ")}`);
      if (failures.length) lines.push(`failed: ${failures.map(([name, count]) => `${name} × ${count}`).join(", ")}`);
      if (episode.cut) lines.push(`cut by the limit of ${episode.cut}`);
      const own = Object.entries(episode.metrics || {});
      if (own.length) lines.push(own.map(([name, value]) => `${name} ${value}`).join(", "));
    }
    return h("p", { class: "facts", text: lines.join("\n") });
  },

  bar() {
    const choice = h("select", { "aria-label": "colour of tokens", on: { change: () => { this.colour = choice.value; this.app.keep("colour", this.colour); this.show(); } } },
      ...this.modes().map(([name]) => h("option", { value: name, text: name, selected: name === this.colour })));
    return h("div", { class: "bar" }, h("label", {}, "tokens by", choice), this.legend());
  },

  // What the colours mean.
  legend() {
    const words = {
      "log-prob": [["likely", 0], ["log-prob −1", -1], ["−4 or less", -4]].map(([text, value]) => [text, logColour(value)]),
      ratio: [["ratio 0.8 or less", ratioColour(0.8)], ["1", ratioColour(1)], ["1.25 or more", ratioColour(1.25)]],
      version: this.versions().map((one) => [`version ${one}`, versionColour(one, this.versions())]),
      mask: [["trained", null], ["not trained (struck out)", "#b9c0c855"]], none: [],
    }[this.colour];
    return h("span", { class: "legend" }, ...words.map(([text, colour]) => { const one = h("span", { text }); paint(one, colour); return one; }));
  },

  versions() { return [...new Set(this.record.versions || [])].filter((one) => one >= 0).sort((a, b) => a - b); },

  tokens(one) {
    const texts = one.tokens_texts || [], heads = new Map(), versions = this.versions();
    for (const turn of (one.episode && one.episode.turns) || []) heads.set(turn.start, `${turn.role}${turn.branch ? `, branch ${turn.branch}` : ""}${turn.reward === null ? "" : `, reward ${turn.reward}`}`);
    const body = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "tokens of the response" });
    const pieces = document.createDocumentFragment();
    for (let at = 0; at < Math.min(one.tokens.length, MOST_TOKENS); at++) {
      if (heads.has(at)) pieces.append(h("div", { class: "turn", text: heads.get(at) }));
      const text = texts[at] || `⟨${one.tokens[at]}⟩`;
      const token = h("span", { class: "token", "data-at": at, text: text.trim() ? text : visible(text) });
      this.paint(token, one, at, versions);
      pieces.append(token);
    }
    if (one.tokens.length > MOST_TOKENS) pieces.append(hint(`… and ${one.tokens.length - MOST_TOKENS} more`));
    body.append(pieces);
    body.addEventListener("pointerover", (event) => { if (event.target.dataset.at) this.tell(Number(event.target.dataset.at)); });
    let now = -1;
    body.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault(); event.stopPropagation();
      const every = body.querySelectorAll(".token");
      if (every[now]) every[now].classList.remove("now");
      now = Math.min(every.length - 1, Math.max(0, now + by));
      if (!every[now]) return;
      every[now].classList.add("now"); every[now].scrollIntoView({ block: "nearest" });
      this.tell(now);
    });
    return body;
  },

  paint(token, one, at, versions) {
    if (this.colour === "mask") { if (!one.mask[at]) { token.classList.add("masked"); paint(token, "#b9c0c855"); } return; }
    if (one.mask && !one.mask[at] && one.versions && one.versions[at] < 0) { token.classList.add("given"); return; } // not drawn by the model
    if (this.colour === "log-prob") paint(token, logColour(one.log_probs[at]));
    if (this.colour === "ratio") paint(token, ratioColour(Math.exp(one.prev_log_probs[at] - one.log_probs[at])));
    if (this.colour === "version") paint(token, versionColour(one.versions[at], versions));
  },

  tell(at) {
    const one = this.record, parts = [`token ${at}: ${JSON.stringify((one.tokens_texts || [])[at] || "")} (id ${one.tokens[at]})`];
    const add = (name, value) => { if (value !== undefined && value !== null) parts.push(`${name} ${value}`); };
    add("log-prob", one.log_probs && one.log_probs[at]);
    if (one.prev_log_probs) { add("recomputed", one.prev_log_probs[at]); add("ratio", short(Math.exp(one.prev_log_probs[at] - one.log_probs[at]))); }
    add("reference", one.ref_log_probs && one.ref_log_probs[at]);
    add("teacher", one.teacher_log_probs && one.teacher_log_probs[at]);
    add("value", one.values && one.values[at]);
    add("version", one.versions && one.versions[at]);
    if (one.mask) parts.push(one.mask[at] ? "trained" : "not trained");
    this.saying.textContent = parts.join(", ");
  },

  // Everything else that is in the record, as it is.
  rest(one) {
    const shown = new Set(["prompt", "completion", "tokens", "tokens_texts", "prompt_tokens", "prompt_tokens_texts", "log_probs", "versions", "mask", "prev_log_probs", "ref_log_probs", "teacher_log_probs", "values", "detail", "reference"]);
    const rows = Object.entries(one).filter(([name]) => !shown.has(name) || !Array.isArray(one.tokens)).map(([name, value]) => h("tr", {}, h("td", { text: name }), h("td", { text: typeof value === "string" ? value : JSON.stringify(value) })));
    return h("details", { open: !Array.isArray(one.tokens) }, h("summary", { text: "all of the record" }), h("table", {}, h("tbody", {}, rows)));
  },
};

// Whitespace that would not be seen.
function visible(text) { return text.replace(/ /g, "␣").replace(/\n/g, "⏎\n").replace(/\t/g, "⇥"); }

function paint(element, colour) { if (colour) element.style.backgroundColor = colour; }
function mixed(colour, share) { return `${colour}${Math.round(Math.min(1, Math.max(0, share)) * 200).toString(16).padStart(2, "0")}`; }
function logColour(value) { return value === null || !(value < 0) ? null : mixed("#e69f00", -value / 4); }
function ratioColour(ratio) { const off = Math.log(ratio) / Math.log(1.25); return Number.isFinite(off) ? mixed(off > 0 ? "#d55e00" : "#0072b2", Math.abs(off)) : null; }
function versionColour(version, versions) { return version < 0 ? null : mixed(COLOURS[versions.indexOf(version) % COLOURS.length], 0.45); }
