// Videos of evaluations; and the configuration, with what differs between the runs that are shown.
import { ask, h, hint, mark, matcher, problem } from "/static/dom.js";

export const videos = {
  id: "videos", title: "Videos",

  make(panel, app) { this.app = app; this.panel = panel; this.key = null; this.list = h("div", { class: "films" }); panel.append(this.list); },

  leave() { for (const one of this.list.querySelectorAll("video")) one.pause(); },

  async update() {
    const runs = this.app.visibleRuns(), key = runs.map((run) => `${run.id} ${run.stamps.video}`).join();
    if (this.key === key) return;
    this.key = key;
    const parts = await Promise.all(runs.map((run) => this.ofRun(run)));
    if (this.key !== key) return;
    const found = parts.flat();
    this.list.replaceChildren(...(found.length ? found : [hint("None of the runs that are shown has a video: a run in an environment that renders leaves one of its evaluation (video.mp4) when it ends.")]));
  },

  async ofRun(run) {
    try {
      const told = await ask("/api/videos", { run: run.id });
      return told.videos.map((name) => {
        const title = h("h3", {}, `${run.name}: ${name}`);
        const video = h("video", { controls: true, preload: "metadata", src: `/video/${run.id}/${encodeURIComponent(name)}?${run.stamps.video || ""}`, "aria-label": `${name} of ${run.name}` });
        video.addEventListener("error", () => video.replaceWith(problem(`${name} of ${run.name} cannot be played: it is damaged, or this browser does not know its format`)));
        return h("article", {}, title, video);
      });
    } catch (error) { return [problem(`${run.name}: ${error.message}`)]; }
  },
};

export const settings = {
  id: "settings", title: "Configuration",

  make(panel, app) {
    this.app = app; this.key = null; this.told = new Map();
    this.search = h("input", { type: "search", placeholder: "search settings  ( / )", "aria-label": "search settings", value: app.place.setting || "", on: { input: () => { app.keep("setting", this.search.value); this.draw(); } } });
    this.only = h("input", { type: "checkbox", checked: app.place.differing === "1", on: { change: () => { app.keep("differing", this.only.checked ? 1 : ""); this.draw(); } } });
    this.count = h("span", { class: "count", role: "status" });
    this.body = h("div");
    panel.append(h("div", { class: "bar" }, this.search, h("label", {}, this.only, "only what differs"), this.count), this.body);
  },

  async update() {
    const runs = this.app.visibleRuns(), key = runs.map((run) => `${run.id} ${run.stamps.config}`).join();
    if (this.key === key) return;
    this.key = key;
    await Promise.all(runs.map(async (run) => {
      try { this.told.set(run.id, await ask("/api/settings", { run: run.id })); }
      catch (error) { this.told.set(run.id, { error: error.message, values: {}, earlier: [] }); }
    }));
    if (this.key === key) this.draw();
  },

  draw() {
    const runs = this.app.visibleRuns().filter((run) => this.told.has(run.id)), match = matcher(this.search.value);
    const sound = runs.filter((run) => !this.told.get(run.id).error);
    const of = (run, name) => this.told.get(run.id).values[name];
    const names = [...new Set(sound.flatMap((run) => Object.keys(this.told.get(run.id).values)))].sort();
    const differing = new Set(names.filter((name) => sound.some((run) => of(run, name) !== of(sound[0], name))));
    const wanted = names.filter((name) => (!this.only.checked || differing.has(name)) && (match(name) || sound.some((run) => match(of(run, name) || ""))));
    this.count.textContent = sound.length > 1 ? `${differing.size} of ${names.length} settings differ` : `${names.length} settings`;
    const head = h("tr", {}, h("th", { scope: "col", text: "setting" }), ...sound.map((run) => h("th", { scope: "col" }, mark(run.id), ` ${run.name}`)));
    const rows = wanted.map((name) => h("tr", { class: differing.has(name) && "differs" }, h("td", { text: name }), ...sound.map((run) => h("td", { text: of(run, name) ?? "—" }))));
    this.body.replaceChildren(
      ...runs.filter((run) => this.told.get(run.id).error).map((run) => problem(`${run.name}: ${this.told.get(run.id).error}`)),
      h("table", {}, h("thead", {}, head), h("tbody", {}, rows)),
      ...sound.flatMap((run) => this.earlier(run)),
      ...sound.map((run) => h("details", {}, h("summary", { text: `config.toml of ${run.name}` }), h("pre", { text: this.told.get(run.id).text }))),
    );
  },

  // What a start of the run before had otherwise.
  earlier(run) {
    const { values, earlier } = this.told.get(run.id);
    return earlier.map((one) => {
      if (one.error) return problem(`${run.name}: ${one.error}`);
      const names = [...new Set([...Object.keys(values), ...Object.keys(one.values)])].sort().filter((name) => values[name] !== one.values[name]);
      const rows = names.map((name) => h("tr", {}, h("td", { text: name }), h("td", { text: one.values[name] ?? "—" }), h("td", { text: values[name] ?? "—" })));
      const head = h("tr", {}, h("th", { text: "setting" }), h("th", { text: one.name }), h("th", { text: "now" }));
      return h("details", { open: true }, h("summary", { text: `${run.name} was resumed with another configuration: ${one.name}` }), h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
    });
  },
};
