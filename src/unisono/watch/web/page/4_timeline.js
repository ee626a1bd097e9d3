// The timeline: a row for the launcher and one for each task, bars by kind, failures across all rows.

// In the order in which they are drawn; texture: a second sign beside the colour.
const KINDS = {
  process: { text: "process", inset: 0 },
  start: { text: "start-up", inset: 0.18, texture: "/" },
  steps: { text: "steps", inset: 0.18 },
  compile: { text: "compile", inset: 0.18, texture: "x" },
  save: { text: "save", inset: 0.18, texture: "|" },
  restore: { text: "restore", inset: 0.18, texture: "." },
  detection: { text: "detection", inset: 0, texture: "x" },
  recovery: { text: "recovery", inset: 0, texture: "/" },
};
const SHARES = { data: "of steps: waits for data", exchange: "of steps: exchange" };
const TIME_UNITS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
const [BEGIN, END, GENERATION, TEXT, DATA, EXCHANGE] = [0, 1, 2, 3, 4, 5];

const textures = {
  cache: {},
  get(context, texture) {
    const key = `${texture} ${document.documentElement.dataset.theme}`;
    return (this.cache[key] ||= context.createPattern(this.tile(texture), "repeat"));
  },
  tile(texture) {
    const tile = make("canvas", { width: "6", height: "6" }), c = tile.getContext("2d");
    c.strokeStyle = c.fillStyle = colours.get("card");
    c.globalAlpha = 0.5;
    c.lineWidth = 1.2;
    const lines = { "/": [[-1, 7, 7, -1], [-4, 4, 4, -4], [2, 10, 10, 2]], x: [[0, 6, 6, 0], [0, 0, 6, 6]], "|": [[1.5, 0, 1.5, 6]] };
    for (const [x0, y0, x1, y1] of lines[texture] || []) { c.beginPath(); c.moveTo(x0, y0); c.lineTo(x1, y1); c.stroke(); }
    if (texture === ".") { c.beginPath(); c.arc(2, 2, 1, 0, 7); c.arc(5, 5, 1, 0, 7); c.fill(); }
    return tile;
  },
};

