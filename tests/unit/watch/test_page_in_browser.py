"""The page in a headless Chromium: it draws, follows a job, opens logs by keys, and fits a phone.

Needs Debian's packages `chromium` and `chromium-driver`, and Selenium; without them the tests are skipped.
"""

import contextlib
import http.server
import json
import re
import shutil
import threading
import time

import pytest
from tests.unit.watch.test_json_changes import patched

from unisono.watch.web import _job_feed, _page_server
from unisono.watch.web._job_feed import JobFeed
from unisono.watch.web._json_changes import change_of
from unisono.watch.web._page import make_page
from unisono.watch.web._page_server import PageServer

LIMIT = 60.0
BEGAN = 1_900_000_000.0
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no Chromium: `apt-get install chromium chromium-driver` installs it",
    ),
    # Of Selenium's own code.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="no Selenium: `pip install selenium`")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(LIMIT)
    yield driver
    driver.quit()


def job_of(tasks=2, state="runs", points=50, bars=20):
    """A job as the page gets it, with a failure."""
    names = [f"worker:{i}" for i in range(tasks)]
    failure = {
        "time": BEGAN + 5,
        "step": 20,
        "kind": "failure",
        "task": names[-1],
        "text": "was killed by SIGKILL",
    }
    recovery = {
        "time": BEGAN + 8,
        "step": 10,
        "kind": "recovery",
        "task": names[0],
        "text": "resumed at step 10",
    }
    return {
        "title": "train.py", "command": f"unisono launch -n {tasks} train.py", "started": BEGAN,
        "now": BEGAN + bars, "state": state, "exit_code": None, "generation": 1, "restarts": 1,
        "restarts_left": 2, "config": [["global batch size", "256"]], "epoch": 3, "epochs": 10, "step": 4230,
        "steps": 10000, "left_s": 812.0, "backup": {"step": 4000, "age_s": 12.0},
        "tasks": [task_of(name, state) for name in names],
        "curves": {
            name: [[10 * i, height / (i + 1)] for i in range(points)]
            for height, name in enumerate(("loss", "val_loss", "mae", "rows_per_s", "host_bytes"), 1)
        },
        "faults": [failure | {"cost": "noticed after 0.20 s"}, recovery],
        "timeline": {"launcher": {"recovery": [[5, 8, 0, "worker:1", None, None]]}}
        | {name: row_of(bars) for name in names},
    }  # fmt: skip


def task_of(name, state):
    facts = {
        "steps_per_s": 211.0, "rows_per_s": 27e3, "tokens_per_s": None, "data": 0.03, "compute": 0.8,
        "exchange": 0.17, "flops_per_s": 1.37e11, "mfu": 0.41, "host_bytes": 3e8, "device_bytes": None,
        "heartbeat_s": 0.2,
    }  # fmt: skip
    fixed = {"name": name, "host": "node-1", "pid": 7, "state": state, "step": 4230, "generation": 1}
    return fixed | facts | {"log": f"{name.replace(':', '-')}.log"}


def row_of(bars):
    steps = [[i, i + 1, 1, f"to step {i}", 0.3, 0.3] for i in range(2, bars)]
    return {
        "process": [[0, bars, 0, "process 7", None, None]],
        "compile": [[1, 2, 0, "", None, None]],
        "steps": steps,
    }


@pytest.fixture
def show(browser, tmp_path):
    """Show a page that is a file; return the browser."""

    def shown(job, width=1280, dark=False, logs=None):
        path = tmp_path / "page.html"
        path.write_text(make_page("train.py", {"job": job, "logs": logs or {}}))
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(path.as_uri())
        wait_for(lambda: browser.execute_script("return unisono.drawn.frames") > 0, "a drawing")
        return browser

    yield shown
    problems = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not problems


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)
    return value


def text_of(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0]).innerText", selector)


#: How many pixels of a canvas have nearly the colour of a variable of the style.
COLOURED = """
const [selector, name] = arguments, canvas = document.querySelector(selector);
const probe = document.createElement("i");
probe.style.color = `var(--${name})`;
document.body.append(probe);
const wanted = getComputedStyle(probe).color.match(/[0-9]+/g).map(Number);
probe.remove();
const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
let found = 0;
for (let i = 0; i < data.length; i += 4) {
  if (data[i + 3] > 200 && wanted.every((c, j) => Math.abs(c - data[i + j]) < 12)) found += 1;
}
return found;
"""


def coloured(browser, selector, name):
    return browser.execute_script(COLOURED, selector, name)


