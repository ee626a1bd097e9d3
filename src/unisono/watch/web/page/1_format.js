// Numbers, times and words as the page writes them.

const NO_VALUE = "–";

function count(number) {
  return number == null ? NO_VALUE : Math.round(number).toLocaleString("en-US");
}

// Three digits: 7.5, 6.15k, 385k, 1.25G.
function short(number) {
  if (number == null) return NO_VALUE;
  for (const [scale, letter] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(number) >= 0.9995 * scale) return `${digits(number / scale)}${letter}`;
  }
  return digits(number);
}

function digits(number) {
  if (number === 0) return "0";
  if (Math.abs(number) < 1e-3 || Math.abs(number) >= 1e4) return Number(number.toPrecision(3)).toExponential().replace("e+", "e");
  return String(Number(number.toPrecision(3)));
}

// A value of a loss or a metric, with four digits.
function value(number) {
  if (number == null) return NO_VALUE;
  if (number !== 0 && (Math.abs(number) < 1e-3 || Math.abs(number) >= 1e5)) return number.toExponential(3).replace("e+", "e");
  return String(Number(number.toPrecision(4)));
}

function bytes(number) {
  return number == null ? NO_VALUE : `${short(number).replace(/([kMGTP]?)$/, " $1")}B`;
}

function percent(share) {
  return share == null ? NO_VALUE : `${(100 * share).toFixed(0)} %`;
}

function seconds(time) {
  if (time == null) return NO_VALUE;
  if (time < 10) return `${Number(time.toFixed(time < 1 ? 2 : 1))} s`;
  const all = Math.round(time);
  const [days, hours, minutes] = [Math.floor(all / 86400), Math.floor(all / 3600) % 24, Math.floor(all / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${all % 60} s` : `${all} s`;
}

// The time since the start, as a clock shows it; with parts of a second where the axis has them.
function clock(time, step = 1) {
  const places = step >= 1 ? 0 : Math.ceil(-Math.log10(step) - 1e-9);
  const sign = time < 0 ? "-" : "";
  const all = Math.abs(Number(time.toFixed(places)));
  const hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
  const rest = (all % 60).toFixed(places).padStart(places ? 3 + places : 2, "0");
  return hours ? `${sign}${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${sign}${minutes}:${rest}`;
}

function date(time) {
  const d = new Date(1000 * time), two = (n) => String(n).padStart(2, "0");
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${two(d.getHours())}:${two(d.getMinutes())}`;
}

// The states of a job and of a task: a sign, beside the word and the colour.
const SIGNS = { starts: "◌", compiles: "◌", runs: "▶", restarts: "↻", ended: "✓", failed: "✕", stopped: "‖", serves: "▶", no: "?" };
const COLOURS = { starts: "waits", compiles: "waits", restarts: "waits", stopped: "waits", stalled: "waits", serves: "runs", no: "waits" };

function stateOf(word) {
  const first = /^[a-z]+/.exec(word || "")?.[0] || "";
  const bad = first === "ended" && /\([1-9]/.test(word);
  return { sign: bad ? SIGNS.failed : SIGNS[first] || "·", kind: bad ? "failed" : COLOURS[first] || first };
}

// What a terminal would show of a log: no colours, and of a line that was rewritten the last text.
function printed(text) {
  // eslint-disable-next-line no-control-regex
  const plain = text.replace(/\x1b\][^\x07\x1b]*(\x07|\x1b\\)|\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]/g, "");
  return plain.split("\n").map((line) => {
    let shown = line.replace(/\r+$/, "").split("\r").pop();
    for (let before; before !== shown;) [before, shown] = [shown, shown.replace(/[^\x08]\x08/g, "")];
    return shown.replace(/[\x00-\x08\x0b-\x1f\x7f]/g, "");
  }).join("\n");
}

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, text] of Object.entries(attributes)) if (text != null) node.setAttribute(name, text);
  node.append(...children);
  return node;
}

// A text is written only where it differs: the browser lays out nothing anew otherwise.
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
