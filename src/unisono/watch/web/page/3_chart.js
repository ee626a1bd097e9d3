// A curve, or a few, over the steps.

const DASHES = [[], [5, 3], [2, 2.5], [8, 2, 2, 2]];
const SCALE_UNITS = { bytes, short, value };
// On the axis, where numbers are round.
const AXIS_UNITS = { bytes, short, value: digits };

class Chart extends Drawing {
  constructor(parent, title, unit, fromZero) {
    const figure = make("figure"), caption = make("figcaption", {}, make("b", {}, title));
    figure.append(caption);
    parent.append(figure);
    super(figure, 168, title);
    Object.assign(this, { figure, caption, title, unit, fromZero, series: [], faults: [], cursor: null, isLog: false });
  }

  // Take over `[{name, points}]` and the faults that have a step.
  update(series, faults, isLog) {
    this.series = series;
    // A restart lies between a failure and its recovery; failures are drawn last, above the others.
    this.faults = faults.filter((fault) => fault.step != null && fault.kind !== "restart");
    this.faults.sort((a, b) => isFailure(a) - isFailure(b));
    this.isLog = isLog && series.every((s) => s.points.every((p) => p[1] == null || p[1] > 0));
    const names = series.map((s) => s.name).join();
    if (names !== this.names) {
      this.names = names;
      while (this.caption.childNodes.length > 1) this.caption.lastChild.remove();
      this.values = series.map((s, i) => {
        const last = make("b");
        const label = series.length > 1 ? `${s.label} ` : "now ";
        this.caption.append(make("span", { class: "series" }, sample(i), label, last));
        return last;
      });
    }
    const form = SCALE_UNITS[this.unit];
    const said = series.map((s, i) => {
      const known = s.points.filter((p) => p[1] != null), last = s.points[s.points.length - 1];
      const text = last && last[1] == null ? "not finite" : form(known.length ? last[1] : null) + (s.suffix || "");
      write(this.values[i], text);
      if (!known.length) return `${s.name}: no values`;
      let [low, high] = [Infinity, -Infinity];
      for (const [, v] of known) { low = Math.min(low, v); high = Math.max(high, v); }
      return `${s.name}: now ${text} at step ${count(last[0])}, between ${form(low)} and ${form(high)}`;
    });
    this.setLabel(`Chart of ${this.title} over the steps. ${said.join(". ")}.`);
    redraw(this);
  }