def test_curves_bars_faults_and_numbers_are_shown_and_a_log_opens_by_key(show):
    browser = show(job_of(), logs={"worker:0": "first\n\x1b[1mstep 1\x1b[0m\rstep 2 ab\x08c\n<b>last</b>\n"})
    assert browser.title.startswith("▶ train.py 42 %, 20")
    assert text_of(browser, "#state") == "▶ runs"
    facts = text_of(browser, "#facts")
    for text in ("3 of 10", "4,230", "of 10,000", "211 steps/s", "13 min 32 s", "step 4,000", "2 left"):
        assert text in facts
    charts = browser.execute_script(
        "return [...document.querySelectorAll('#charts canvas')].map((c) => c.getAttribute('aria-label'))"
    )
    assert [re.match(r"Chart of ([\w ]+) over the steps", label)[1] for label in charts] == [
        "loss", "mae", "rows a second", "memory",
    ]  # fmt: skip
    assert "loss: now 0.02 at step 490, between 0.02 and 1. val_loss: now" in charts[0]
    assert coloured(browser, "#charts canvas", "line-1") > 100
    assert coloured(browser, "#charts canvas", "bad") > 10
    for kind in ("process", "steps", "data", "exchange", "compile", "recovery", "bad"):
        assert coloured(browser, "#timeline canvas", kind) > 10, kind
    assert "with 1 failures" in browser.execute_script(
        "return document.querySelector('#timeline canvas').ariaLabel"
    )
    assert "noticed after 0.20 s" in text_of(browser, "#faults")
    assert "global batch size" in text_of(browser, "#config")
    assert "27k" in text_of(browser, "tr[data-task='worker:1']")
    button = browser.find_element("css selector", "tr[data-task='worker:0'] button")
    button.send_keys("\ue007")  # Enter
    assert button.get_attribute("aria-expanded") == "true"
    assert text_of(browser, "tr.log pre") == "first\nstep 2 ac\n<b>last</b>\n"
    button.send_keys("\ue007")
    assert not browser.find_elements("css selector", "tr.log")


def test_the_script_applies_changes_as_the_server_means_them(show):
    """`patched` of the tests is what `test_json_changes.py` compares with."""
    browser = show(job_of())
    old = job_of()
    new = job_of(3, "restarts") | {"left_s": None}
    del new["epoch"]
    change = json.loads(json.dumps(change_of(old, new)))
    script = "const [old, change] = arguments; return JSON.stringify(unisono.patched(old, change))"
    assert json.loads(browser.execute_script(script, old, change)) == new == patched(old, change)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("state", ["starts", "runs", "restarts", "ended", "failed"])
def test_every_state_fits_desktop_and_phone_and_its_texts_have_contrast(show, state, width, dark):
    browser = show(job_of(4, state), width, dark, {"worker:0": "log\n" * 50})
    browser.execute_script("document.querySelector('tr.task').click()")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return document.documentElement.dataset.theme") == (
        "dark" if dark else "light"
    )
    assert browser.execute_script(LOW_CONTRAST) == []
    # The state is a word and a sign, not a colour alone.
    assert re.fullmatch(rf"\S {state}", text_of(browser, "#state"))


#: Texts whose contrast with what lies behind them is below that of WCAG 2.1, level AA: 4.5 to 1.
LOW_CONTRAST = """
const rgb = (text) => text.match(/[0-9.]+/g).map(Number);
const light = (c) => {
  const part = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = c.slice(0, 3).map((v) => part(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (node) => {
  for (let n = node; n; n = n.parentElement) {
    const colour = rgb(getComputedStyle(n).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent, node = walker.currentNode.parentElement;
  if (!text.trim() || !node.checkVisibility() || node.closest("script, noscript")) continue;
  const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push(`${text}: ${ratio.toFixed(2)}`);
}
return found;
"""


@pytest.mark.exhaustive
def test_keys_go_through_a_chart_and_the_timeline_and_magnify_it(show):
    browser = show(job_of())
    chart, *_ = browser.find_elements("css selector", "#charts canvas")
    chart.send_keys("\ue012\ue012")  # left: the last point, and the one before it
    said = "step 480\nloss 0.02041\nval_loss 0.04082"
    wait_for(lambda: text_of(browser, "#tip") == said, "the values under the cursor")
    timeline = browser.find_element("css selector", "#timeline canvas")
    for key in ("\ue015", "\ue014"):  # down, right
        timeline.send_keys(key)
    assert text_of(browser, "#tip").split("\n")[0] == "worker:0: compile, generation 0"
    timeline.send_keys("+")
    assert browser.find_element("css selector", "#timeline-all").is_displayed()
    browser.find_element("css selector", "#timeline-all").click()
    assert not browser.find_element("css selector", "#timeline-all").is_displayed()
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    wait_for(lambda: coloured(browser, "#charts canvas", "line-1") > 100, "the curve in the dark's colour")


