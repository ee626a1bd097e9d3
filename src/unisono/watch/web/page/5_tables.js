// The facts of the job, its tasks with their logs, its failures, and its configuration.

function showFacts(job) {
  const facts = [];
  const epochs = job.epochs ? ` of ${count(job.epochs)}` : "", steps = job.steps ? ` of ${count(job.steps)}` : "";
  if (job.epoch != null) facts.push(["Epoch", `${count(job.epoch)}${epochs}`]);
  facts.push(["Step", `${count(job.step)}`, steps.trim()]);
  const fastest = job.tasks.reduce((a, t) => ((t.steps_per_s || 0) > (a.steps_per_s || 0) ? t : a), {});
  const work = fastest.tokens_per_s != null ? `${short(fastest.tokens_per_s)} tokens/s` : fastest.rows_per_s != null ? `${short(fastest.rows_per_s)} rows/s` : "";
  const isOver = job.state === "ended" || job.state === "failed";
  if (!isOver) {
    facts.push(["Speed", fastest.steps_per_s == null ? NO_VALUE : `${short(fastest.steps_per_s)} steps/s`, work]);
    facts.push(["Time left", job.left_s == null ? NO_VALUE : `${seconds(job.left_s)}`]);
  }
  facts.push([isOver ? "It took" : "Runs for", seconds(Math.max(0, job.now - job.started))]);
  if (job.backup) facts.push(["Last backup", `step ${count(job.backup.step)}`, `${seconds(job.backup.age_s)} ${isOver ? "before the end" : "ago"}`]);
  const left = job.restarts_left == null ? "" : `${count(job.restarts_left)} left`;
  facts.push(["Restarts", count(job.restarts), left]);
  if (job.state === "failed" || (isOver && job.exit_code != null)) facts.push(["Exit code", job.exit_code == null ? NO_VALUE : String(job.exit_code)]);
  const box = document.getElementById("facts");
  while (box.children.length > facts.length) box.lastChild.remove();
  facts.forEach(([name, text, more], i) => {
    if (!box.children[i]) box.append(make("div", {}, make("dt"), make("dd", {}, make("span"), make("small"))));
    const [dt, dd] = box.children[i].children;
    write(dt, name);
    write(dd.children[0], text);
    write(dd.children[1], more || "\u00a0");
  });
  const bar = document.getElementById("progress"), share = job.steps ? Math.min(1, job.step / job.steps) : null;
  bar.hidden = share == null;
  if (share != null) {
    bar.firstChild.style.width = `${100 * share}%`;
    for (const [name, number] of [["valuemin", 0], ["valuemax", job.steps], ["valuenow", job.step]]) bar.setAttribute(`aria-${name}`, number);
  }
}

const COLUMNS = [
  { head: "Task", left: true },
  { head: "State", left: true },
  { head: "Host", left: true, minor: true, cell: (t) => t.host || "" },
  { head: "Process", minor: true, cell: (t) => (t.pid == null ? "" : String(t.pid)) },
  { head: "Epoch", minor: true, cell: (t) => (t.epoch == null ? "" : `${count(t.epoch)} of ${count(t.epochs)}`) },
  { head: "Step", cell: (t) => (t.step == null ? "" : count(t.step)) },
  { head: "Steps/s", cell: (t) => (t.steps_per_s == null ? "" : short(t.steps_per_s)) },
  { head: "Rows/s", cell: (t) => (t.rows_per_s == null ? "" : short(t.rows_per_s)) },
  { head: "Tokens/s", cell: (t) => (t.tokens_per_s == null ? "" : short(t.tokens_per_s)) },
  { head: "Data · compute · exchange", shares: true },
  { head: "FLOP/s", minor: true, cell: (t) => (t.flops_per_s == null ? "" : short(t.flops_per_s)) },
  { head: "Of peak", minor: true, cell: (t) => (t.mfu == null ? "" : percent(t.mfu)) },
  { head: "Memory", cell: (t) => (t.host_bytes == null ? "" : bytes(t.host_bytes)) },
  { head: "Device memory", minor: true, cell: (t) => (t.device_bytes == null ? "" : bytes(t.device_bytes)) },
  { head: "Heartbeat", minor: true, cell: (t) => (t.heartbeat_s == null || /^(ended|failed)/.test(t.state) ? "" : `${seconds(t.heartbeat_s)} ago`) },
  { head: "Generation", minor: true, cell: (t) => count(t.generation) },
];

const tasks = new Map();

// The columns of which a task knows anything.
function columnsOf(job) {
  const hasShares = job.tasks.some((t) => t.data != null || t.compute != null || t.exchange != null);
  return COLUMNS.filter((column, i) => i < 2 || (column.shares ? hasShares : job.tasks.some((t) => column.cell(t))));
}

function showTasks(job) {
  const columns = columnsOf(job), table = document.getElementById("tasks"), [head, body] = [table.tHead, table.tBodies[0]];
  const key = columns.map((column) => column.head).join();
  if (key !== showTasks.key) {
    showTasks.key = key;
    head.replaceChildren(make("tr", {}, ...columns.map((c) => make("th", { scope: "col", class: c.left ? "left" : null }, c.head))));
    const open = [...tasks.values()].filter((row) => row.log).map((row) => row.name);
    for (const row of tasks.values()) row.close();
    tasks.clear();
    body.replaceChildren();
    showTasks.reopen = open;
  }
  const names = new Set(job.tasks.map((task) => task.name));
  for (const [name, row] of tasks) if (!names.has(name)) { row.close(); row.line.remove(); tasks.delete(name); }
  for (const task of job.tasks) {
    if (!tasks.has(task.name)) {
      tasks.set(task.name, new TaskRow(task.name, columns));
      body.append(tasks.get(task.name).line);
    }
    tasks.get(task.name).update(task);
  }
  for (const name of showTasks.reopen?.splice(0) || []) tasks.get(name)?.open();
  const total = job.tasks.length;
  write(document.getElementById("tasks-hint"), total ? `${total === 1 ? "One task" : `${total} tasks`}. A click opens a task's log.` : "No task has started yet.");
}

