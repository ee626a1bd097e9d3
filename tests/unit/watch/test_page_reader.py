"""What a page gets of a log folder: curves, costs of failures, and logs by the names of tasks alone."""

import json

import pytest
from tests.unit.watch.test_page_timeline import LaunchFiles, killed

from unisono.watch._job_reader import JobReader
from unisono.watch._log_folder import LocalFolder
from unisono.watch.web import _page_reader
from unisono.watch.web._page_reader import PageReader


@pytest.fixture
def files(tmp_path):
    return LaunchFiles(tmp_path)


def test_a_failure_has_its_cost_and_curves_have_names(files):
    for _ in killed(files):
        pass
    files.event(10, 11, "logs", step=12, logs={"loss": 0.5}, generation=1)
    job = PageReader(JobReader(LocalFolder(files.root))).read()
    assert json.loads(json.dumps(job, allow_nan=False)) == job
    (failure,) = [fault for fault in job["faults"] if fault["kind"] == "failure"]
    assert failure["task"] == "worker:1"
    assert failure["cost"] == "noticed after 0.20 s, next step after 3.00 s"
    assert job["curves"]["loss"] == [[12, 0.5]]
    assert set(job["timeline"]) == {"launcher", "worker:0", "worker:1"}
    assert job["state"] == "ended"


def test_a_long_past_is_shown_while_it_is_read(files, tuned):
    for _ in killed(files):
        pass
    for i in range(3000):
        files.event(10 + i, 11 + i, "steps", step=20 + i, count=1, data=0.0, exchange=None, generation=1)
    tuned(_page_reader, _LOOK=1)
    reader, steps = PageReader(JobReader(LocalFolder(files.root))), []
    while not steps or reader.is_behind:
        steps.append(reader.read()["step"])
    # Three looks and more, of which each says more than the one before.
    assert 2 < len(steps) < 50
    assert steps == sorted(set(steps))
    assert steps[-1] == 3019
    # The copy that is kept has all at once.
    whole = PageReader(JobReader(LocalFolder(files.root))).last()["job"]
    assert whole["step"] == 3019
    assert whole["timeline"] == reader.read()["timeline"]


def test_logs_are_read_by_the_name_of_a_task_alone(files):
    for _ in killed(files):
        pass
    (files.root / "worker-0.log").write_text("first\nlast\n")
    (files.root / "secret.log").write_text("secret")
    reader = PageReader(JobReader(LocalFolder(files.root)))
    assert reader.log_of("worker:0") is None  # no task is known yet
    reader.read()
    assert reader.log_of("worker:0") == b"first\nlast\n"
    assert reader.log_of("worker:1") == b""
    names = (
        "secret",
        "launcher",
        "",
        "worker-0",
        "../worker:0",
        "worker:0/../secret",
        "/etc/passwd",
        "worker:2",
    )
    assert not [name for name in names if reader.log_of(name) is not None]


def test_of_a_long_log_the_last_whole_lines_are_shown(files, tuned):
    for _ in killed(files):
        pass
    (files.root / "worker-0.log").write_text("".join(f"line {i}\n" for i in range(1000)))
    tuned(_page_reader, _SHOWN=100, _KEPT=40)
    reader = PageReader(JobReader(LocalFolder(files.root)))
    last = reader.last()
    assert reader.log_of("worker:0").split(b"\n")[0] == b"line 989"
    assert last["logs"]["worker:0"].split("\n") == ["line 996", "line 997", "line 998", "line 999", ""]
    assert last["logs"]["worker:1"] == ""


def test_a_long_curve_is_sent_anew_at_intervals_and_at_the_end(files, tuned):
    """Of a curve with many points, other ones are kept each time."""
    tuned(_page_reader, _LONG=3, _INTERVAL=1e9)
    files.history(0, "launched")
    files.history(1, "started", "worker:0")
    reader = PageReader(JobReader(LocalFolder(files.root)))
    lengths = []
    for step in range(1, 7):
        files.steps(step, step + 0.5, step, 1)
        files.event(step, step, "logs", step=step, logs={"loss": 1.0})
        lengths.append(len(reader.read()["curves"]["loss"]))
    assert lengths == [1, 2, 2, 2, 2, 2]
    assert len(reader.last()["job"]["curves"]["loss"]) == 6


def test_without_a_launchers_history_the_bars_are_those_of_the_events(files):
    """As of servers that train for the job."""
    files.event(3, 4, "compile")
    files.steps(4, 5, 10, 10)
    job = PageReader(JobReader(LocalFolder(files.root))).read()
    assert job["timeline"] == {
        "worker:0": {"compile": [[0.0, 1.0, 0, "", None, None]], "steps": [[1.0, 2.0, 0, "", None, None]]}
    }