  draw() {
    const c = this.cleared();
    if (!c) return;
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { points } of this.series) {
      for (const [step, v] of points) {
        left = Math.min(left, step); right = Math.max(right, step);
        if (v != null) { low = Math.min(low, v); high = Math.max(high, v); }
      }
    }
    c.fillStyle = colours.get("soft");
    if (!Number.isFinite(low)) {
      c.fillText("no values yet", 0, this.height / 2);
      this.place = null;
      return;
    }
    if (this.fromZero) low = Math.min(0, low);
    if (high === low) { high += Math.abs(high) * 0.1 || 1; if (!this.fromZero) low -= Math.abs(low) * 0.1 || 1; }
    if (right === left) right = left + 1;
    const scale = this.isLog ? Math.log10 : (v) => v;
    let [from, to] = [scale(low), scale(high)];
    const spare = 0.06 * (to - from);
    to += spare;
    if (!this.fromZero) from -= spare;
    const rows = this.isLog ? logTicks(from, to) : ticks(from, to, 5).at.map((at) => [at, at]);
    const labels = rows.map(([, v]) => AXIS_UNITS[this.unit](v));
    const [top, bottom] = [14, this.height - 20];
    const start = Math.ceil(Math.max(...labels.map((text) => c.measureText(text).width))) + 8, end = this.width - 6;
    const x = (step) => start + ((end - start) * (step - left)) / (right - left);
    const y = (v) => bottom - ((bottom - top) * (scale(v) - from)) / (to - from);
    this.place = { x, y, left, right, start, end, top, bottom };
    c.lineWidth = 1;
    rows.forEach(([at], i) => {
      const line = Math.round(bottom - ((bottom - top) * (at - from)) / (to - from)) + 0.5;
      c.strokeStyle = colours.get("grid");
      c.beginPath(); c.moveTo(start, line); c.lineTo(end, line); c.stroke();
      c.textAlign = "right";
      c.fillText(labels[i], start - 6, line);
    });
    c.textAlign = "center";
    for (const step of ticks(left, right, Math.max(2, Math.floor((end - start) / 50))).at) {
      if (!Number.isInteger(step)) continue;
      const text = short(step), half = c.measureText(text).width / 2;
      c.fillText(text, Math.min(Math.max(x(step), half), this.width - half), bottom + 11);
    }
    for (const fault of this.faults) {
      if (fault.step < left || fault.step > right) continue;
      const at = Math.round(x(fault.step)) + 0.5;
      c.strokeStyle = colours.get(isFailure(fault) ? "bad" : "good");
      c.setLineDash([2, 3]);
      c.beginPath(); c.moveTo(at, top); c.lineTo(at, bottom); c.stroke();
      c.setLineDash([]);
      mark(c, at, top - 7, fault);
    }
    c.save();
    c.beginPath(); c.rect(start - 2, top - 4, end - start + 4, bottom - top + 8); c.clip();
    this.series.forEach((s, i) => this.line(c, s.points, i));
    c.restore();
    if (this.cursor != null) this.showCursor(c);
  }

  line(c, points, i) {
    const { x, y } = this.place;
    c.strokeStyle = c.fillStyle = colours.get(`line-${(i % 4) + 1}`);
    c.lineWidth = 1.6;
    c.lineJoin = "round";
    c.setLineDash(DASHES[i % 4]);
    c.beginPath();
    let isDown = false, before = -Infinity;
    for (const [step, v] of points) {
      // A run that was restarted begins at an earlier step: no line leads back to it.
      if (v == null) isDown = false;
      else if (isDown && step >= before) c.lineTo(x(step), y(v));
      else { c.moveTo(x(step), y(v)); isDown = true; }
      before = step;
    }
    c.stroke();
    c.setLineDash([]);
    for (const [step, v] of points.length <= 12 ? points : points.slice(-1)) {
      if (v == null) continue;
      c.beginPath(); c.arc(x(step), y(v), 2.4, 0, 2 * Math.PI); c.fill();
    }
  }

  showCursor(c) {
    const { x, y, top, bottom } = this.place, step = this.cursor;
    c.strokeStyle = colours.get("soft");
    c.lineWidth = 1;
    c.beginPath(); c.moveTo(x(step), top); c.lineTo(x(step), bottom); c.stroke();
    const lines = [`step ${count(step)}`];
    this.series.forEach((s, i) => {
      const near = nearest(s.points, step);
      if (!near) return;
      lines.push(`${s.name} ${SCALE_UNITS[this.unit](near[1])}${s.suffix || ""}`);
      if (near[1] == null) return;
      c.fillStyle = colours.get(`line-${(i % 4) + 1}`);
      c.beginPath(); c.arc(x(near[0]), y(near[1]), 3.5, 0, 2 * Math.PI); c.fill();
    });
    const fault = this.faults.find((f) => Math.abs(x(f.step) - x(step)) < 4);
    if (fault) lines.push(`${fault.kind}: ${fault.task || "all tasks"} ${fault.text}`);
    this.tip(lines.join("\n"), x(step), top + 10);
  }

  point(px) {
    if (!this.place) return;
    const { left, right, start, end } = this.place;
    const step = left + ((right - left) * (px - start)) / (end - start);
    const near = nearest(this.longest(), Math.min(right, Math.max(left, step)));
    this.cursor = near ? near[0] : null;
    redraw(this);
  }

  longest() {
    return this.series.reduce((a, s) => (s.points.length > a.length ? s.points : a), []);
  }

  key(name) {
    const points = this.longest(), moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 };
    if (!(name in moves) || !points.length) return false;
    const at = this.cursor == null ? points.length - 1 : points.findIndex((p) => p[0] >= this.cursor);
    const moved = this.cursor == null && name === "ArrowLeft" ? at : at + moves[name];
    this.cursor = points[Math.max(0, Math.min(points.length - 1, moved))][0];
    redraw(this);
    return true;
  }

  leave() {
    this.cursor = null;
    super.leave();
  }
}

