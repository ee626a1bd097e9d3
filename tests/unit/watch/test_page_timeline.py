"""The bars of a page: those of `unisono timeline`, read once as they grow, and as few for a job of days."""

import itertools
import json

import pytest

from unisono.cli import _timeline
from unisono.watch._log_folder import LocalFolder
from unisono.watch.web import _page_timeline
from unisono.watch.web._page_timeline import PageTimeline

BEGAN = 1_900_000_000.0


class LaunchFiles:
    """Writes a log folder of a launch."""

    def __init__(self, root):
        self.root = root
        (root / "events").mkdir()

    def history(self, at, event, task=None, generation=0, pid=1, exit_code=None, detail="cold"):
        line = {"time": BEGAN + at, "event": event, "generation": generation, "task": task, "pid": pid}
        self.append("history.jsonl", line | {"exit_code": exit_code, "detail": detail})

    def event(self, begin, end, event, task="worker:0", generation=0, **facts):
        line = {"event": event, "from": BEGAN + begin, "until": BEGAN + end, "generation": generation}
        self.append(f"events/{task.replace(':', '-')}.jsonl", line | facts)

    def steps(self, begin, end, step, count, task="worker:0", generation=0, data=0.25):
        facts = {"step": step, "count": count, "data": data, "exchange": None, "rows": 8 * count}
        self.event(begin, end, "steps", task, generation, **facts)

    def append(self, name, line):
        with (self.root / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def files(tmp_path):
    return LaunchFiles(tmp_path)


def killed(files):
    """A launch of two tasks, of which one is killed; each part is what is written at some moment."""
    files.history(0, "launched")
    for i in range(2):
        files.history(1, "started", f"worker:{i}", pid=10 + i)
    yield
    for i in range(2):
        files.event(3, 4, "compile", f"worker:{i}")
        files.steps(4, 5, 10, 10, f"worker:{i}")
    yield
    files.event(5, 6, "save")
    files.history(7, "ended", "worker:1", pid=11, exit_code=137)
    files.history(7.1, "failed", "worker:1", pid=11, exit_code=137, detail="was killed by SIGKILL")
    files.history(7.2, "ending", detail="failed")
    files.history(7.5, "ended", "worker:0", pid=10, exit_code=143)
    yield
    for i in range(2):
        files.history(8, "started", f"worker:{i}", 1, pid=20 + i, detail="warm")
    files.steps(9, 10, 12, 2, generation=1)
    yield
    files.history(11, "quit", generation=1, exit_code=0)


def test_bars_that_are_read_as_they_grow_are_those_of_the_whole(files):
    timeline = PageTimeline(LocalFolder(files.root))
    for _ in killed(files):
        rows = timeline.read()
    rows = timeline.read()
    whole = _timeline.read(files.root)
    spans = sorted((span.row, span.name, *_page_timeline.bar_of(span)[:5]) for span in whole.spans)
    bars = [
        (row, kind, *bar[:5]) for row, kinds in rows.items() for kind, own in kinds.items() for bar in own
    ]
    assert sorted(bars) == spans
    assert list(rows) == ["launcher", "worker:0", "worker:1"]
    assert rows["launcher"]["recovery"] == [[7.2, 10.0, 0, "worker:1 was killed by SIGKILL", None, None]]
    assert rows["worker:0"]["steps"][0] == [4.0, 5.0, 0, "to step 10, 10 steps/s, 80 rows/s", 0.25, None]
    ((task, at, cost),) = _page_timeline.costs_of(timeline.outages)
    assert (task, at, cost) == ("worker:1", 7.0, "noticed after 0.20 s, next step after 3.00 s")


def test_a_long_job_has_no_more_bars_than_a_picture_can_show(files, tuned):
    tuned(_page_timeline, _BARS=40, _LEAST=20)
    files.history(0, "launched")
    files.history(0, "started", "worker:0")
    timeline, counts = PageTimeline(LocalFolder(files.root)), []
    for second in range(400):
        files.steps(second, second + 1, 10 * second + 10, 10, data=0.25 if second % 2 else 0.75)
        if second % 20 == 0:
            files.event(second, second + 0.1, "save")
        if second % 7 == 0:
            counts.append(len(timeline.read()["worker:0"]["steps"]))
    row = timeline.read()["worker:0"]
    assert max(counts) <= 40
    assert len(row["steps"]) >= 20
    # They cover what they covered, and count and mean are those of all.
    assert (row["steps"][0][0], row["steps"][-1][1]) == (0.0, 400.0)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(row["steps"]))
    assert row["steps"][0][3].split(", ")[1:] == ["10 steps/s", "80 rows/s"]
    assert row["steps"][0][4] == pytest.approx(0.5, abs=0.02)
    assert len(row["save"]) == 20


def test_another_launch_in_the_folder_replaces_the_first(files):
    timeline = PageTimeline(LocalFolder(files.root))
    for _ in killed(files):
        timeline.read()
    files.history(100, "launched")
    files.history(101, "started", "worker:0")
    files.event(102, 103, "compile")
    rows = timeline.read()
    assert list(rows) == ["launcher", "worker:0"]
    assert rows["launcher"] == {}
    assert [bar[:2] for bar in rows["worker:0"]["compile"]] == [[2.0, 3.0]]
