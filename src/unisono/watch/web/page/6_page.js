// The page: takes the job from the file or from the server, and shows it.

const source = JSON.parse(document.getElementById("data").textContent);
let job = source.job, timeline = null, version = null;

function show() {
  if (!job) return;
  const began = performance.now();
  showAll();
  const took = performance.now() - began;
  drawn.updates += 1;
  drawn.updating += took;
  drawn.longestUpdate = Math.max(drawn.longestUpdate, took);
}

function showAll() {
  const { sign } = stateOf(job.state), state = document.getElementById("state");
  write(state, `${sign} ${job.state}`);
  state.dataset.state = job.state;
  write(document.getElementById("title"), job.title);
  write(document.getElementById("command"), job.command);
  document.getElementById("command").hidden = !job.command;
  write(document.getElementById("when"), `started ${date(job.started)}`);
  const share = job.steps ? ` ${Math.floor((100 * job.step) / job.steps)} %` : "";
  document.title = `${sign} ${job.title}${share}, ${date(job.started)}`;
  showFacts(job);
  showCurves(job, document.getElementById("log-scale").checked);
  timeline ||= new Timeline(document.getElementById("timeline"));
  timeline.update(job);
  showTasks(job);
  showFaults(job);
  showConfig(job);
}

// What the server says has changed: `v` a value, `d` some fields, `x` fields that are gone, `i` some items of
// a list, `k` and `a` how many items stay and what follows them.
function patched(old, change) {
  if ("v" in change) return change.v;
  if ("k" in change) return [...old.slice(0, change.k), ...change.a];
  if ("i" in change) {
    const list = [...old];
    for (const [i, inner] of Object.entries(change.i)) list[i] = patched(list[i], inner);
    return list;
  }
  const fields = { ...old };
  for (const name of change.x || []) delete fields[name];
  for (const [name, inner] of Object.entries(change.d || {})) fields[name] = patched(fields[name], inner);
  return fields;
}

function setLink(text, isLost = false) {
  const link = document.getElementById("link");
  write(link, text);
  link.classList.toggle("lost", isLost);
}

function follow() {
  const events = new EventSource("events");
  let isDue = false;
  const showSoon = () => {
    if (isDue) return;
    isDue = true;
    // Frames of a page in the background do not run: it is shown when it is in the foreground again.
    requestAnimationFrame(() => { isDue = false; show(); });
  };
  events.addEventListener("open", () => setLink("live"));
  events.addEventListener("full", (event) => {
    job = JSON.parse(event.data);
    version = event.lastEventId;
    showSoon();
  });
  events.addEventListener("change", (event) => {
    job = patched(job, JSON.parse(event.data));
    version = event.lastEventId;
    showSoon();
  });
  events.addEventListener("end", (event) => {
    events.close();
    Object.assign(source, JSON.parse(event.data));
    job = source.job;
    setLink("the page is complete");
    showSoon();
    for (const row of tasks.values()) if (row.log) row.read();
  });
  events.addEventListener("error", () => {
    if (events.readyState === EventSource.CLOSED) {
      setLink("not connected", true);
      setTimeout(follow, 3000);
    } else setLink("connects again …", true);
  });
}

const theme = {
  stored() { try { return localStorage.getItem("unisono-theme"); } catch { return null; } },
  store(name) { try { localStorage.setItem("unisono-theme", name); } catch { /* a file's page may keep nothing */ } },
  set(name) {
    document.documentElement.dataset.theme = name;
    document.getElementById("theme").setAttribute("aria-pressed", String(name === "dark"));
    colours.cache = {};
    if (timeline) show();
  },
};
const isDark = window.matchMedia("(prefers-color-scheme: dark)");
theme.set(theme.stored() || (isDark.matches ? "dark" : "light"));
isDark.addEventListener("change", () => { if (!theme.stored()) theme.set(isDark.matches ? "dark" : "light"); });
document.getElementById("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  theme.store(name);
  theme.set(name);
});
document.getElementById("log-scale").addEventListener("change", show);
new ResizeObserver(arrange).observe(document.getElementById("charts"));
window.unisono = { drawn, patched, show, get job() { return job; }, get version() { return version; } };
show();
if (!source.job) follow();
