// Small things that all parts of the page use. Text is always set as text, never as HTML.

export const COLOURS = [ // Okabe and Ito, told apart by colour-blind people; never the only mark
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a7a00", "#7f7f7f",
];
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2]];

// Colour and dashes of the run with this number: forty runs before two look alike.
export const colourOf = (number) => COLOURS[number % COLOURS.length];
export const dashOf = (number) => DASHES[number % DASHES.length];

// An element: attributes by name, `text`, `on` listeners, then its children.
export function h(tag, attributes = {}, ...children) {
  const svg = tag.startsWith("svg:");
  const made = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "on") for (const [event, f] of Object.entries(value)) made.addEventListener(event, f);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return made;
}

// A piece of a line as the run's curves have it.
export function mark(id) {
  const line = h("svg:line", { x1: 1, y1: 6, x2: 25, y2: 6, stroke: colourOf(id), "stroke-width": 3, "stroke-dasharray": dashOf(id).join(" ") || null });
  return h("svg:svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, line);
}

// Ask the server; an error has the server's own words.
export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters))
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== undefined && one !== null && one !== "") query.append(name, one);
  const response = await fetch(`${path}?${query}`);
  if (!response.ok) {
    const text = await response.text();
    let said = text;
    try { said = JSON.parse(text).error || text; } catch { /* plain text */ }
    const error = new Error(said);
    error.status = response.status;
    throw error;
  }
  if (!response.headers.get("content-type").startsWith("application/json")) return response.arrayBuffer();
  const told = await response.json();
  if (told.error) throw new Error(told.error); // a file of the run that is damaged or gone
  return told;
}

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${(seconds / 3600).toFixed(1)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

// A number for an axis or a label, in few characters.
export function short(value) {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${short(Number((seconds * 1e6).toPrecision(3)))} µs`;
  if (size < 1) return `${short(Number((seconds * 1e3).toPrecision(3)))} ms`;
  if (size < 120) return `${short(Number(seconds.toPrecision(4)))} s`;
  return `${short(Number((seconds / 60).toPrecision(4)))} min`;
}

// A canvas as sharp as the screen, of the size that it has on the page; false where it has none.
export function fit(canvas) {
  const box = canvas.getBoundingClientRect();
  if (box.width < 2 || box.height < 2) return null;
  const ratio = window.devicePixelRatio || 1;
  const width = Math.round(box.width * ratio), height = Math.round(box.height * ratio);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, box.width, box.height);
  return { pen, width: box.width, height: box.height };
}

// The colours of the page, light or dark.
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { ink: of("--ink"), faint: of("--faint"), line: of("--line"), paper: of("--paper"), card: of("--card") };
}

// Call once for many changes, before the next picture.
export function soon(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; work(); });
  };
}

// A match for what is typed into a search field: all words, in any order, in any case.
export function matcher(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return (name) => { const low = name.toLowerCase(); return words.every((word) => low.includes(word)); };
}

export const problem = (text) => h("p", { class: "problem", role: "alert", text });
export const hint = (text) => h("p", { class: "hint", text });
