// The page by which a person acts: keys, buttons and a gamepad become an action, as long as they are held.

const PAIRS = [
  ["ArrowLeft", "ArrowRight"], ["ArrowDown", "ArrowUp"], ["a", "d"], ["s", "w"],
  ["f", "h"], ["g", "t"], ["j", "l"], ["k", "i"],
];
const DEAD_ZONE = 0.15;
const EVERY = 100; // milliseconds between two words to the server

const held = new Set();
const one = (id) => document.getElementById(id);
let seen = null;
let drawn = "";

function keyed(number) {
  const [less, more] = PAIRS[number] || [];
  const strength = Number(one("strength").value);
  return strength * ((held.has(more) ? 1 : 0) - (held.has(less) ? 1 : 0));
}

function gamepad() {
  return [...(navigator.getGamepads?.() || [])].find((pad) => pad && pad.connected) || null;
}

// What the hands do now; null: they are off.
function action() {
  if (!seen) return null;
  const pad = gamepad();
  if (seen.choices) {
    for (const key of held) if (key.startsWith("choice-")) return Number(key.slice(7));
    const pressed = pad ? pad.buttons.findIndex((button) => button.pressed) : -1;
    return pressed >= 0 && pressed < seen.choices ? pressed : null;
  }
  const made = Array.from({ length: seen.numbers }, (_, number) => keyed(number));
  let acts = held.has(" ") || PAIRS.slice(0, seen.numbers).flat().some((key) => held.has(key));
  if (pad) {
    acts ||= pad.buttons[0]?.pressed || false;
    pad.axes.slice(0, seen.numbers).forEach((axis, number) => {
      if (Math.abs(axis) < DEAD_ZONE) return;
      acts = true;
      made[number] = Math.max(-1, Math.min(1, number % 2 ? -axis : axis)); // up is more
    });
  }
  return acts ? made : null;
}

async function post() {
  const answer = await fetch("/api/hands", { method: "POST", body: JSON.stringify({ action: action() }) });
  if (!answer.ok) throw new Error(await answer.text());
}

let saying = null;
let again = false;

// Tell the server what the hands do: one word after the other, so that none overtakes a later one.
async function say() {
  again = true;
  saying ||= (async () => {
    try {
      while (again) {
        again = false;
        await post();
      }
    } finally {
      saying = null;
    }
  })();
  await saying;
}

// Enter and Backspace end the episode, once, with the next step: as a success, or a failure.
const VERDICTS = { Enter: true, Backspace: false };

async function judge(success) {
  if (!seen?.judges || !seen.asked) return;
  const answer = await fetch("/api/verdict", { method: "POST", body: JSON.stringify({ success }) });
  if (!answer.ok) throw new Error(await answer.text());
}

function verdict(success, text) {
  const made = document.createElement("button");
  made.textContent = text;
  made.dataset.verdict = success;
  made.addEventListener("click", () => {
    made.blur(); // space would press it again
    judge(success).catch(tell);
  });
  return made;
}

function button(key, text) {
  const made = document.createElement("button");
  made.textContent = text;
  made.dataset.key = key;
  made.addEventListener("pointerdown", () => press(key, true));
  for (const end of ["pointerup", "pointerleave", "pointercancel"]) made.addEventListener(end, () => press(key, false));
  return made;
}

function press(key, down) {
  if (down === held.has(key)) return;
  if (down) held.add(key); else held.delete(key);
  say().catch(tell);
}

function named(key) {
  if (seen?.choices && /^[0-9]$/.test(key) && Number(key) < seen.choices) return `choice-${key}`;
  return key.length === 1 ? key.toLowerCase() : key;
}

function drawButtons() {
  const form = `${seen.numbers}/${seen.choices}/${seen.judges}`;
  if (form === drawn) return;
  drawn = form;
  const made = [];
  for (let choice = 0; choice < seen.choices; choice += 1) made.push(button(`choice-${choice}`, `choice ${choice}`));
  PAIRS.slice(0, seen.numbers).forEach(([less, more], number) => {
    made.push(button(less, `${number} - (${less})`), button(more, `${number} + (${more})`));
  });
  if (seen.numbers) made.push(button(" ", "stand still (space)"));
  if (seen.judges) made.push(verdict(true, "success (Enter)"), verdict(false, "failure (Backspace)"));
  one("buttons").replaceChildren(...made);
}

async function drawImages() {
  const names = Object.keys(seen.images);
  for (const name of names) {
    const [height, width, channels = 1] = seen.images[name];
    let canvas = document.getElementById(`image-${name}`);
    if (!canvas) {
      canvas = document.createElement("canvas");
      canvas.id = `image-${name}`;
      canvas.title = name;
      one("images").append(canvas);
    }
    const answer = await fetch(`/api/image?name=${encodeURIComponent(name)}`);
    if (!answer.ok) continue;
    const bytes = new Uint8Array(await answer.arrayBuffer());
    if (bytes.length !== height * width * channels) continue;
    canvas.width = width;
    canvas.height = height;
    const pixels = new ImageData(width, height);
    for (let at = 0; at < width * height; at += 1) {
      for (let color = 0; color < 3; color += 1) pixels.data[4 * at + color] = bytes[at * channels + Math.min(color, channels - 1)];
      pixels.data[4 * at + 3] = 255;
    }
    canvas.getContext("2d").putImageData(pixels, 0, 0);
  }
}

const short = (value) => (Array.isArray(value) ? value.map(short).join("  ") : Number(value).toFixed(3));

async function look() {
  const answer = await fetch("/api/seen");
  if (!answer.ok) throw new Error(await answer.text());
  seen = await answer.json();
  one("who").textContent = seen.acts ? "you act" : seen.asked ? "the policy acts" : "the policy has not begun";
  one("pad").textContent = gamepad()?.id || "no gamepad";
  one("proposed").textContent = seen.proposed === null ? "" : seen.choices ? `choice ${seen.proposed}` : short(seen.proposed);
  one("shown").replaceChildren(...Object.entries(seen.shown).flatMap(([name, numbers]) => {
    const term = document.createElement("dt");
    const value = document.createElement("dd");
    term.textContent = name;
    value.textContent = short(numbers);
    return [term, value];
  }));
  drawButtons();
  await drawImages();
}

function tell(error) {
  one("banner").hidden = false;
  one("banner").textContent = `${error.message}. Is the run over? A run that was restarted has another address.`;
}

async function go() {
  try {
    await look();
    one("banner").hidden = true;
  } catch (error) {
    tell(error);
  }
  document.body.dataset.ready = "true";
  setTimeout(go, EVERY);
}

// Hands that are down are said to be so, again and again, however long pictures take to come.
async function hold() {
  try {
    if (action() !== null || seen?.acts) await say();
  } catch (error) {
    tell(error);
  }
  setTimeout(hold, EVERY);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input")) return;
  if (event.key in VERDICTS) {
    event.preventDefault(); // Enter would press the button that has the focus, too
    if (!event.repeat) judge(VERDICTS[event.key]).catch(tell);
    return;
  }
  const key = named(event.key);
  if (key === " " || key.startsWith("Arrow")) event.preventDefault();
  press(key, true);
});
addEventListener("keyup", (event) => press(named(event.key), false));
addEventListener("blur", () => { held.clear(); say().catch(tell); }); // keys are released elsewhere
go();
hold();