function nearest(points, step) {
  let best = null;
  for (const point of points) if (!best || Math.abs(point[0] - step) <= Math.abs(best[0] - step)) best = point;
  return best;
}

function logTicks(from, to) {
  const found = [];
  for (let power = Math.floor(from); power <= Math.ceil(to); power += 1) {
    for (const factor of to - from > 2.5 ? [1] : to - from > 1 ? [1, 3] : [1, 2, 3, 5, 7]) {
      const at = power + Math.log10(factor);
      if (at >= from && at <= to) found.push([at, factor * 10 ** power]);
    }
  }
  return found.length ? found : [[from, 10 ** from], [to, 10 ** to]];
}

// A short piece of a curve, for the legend: the same colour and dashes.
function sample(i) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", "18"); svg.setAttribute("height", "8"); svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, at] of Object.entries({ x1: 0, x2: 18, y1: 4, y2: 4, "stroke-width": 2, stroke: `var(--line-${(i % 4) + 1})` })) line.setAttribute(name, at);
  line.setAttribute("stroke-dasharray", DASHES[i % 4].join(" "));
  svg.append(line);
  return svg;
}

// The charts of a job: loss first, other metrics, each with its validation; then speed and memory.
const SPEEDS = { rows_per_s: "rows a second", tokens_per_s: "tokens a second", steps_per_s: "steps a second" };
const MEMORY = { host_bytes: "host", device_bytes: "device" };

function groupsOf(curves) {
  const groups = new Map();
  const add = (key, title, unit, fromZero, series) => {
    if (!groups.has(key)) groups.set(key, { key, title, unit, fromZero, series: [] });
    groups.get(key).series.push(series);
  };
  const names = Object.keys(curves);
  const metrics = names.filter((name) => !(name in SPEEDS) && !(name in MEMORY));
  const base = (name) => name.replace(/^val_/, "");
  metrics.sort((a, b) => (base(b) === "loss") - (base(a) === "loss"));
  for (const name of metrics) {
    const label = name === base(name) ? "train" : "val";
    add(`metric ${base(name)}`, base(name), "value", false, { name, label, points: curves[name] });
  }
  for (const group of groups.values()) group.series.sort((a, b) => (a.label > b.label) - (a.label < b.label));
  for (const name of Object.keys(SPEEDS)) {
    if (name in curves) add(name, SPEEDS[name], "short", true, { name: SPEEDS[name], label: "", points: curves[name] });
  }
  for (const name of Object.keys(MEMORY)) {
    if (name in curves) add("memory", "memory", "bytes", true, { name: `${MEMORY[name]} memory`, label: MEMORY[name], points: curves[name] });
  }
  // What `StepTimer` adds to the logs explains a speed; it follows.
  const isTimer = (group) => group.key.startsWith("metric ") && /_ms$|_per_s$|^metric mfu$/.test(group.key);
  return [...groups.values()].sort((a, b) => isTimer(a) - isTimer(b));
}

const charts = new Map();

// As many columns as there is room for, and the last row as full as the others.
function arrange() {
  const box = document.getElementById("charts"), most = Math.max(1, Math.floor((box.clientWidth + 12) / 292));
  const rows = Math.ceil(charts.size / most);
  box.style.gridTemplateColumns = `repeat(${Math.ceil(charts.size / (rows || 1)) || 1}, minmax(0, 1fr))`;
}


function showCurves(job, isLog) {
  const groups = groupsOf(job.curves), keys = groups.map((group) => group.key).join("\n"), box = document.getElementById("charts");
  document.getElementById("curves-section").hidden = !groups.length;
  if (keys !== showCurves.keys) {
    showCurves.keys = keys;
    charts.clear();
    box.replaceChildren();
    for (const { key, title, unit, fromZero } of groups) charts.set(key, new Chart(box, title, unit, fromZero));
    arrange();
  }
  for (const { key, series } of groups) charts.get(key).update(series, job.faults, isLog && /loss/.test(key));
}
