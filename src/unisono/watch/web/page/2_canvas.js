// What the curves and the timeline have in common: a canvas of the size of its box, ticks, and a tip.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const colours = {
  cache: {},
  get(name) {
    this.cache[name] ||= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    return this.cache[name];
  },
};

// Drawings that are due are drawn together, before the next frame; `drawn` counts them, for measurements.
const due = new Set();
const drawn = { frames: 0, drawings: 0, milliseconds: 0, longest: 0, updates: 0, updating: 0, longestUpdate: 0 };

function redraw(drawing) {
  if (!due.size) requestAnimationFrame(drawAll);
  due.add(drawing);
}

function drawAll() {
  const began = performance.now();
  const now = [...due];
  due.clear();
  for (const drawing of now) drawing.draw();
  const took = performance.now() - began;
  drawn.frames += 1;
  drawn.drawings += now.length;
  drawn.milliseconds += took;
  drawn.longest = Math.max(drawn.longest, took);
}

// Round numbers that divide a range into so many parts at most.
function ticks(low, high, most, units = null) {
  const span = high - low;
  if (!(span > 0)) return { step: 1, at: [low] };
  let step = 10 ** Math.floor(Math.log10(span / most));
  if (units && span / most >= 1) step = units.find((unit) => unit * most >= span) || 86400 * Math.ceil(span / most / 86400);
  else step *= [1, 2, 5, 10].find((factor) => step * factor * most >= span) || 10;
  const at = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) at.push(i * step);
  return { step, at };
}

class Drawing {
  constructor(parent, height, label) {
    this.canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": label });
    this.context = this.canvas.getContext("2d");
    this.width = 0;
    parent.append(this.canvas);
    this.setHeight(height);
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width !== this.width) { this.width = width; redraw(this); }
    }).observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("blur", () => this.leave());
    this.canvas.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.leave();
      else if (this.key(event.key)) event.preventDefault();
    });
  }

  setHeight(height) {
    if (height === this.height) return;
    this.height = height;
    this.canvas.style.height = `${height}px`;
    redraw(this);
  }

  setLabel(label) {
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
  }

  // Return the context of an empty canvas, None where it is not shown.
  cleared() {
    const ratio = window.devicePixelRatio || 1, { canvas, context } = this;
    if (!this.width) this.width = Math.floor(canvas.clientWidth);
    if (!this.width) return null;
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = `11px ${FONT}`;
    context.textBaseline = "middle";
    return context;
  }

  // Show a text beside a point of the canvas.
  tip(text, x, y) {
    const tip = document.getElementById("tip"), box = this.canvas.getBoundingClientRect();
    write(tip, text);
    tip.hidden = false;
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    const left = box.left + x + 14 + width > window.innerWidth - 8 ? box.left + x - 14 - width : box.left + x + 14;
    const top = Math.min(box.top + y + 14, window.innerHeight - height - 8);
    tip.style.left = `${Math.max(8, Math.min(left, window.innerWidth - width - 8))}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  }

  leave() {
    document.getElementById("tip").hidden = true;
    redraw(this);
  }

  key() { return false; }
}

// A triangle that marks a failure, and a circle that marks a recovery.
function mark(context, x, y, fault) {
  context.fillStyle = colours.get(isFailure(fault) ? "bad" : "good");
  context.beginPath();
  if (!isFailure(fault)) context.arc(x, y, 3.5, 0, 2 * Math.PI);
  else { context.moveTo(x - 5, y - 4); context.lineTo(x + 5, y - 4); context.lineTo(x, y + 4.5); }
  context.fill();
}

function isFailure(fault) {
  return fault.kind !== "recovery" && fault.kind !== "restart";
}
