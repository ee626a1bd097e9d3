"""A job on a screen of any size: what has room, and in which order."""

import dataclasses
import io
import time

import pytest
from rich.console import Console

from unisono.watch._job import WatchedBackup, WatchedCurve, WatchedFault, WatchedJob, WatchedTask
from unisono.watch._screen import screen_of

RUNS = WatchedTask(
    "worker:0",
    host="a",
    state="runs",
    epoch=3,
    epochs=10,
    step=4230,
    steps_per_s=211.0,
    rows_per_s=27_000.0,
    data=0.03,
    compute=0.8,
    exchange=0.17,
    flops_per_s=1.37e11,
    mfu=0.41,
    host_bytes=6.2e8,
    device_bytes=2.5e9,
    heartbeat_s=0.4,
    generation=1,
)
RESUMED = "resumed at step 80, lost 20 steps, 3.0 s after the failure"
JOB = WatchedJob(
    title="train.py",
    started=1.9e9,
    now=1.9e9 + 125,
    state="runs",
    generation=1,
    restarts=1,
    restarts_left=2,
    epoch=3,
    epochs=10,
    step=4230,
    steps=10_000,
    left_s=812.0,
    backup=WatchedBackup(4000, 12.0),
    tasks=[dataclasses.replace(RUNS, name=f"worker:{i}") for i in range(4)],
    curves=[
        WatchedCurve("rows_per_s", [(i, 100.0 * (i % 7)) for i in range(50)]),
        WatchedCurve("host_bytes", [(i, 1e8) for i in range(50)]),
        WatchedCurve("loss", [(i, 1 / (i + 1)) for i in range(50)]),
        WatchedCurve("val_loss", [(10, 0.5), (20, 0.25)]),
    ],
    faults=[
        WatchedFault(1.9e9, 100, "failure", "worker:1", "killed by SIGKILL"),
        WatchedFault(1.9e9, 80, "recovery", "worker:0", RESUMED),
    ],
)  # fmt: skip


def rows_of(job, width, height=None, scroll=0, foot="q quits", **console):
    file = io.StringIO()
    Console(file=file, width=width, **console).print(screen_of(job, width, height, scroll, foot))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100])
def test_the_most_useful_things_have_room(width):
    rows = rows_of(JOB, width, 24)
    text = "\n".join(rows)
    assert len(rows) <= 24
    assert max(map(len, rows)) <= width
    for part in (
        "train.py · runs · epoch 3 of 10 · step 4230 of 10000 · 14 min left", "restarts left: 2",
        "backup of step 4000, 12 s ago", " 42 %", "worker:3", "27k", "MFU%", "data%", "exch%", "620M", "2.5G",
        "failure   worker:1 (step 100): killed by SIGKILL", f"recovery  {RESUMED}", "q quits",
    ):  # fmt: skip
        assert part in text
    # The losses before the speed; the memory of the host is in the table.
    heads = [row.split()[0] for row in rows if row[:1].isalpha()]
    assert [head for head in heads if head in ("loss", "val_loss", "rows/s", "host_bytes")] == [
        "loss", "val_loss", "rows/s",
    ]  # fmt: skip
    assert ("FLOP/s" in text) == ("comp%" in text) == (width == 100)


@pytest.mark.parametrize("height", [10, 24, 40])
def test_of_fifty_tasks_those_in_trouble_are_first_and_keys_scroll(height):
    tasks = [dataclasses.replace(RUNS, name=f"worker:{i}") for i in range(50)]
    tasks[37] = WatchedTask("worker:37", state="failed", step=99)
    job = dataclasses.replace(JOB, tasks=tasks)
    rows = rows_of(job, 80, height)
    assert len(rows) <= height
    shown = [row.split()[0] for row in rows if row.startswith("worker:")]
    assert shown[:2] == ["worker:37", "worker:0"]
    assert any("50 tasks: 1 failed, 49 runs" in row for row in rows)
    last = [row.split()[0] for row in rows_of(job, 80, height, scroll=1000) if row.startswith("worker:")]
    assert (len(last), last[-1]) == (len(shown), "worker:49")
    # Printed once, all of them.
    assert len([row for row in rows_of(job, 80) if row.startswith("worker:")]) == 50


def test_each_task_has_its_epoch_where_there_is_room():
    head, first, *_ = [row for row in rows_of(JOB, 160) if row.startswith(("task", "worker"))]
    assert head.split()[2:4] == ["epoch", "step"]
    assert first.split()[2:4] == ["3/10", "4230"]


def test_nothing_is_known_at_first():
    rows = rows_of(WatchedJob(title="train.py", tasks=[WatchedTask("worker:0")]), 80, 24)
    assert rows[0] == "train.py · starts"
    assert rows[2].split() == ["worker:0", "starts", "0"]


def test_a_terminal_gets_colours_but_where_they_are_not_wanted_and_no_control_characters(monkeypatch):
    hostile = dataclasses.replace(JOB, title="\x1b]0;title\x07train.py", faults=[])
    coloured = "\n".join(rows_of(hostile, 80, force_terminal=True, color_system="standard"))
    assert "\x1b[1m" in coloured
    assert "\x1b]0" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" in coloured
    assert "\x1b[32m" not in "\n".join(rows_of(hostile, 80, force_terminal=True, color_system="standard"))


def test_when_a_job_has_ended_is_said(monkeypatch):
    """The newest log folder may be of last week."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    text = "\n".join(rows_of(dataclasses.replace(JOB, state="ended"), 100, 24))
    monkeypatch.undo()
    time.tzset()
    assert "took 2 min until 2030-03-17 17:48" in text