class TaskRow {
  constructor(name, columns) {
    this.name = name;
    this.columns = columns;
    this.button = make("button", { type: "button", "aria-expanded": "false", "aria-label": `Log of ${name}` }, name);
    this.cells = columns.map((c, i) => make("td", { "data-label": c.head, class: [c.left && "left", c.shares && "shares-cell", c.minor && "minor"].filter(Boolean).join(" ") || null }, ...(i ? [] : [this.button])));
    this.word = make("span", { class: "word" });
    this.cells[1].append(this.word);
    this.line = make("tr", { class: "task", "data-task": name }, ...this.cells);
    this.log = null;
    this.line.addEventListener("click", () => {
      if (!String(window.getSelection())) (this.log ? this.close() : this.open());
    });
  }

  update(task) {
    const { sign, kind } = stateOf(task.state);
    write(this.word, `${sign} ${task.state}`);
    this.word.dataset.state = kind;
    this.columns.forEach((column, i) => {
      if (i < 2) return;
      const text = column.shares ? this.shares(this.cells[i], task) : column.cell(task);
      if (!column.shares) write(this.cells[i], text);
      this.cells[i].classList.toggle("empty", !text);
    });
  }

  shares(cell, task) {
    const known = ["data", "compute", "exchange"].map((name) => [name, task[name]]).filter(([, share]) => share != null);
    const text = ["data", "compute", "exchange"].map((name) => (task[name] == null ? NO_VALUE : (100 * task[name]).toFixed(0))).join(" · ");
    if (!known.length) { cell.replaceChildren(); this.bar = null; return ""; }
    if (!this.bar) {
      this.bar = make("span", { class: "shares", "aria-hidden": "true" }, ...["data", "compute", "exchange"].map((name) => make("i", { class: name })));
      this.said = make("span");
      cell.replaceChildren(make("span", {}, this.said, this.bar));
    }
    write(this.said, `${text} %`);
    ["data", "compute", "exchange"].forEach((name, i) => { this.bar.children[i].style.width = `${100 * (task[name] || 0)}%`; });
    return text;
  }

  open() {
    this.text = make("pre", { tabindex: "0", role: "region", "aria-label": `Log of ${this.name}` });
    this.note = make("div", { class: "note" }, "reads …");
    this.log = make("tr", { class: "log" }, make("td", { colspan: this.columns.length }, this.note, this.text));
    this.line.after(this.log);
    this.line.classList.add("open");
    this.button.setAttribute("aria-expanded", "true");
    this.read();
  }

  close() {
    clearTimeout(this.timer);
    this.log?.remove();
    this.log = null;
    this.line.classList.remove("open");
    this.button.setAttribute("aria-expanded", "false");
  }

  // The end of the log, again and again while the job runs.
  async read() {
    const log = this.log;
    let text = null, note = "";
    try {
      text = source.logs ? source.logs[this.name] : await logOf(this.name);
    } catch (error) {
      note = `The log cannot be read now (${error.message}).`;
    }
    if (log !== this.log || !log) return;
    if (text === undefined) note = "This page holds no log of this task.";
    if (text != null) {
      const isAtEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
      write(this.text, printed(text));
      if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
      note = text ? "The end of the log." : "The log is empty.";
    }
    write(this.note, note);
    if (!source.logs) this.timer = setTimeout(() => this.read(), 2000);
  }
}

async function logOf(task) {
  const answer = await fetch(`log?task=${encodeURIComponent(task)}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.text();
}

const FAULT_SIGNS = { failure: "▼ failure", stall: "▼ stall", preemption: "▼ preemption", restart: "● restart", recovery: "● recovery" };

function showFaults(job) {
  const table = document.getElementById("faults"), [head, body] = [table.tHead, table.tBodies[0]];
  table.hidden = !job.faults.length;
  document.getElementById("no-faults").hidden = job.faults.length > 0;
  const text = JSON.stringify(job.faults);
  if (text === showFaults.text) return;
  showFaults.text = text;
  const heads = ["At", "What", "Task", "Step", "Message"];
  head.replaceChildren(make("tr", {}, ...heads.map((name, i) => make("th", { scope: "col", class: i === 0 || i === 3 ? null : "left" }, name))));
  body.replaceChildren(...job.faults.map((fault) => {
    const text = fault.cost ? make("span", {}, fault.text, make("span", { class: "sub" }, `; ${fault.cost}`)) : fault.text;
    const cells = [clock(fault.time - job.started), null, fault.task || "all tasks", fault.step == null ? "" : count(fault.step), text];
    return make("tr", {}, ...cells.map((cell, i) => make("td", { "data-label": heads[i], class: i === 4 ? "left wrap" : i === 1 || i === 2 ? "left" : cell ? null : "empty" },
      i === 1 ? make("span", { class: "word", "data-state": isFailure(fault) ? "failed" : "ended" }, FAULT_SIGNS[fault.kind] || fault.kind) : cell)));
  }));
}

function showConfig(job) {
  const box = document.getElementById("config"), text = JSON.stringify(job.config);
  document.getElementById("config-section").hidden = !job.config.length;
  if (text === showConfig.text) return;
  showConfig.text = text;
  box.replaceChildren(...job.config.map(([name, setting]) => make("div", {}, make("dt", {}, name), make("dd", {}, setting))));
}