class Timeline extends Drawing {
  constructor(parent) {
    super(parent, 120, "Timeline");
    this.rows = [];
    this.faults = [];
    this.total = 1;
    this.view = null;      // The seconds that are shown; null: all of them.
    this.drag = null;
    this.chosen = null;    // The row and the number of the bar that the keys have reached.
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || !this.place) return;
      this.drag = { from: event.offsetX, to: event.offsetX };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", () => this.magnify());
    this.canvas.addEventListener("dblclick", () => this.show(null));
    this.all = document.getElementById("timeline-all");
    this.all.addEventListener("click", () => this.show(null));
  }

  update(job) {
    const { timeline } = job;
    // A row has the bars of each kind, in the order of KINDS: later kinds lie above.
    const order = Object.keys(KINDS);
    this.rows = Object.entries(timeline).map(([row, kinds]) => ({ row, kinds: order.filter((kind) => kinds[kind]).map((kind) => [kind, kinds[kind]]) }));
    this.rows = this.rows.filter(({ row, kinds }) => row !== "launcher" || kinds.length);
    this.faults = job.faults.map((fault) => ({ ...fault, at: fault.time - job.started })).sort((a, b) => isFailure(a) - isFailure(b));
    this.total = Math.max(job.now - job.started, 0.1);
    const all = this.rows.flatMap(({ kinds }) => kinds);
    for (const [, bars] of all) this.total = Math.max(this.total, bars.at(-1)?.[END] || 0);
    this.bar = this.rows.length <= 12 ? 24 : this.rows.length <= 28 ? 17 : 13;
    this.setHeight(this.rows.length * this.bar + 34);
    const has = (i) => all.some(([, bars]) => bars.some((bar) => bar[i]));
    showLegend([...order.filter((kind) => all.some(([name]) => name === kind)), ...(has(DATA) ? ["data"] : []), ...(has(EXCHANGE) ? ["exchange"] : [])]);
    const failures = this.faults.filter(isFailure).length;
    this.setLabel(`Timeline of ${this.rows.length} rows over ${seconds(this.total)}, with ${failures} failures. `
      + "The arrow keys go from bar to bar, plus and minus magnify.");
    redraw(this);
  }

  show(view) {
    this.view = view && view[1] - view[0] > 0.01 ? view : null;
    this.all.hidden = !this.view;
    redraw(this);
  }

  draw() {
    const c = this.cleared();
    if (!c) return;
    const size = Math.min(12, this.bar - 2);
    c.font = `${size}px ${FONT}`;
    const names = Math.max(...this.rows.map(({ row }) => c.measureText(row).width), 20);
    const [from, to] = this.view || [0, this.total];
    const left = Math.ceil(names) + 10, right = this.width - 4, top = 14, bottom = top + this.rows.length * this.bar;
    const x = (time) => left + ((right - left) * (time - from)) / (to - from);
    this.place = { left, right, top, from, to, x };
    c.font = `11px ${FONT}`;
    const { step, at } = ticks(from, to, Math.max(2, Math.floor((right - left) / 76)), TIME_UNITS);
    c.textAlign = "center";
    for (const time of at) {
      const line = Math.round(x(time)) + 0.5, text = clock(time, step), half = c.measureText(text).width / 2;
      c.strokeStyle = colours.get("grid");
      c.beginPath(); c.moveTo(line, top); c.lineTo(line, bottom); c.stroke();
      c.fillStyle = colours.get("soft");
      c.fillText(text, Math.min(Math.max(line, left + half), right - half), bottom + 10);
    }
    c.textAlign = "left";
    this.rows.forEach(({ row }, i) => {
      c.font = `${size}px ${FONT}`;
      c.fillStyle = colours.get("text");
      c.fillText(row, 0, top + (i + 0.5) * this.bar + 0.5);
    });
    c.save();
    c.beginPath(); c.rect(left, 0, right - left + 4, this.height); c.clip();
    this.rows.forEach(({ kinds }, i) => this.bars(c, kinds, top + i * this.bar));
    for (const fault of this.faults) {
      const time = fault.at;
      if (time < from || time > to) continue;
      const line = Math.round(x(time)) + 0.5;
      c.strokeStyle = colours.get(isFailure(fault) ? "bad" : "good");
      c.setLineDash(isFailure(fault) ? [] : [2, 3]);
      c.beginPath(); c.moveTo(line, top - 4); c.lineTo(line, bottom); c.stroke();
      c.setLineDash([]);
      mark(c, line, top - 8, fault);
    }
    if (this.drag && Math.abs(this.drag.to - this.drag.from) > 3) {
      c.fillStyle = colours.get("accent");
      c.globalAlpha = 0.18;
      c.fillRect(this.drag.from, top, this.drag.to - this.drag.from, bottom - top);
      c.globalAlpha = 1;
    }
    c.restore();
  }

  bars(c, kinds, y) {
    const { x, from, to } = this.place, gap = this.bar > 14 ? 3 : 1.5;
    for (const [kind, spans] of kinds) {
      const { inset, texture } = KINDS[kind], top = y + gap + inset * this.bar, height = this.bar - 2 * (gap + inset * this.bar);
      let until = -1;
      for (const span of spans) {
        if (span[END] < from || span[BEGIN] > to) continue;
        const begin = Math.round(x(span[BEGIN])), end = Math.max(Math.round(x(span[END])), begin + 1);
        // Of bars within the same pixel one is drawn.
        if (end <= until) continue;
        until = end;
        c.fillStyle = colours.get(kind);
        c.fillRect(begin, top, end - begin, height);
        if (texture && end - begin > 2) { c.fillStyle = textures.get(c, texture); c.fillRect(begin, top, end - begin, height); }
        if (span[DATA]) { c.fillStyle = colours.get("data"); c.fillRect(begin, top, end - begin, height * span[DATA]); }
        if (span[EXCHANGE]) {
          c.fillStyle = colours.get("exchange");
          c.fillRect(begin, top + height * (1 - span[EXCHANGE]), end - begin, height * span[EXCHANGE]);
        }
      }
    }
  }

  // Return the row and the bar at a point: of several, the one that lies on top.
  at(px, py) {
    if (!this.place) return null;
    const { left, right, top, from, to } = this.place, i = Math.floor((py - top) / this.bar);
    if (px < left - 2 || !this.rows[i]) return null;
    const slack = (2 * (to - from)) / (right - left), time = from + ((to - from) * (px - left)) / (right - left);
    for (const [kind, spans] of [...this.rows[i].kinds].reverse()) {
      const span = spans.findLast((each) => time >= each[BEGIN] - slack && time <= each[END] + slack);
      if (span) return { row: this.rows[i].row, kind, span };
    }
    return null;
  }

  point(px, py) {
    if (this.drag) {
      this.drag.to = px;
      redraw(this);
      return;
    }
    const { top = 0, x } = this.place || {};
    const fault = x && py < top + 4 && this.faults.find((f) => Math.abs(x(f.at) - px) < 7);
    const found = this.at(px, py);
    if (fault) this.tip(`${fault.kind} at ${clock(fault.at)}: ${fault.task || "all tasks"} ${fault.text}`, px, py);
    else if (found) this.tip(this.textOf(found), px, py);
    else document.getElementById("tip").hidden = true;
  }

  textOf({ row, kind, span }) {
    const parts = [`${row}: ${KINDS[kind].text}, generation ${span[GENERATION]}`,
      `${clock(span[BEGIN], 0.1)} to ${clock(span[END], 0.1)} (${seconds(span[END] - span[BEGIN])})`];
    if (span[TEXT]) parts.push(span[TEXT]);
    const shares = [["data", span[DATA]], ["exchange", span[EXCHANGE]]].filter(([, share]) => share != null);
    if (shares.length) parts.push(shares.map(([name, share]) => `${name} ${percent(share)}`).join(", "));
    return parts.join("\n");
  }

  magnify() {
    const { drag, place } = this;
    this.drag = null;
    if (drag && place && Math.abs(drag.to - drag.from) > 3) {
      const time = (px) => place.from + ((place.to - place.from) * (px - place.left)) / (place.right - place.left);
      const [a, b] = [time(Math.min(drag.from, drag.to)), time(Math.max(drag.from, drag.to))];
      this.show([Math.max(0, a), Math.min(this.total, b)]);
    }
  }

  key(name) {
    if (!this.rows.length || !this.place) return false;
    const { from, to, x, top } = this.place;
    if (name === "+" || name === "-") {
      const half = ((to - from) * (name === "+" ? 0.5 : 2)) / 2;
      const span = this.chosen && this.inOrder(this.chosen.i)[this.chosen.n]?.span;
      const middle = span ? (span[BEGIN] + span[END]) / 2 : (from + to) / 2;
      this.show(2 * half >= this.total ? null : [Math.max(0, middle - half), Math.min(this.total, middle + half)]);
      return true;
    }
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(name in moves)) return false;
    const [down, right] = moves[name], { i, n } = this.chosen || { i: 0, n: -right };
    const row = Math.max(0, Math.min(this.rows.length - 1, i + down)), all = this.inOrder(row);
    this.chosen = { i: row, n: Math.max(0, Math.min(all.length - 1, n + right)) };
    const bar = all[this.chosen.n];
    if (bar) this.tip(this.textOf(bar), Math.max(0, x(bar.span[BEGIN])), top + (row + 0.5) * this.bar);
    return true;
  }

  // The bars of a row as the keys reach them.
  inOrder(i) {
    const { row, kinds } = this.rows[i] || { kinds: [] };
    return kinds.flatMap(([kind, spans]) => spans.map((span) => ({ row, kind, span }))).sort((a, b) => a.span[BEGIN] - b.span[BEGIN]);
  }
}

function showLegend(kinds) {
  const key = `${kinds.join()} ${document.documentElement.dataset.theme}`, legend = document.getElementById("legend");
  if (key === showLegend.key) return;
  showLegend.key = key;
  legend.replaceChildren(...kinds.map((kind) => {
    const ratio = window.devicePixelRatio || 1, canvas = make("canvas", { width: 18 * ratio, height: 11 * ratio, "aria-hidden": "true" });
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    c.fillStyle = colours.get(kind);
    c.fillRect(0, 0, 18, 11);
    if (KINDS[kind]?.texture) { c.fillStyle = textures.get(c, KINDS[kind].texture); c.fillRect(0, 0, 18, 11); }
    return make("li", {}, canvas, KINDS[kind]?.text || SHARES[kind]);
  }));
}