@pytest.mark.exhaustive
def test_fifty_tasks_and_many_points_are_drawn_once_a_frame(show):
    """What 100,000 steps are thinned to; the page's own work is counted, as times differ between machines."""
    job = job_of(50, points=1000, bars=120)
    browser = show(job)
    before = browser.execute_script("return {...unisono.drawn}")
    script = """
    const [steps, done] = [arguments[0], arguments[arguments.length - 1]];
    for (let i = 0; i < steps; i += 1) { unisono.job.step += 1; unisono.show(); }
    requestAnimationFrame(() => requestAnimationFrame(() => done({...unisono.drawn})));
    """
    browser.set_script_timeout(LIMIT)
    after = browser.execute_async_script(script, 20)
    assert after["updates"] - before["updates"] == 20
    # Four charts and the timeline, however many updates there were before the frame.
    assert after["drawings"] - before["drawings"] <= 2 * 5
    assert browser.execute_script("return document.querySelectorAll('#tasks tr.task').length") == 50
    assert browser.execute_script("return document.querySelectorAll('*').length") < 3000
    # Numbers that have not changed are not written again.
    changes = """
    const done = arguments[arguments.length - 1];
    let seen = 0;
    const observer = new MutationObserver((records) => { seen += records.length; });
    observer.observe(document.body, { subtree: true, childList: true, characterData: true });
    unisono.job.step += 1; unisono.job.tasks[7].step += 1;
    unisono.show();
    setTimeout(() => done(seen), 50);
    """
    assert browser.execute_async_script(changes) <= 6


class GrowingJob:
    """A job that makes a step each time it is read."""

    def __init__(self):
        self.job = job_of()
        self.step = 0

    def read(self):
        self.step += 1
        loss = [[i, 1.0 / (i + 1)] for i in range(self.step)]
        return self.job | {"step": self.step, "curves": {"loss": loss}}


@pytest.mark.exhaustive
def test_a_page_follows_a_job_connects_again_and_is_complete_at_the_end(browser, tuned):
    tuned(_job_feed, PERIOD=0.05, _RETRY=50)
    tuned(_page_server, _LAST=10.0)
    source, logs = GrowingJob(), {"worker:0": b"live log\n"}
    feed = JobFeed(source.read)
    browser.get("about:blank")
    with PageServer(feed, logs.get) as server:
        browser.get(server.address)
        step = "return unisono.job ? unisono.job.step : 0"
        seen = wait_for(lambda: browser.execute_script(step), "a first event")
        wait_for(lambda: browser.execute_script(step) > seen + 2, "changes")
        assert text_of(browser, "#link") == "live"
        browser.execute_script("document.querySelector('tr.task').click()")
        wait_for(lambda: "live log" in text_of(browser, "tr.log pre"), "the log")
        logs["worker:0"] = b"live log\nmore\n"
        wait_for(lambda: "more" in text_of(browser, "tr.log pre"), "the log's next line")
        # The connection is lost: the page opens it again by itself, and misses nothing.
        for connection in list(server._server._deadlines):
            _page_server._end_connection(connection)
        seen = browser.execute_script(step)
        wait_for(lambda: browser.execute_script(step) > seen + 2, "changes after the connection was lost")
        points, steps = browser.execute_script("return [unisono.job.curves.loss.length, unisono.job.step]")
        assert points == steps
        feed.end(lambda: {"job": source.job | {"state": "ended"}, "logs": {"worker:0": "the whole log"}})
        wait_for(lambda: text_of(browser, "#state") == "✓ ended", "the end")
    assert text_of(browser, "#link") == "the page is complete"
    wait_for(lambda: text_of(browser, "tr.log pre") == "the whole log", "the log without a server")
    lost = [entry["message"] for entry in browser.get_log("browser")]
    assert not [message for message in lost if "ERR_" not in message]


@pytest.mark.exhaustive
def test_a_page_of_another_site_reads_nothing(browser):
    """Neither by a request nor in a frame, even where it knows the address."""
    feed = JobFeed(dict)
    with PageServer(feed, {}.get) as server, other_site() as port:
        browser.get(f"http://127.0.0.1:{port}/")
        script = """
        const [address, done] = arguments;
        fetch(address).then((answer) => answer.text()).then(() => done("read")).catch(() => done("refused"));
        """
        browser.set_script_timeout(LIMIT)
        assert browser.execute_async_script(script, server.address) == "refused"
        feed.end()
    browser.get_log("browser")


@contextlib.contextmanager
def other_site():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<p>another site</p>")

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
