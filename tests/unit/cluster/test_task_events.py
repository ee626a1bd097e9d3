"""What a task writes into the log folder: a line a second at most."""

import contextlib
import json
import logging
import time

import numpy as np
import pytest

from unisono.cluster.liveness._task_events import TaskEventFile, host_bytes


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "time", clock)
    return clock


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_of_a_second_are_one_line(tmp_path, clock):
    events = TaskEventFile(tmp_path / "events", 2)
    events.begin_at(40)
    for _ in range(30):
        clock.now += 0.1
        events.stepped(2, data=0.05)
    found = lines(tmp_path / "events")
    assert [(line["step"], line["count"]) for line in found][:2] == [(42, 2), (62, 20)]
    assert len(found) == 3
    assert found[1] == {
        "event": "steps", "from": pytest.approx(1000.1), "until": pytest.approx(1001.1), "step": 62,
        "count": 20, "data": 0.5, "exchange": None, "generation": 2,
        "host": pytest.approx(host_bytes(), rel=0.5),
    }  # fmt: skip
    events.flush()
    assert lines(tmp_path / "events")[-1]["step"] == 100


def test_shares_of_time_are_there_where_they_are_measured(tmp_path, clock):
    events = TaskEventFile(tmp_path / "events", 0)
    events.exchange = 0.25
    clock.now += 2
    events.stepped()
    clock.now += 2
    # A worker of parameter servers measures each step.
    events.stepped(pulling=0.5)
    first, second = lines(tmp_path / "events")
    assert (first["data"], first["exchange"]) == (None, 0.25)
    assert (second["data"], second["exchange"]) == (None, 0.25)
    clock.now += 2
    events.stepped(pulling=0.5, computing=0.25)
    clock.now += 0.1
    events.stepped(pulling=0.5, computing=0.25)
    # It waits for its chief, too: the shares are not all of its time.
    clock.now += 2
    events.flush()
    found = lines(tmp_path / "events")
    assert (found[-2]["exchange"], found[-2]["compute"]) == (0.25, 0.125)
    assert [found[-1]["exchange"], found[-1]["compute"]] == pytest.approx([0.5 / 2.1, 0.25 / 2.1], abs=1e-3)
    assert "compute" not in found[0]


class Work:
    """What a train function has computed."""

    peak, taken = 100.0, (8, 0, 50.0)

    def new(self):
        return self.taken

    def memory(self):
        return None


def test_the_work_of_steps_is_there_where_it_is_counted(tmp_path, clock):
    events, work = TaskEventFile(tmp_path / "events", 0), Work()
    events.worked(work)
    events.worked(work)
    events.stepped(2)
    work.taken = (8, 4, float("nan"))
    clock.now += 2
    events.worked(work)
    events.stepped()
    clock.now += 2
    events.stepped()
    names = ("rows", "tokens", "flops", "peak", "memory")
    found = [{name: line[name] for name in names if name in line} for line in lines(tmp_path / "events")]
    assert found == [{"rows": 16, "flops": 100.0, "peak": 100.0}, {"rows": 8, "tokens": 4, "peak": 100.0}, {}]


def test_what_lasts_has_a_line_and_short_ones_in_a_row_have_one(tmp_path, clock):
    events = TaskEventFile(tmp_path / "events", 0)
    for _ in range(3):
        clock.now += 0.5
        events.lasted("compile", 0.45)
    with contextlib.suppress(KeyError), events.span("save"):
        clock.now += 1
        raise KeyError
    clock.now += 5
    events.lasted("compile", 0.5)
    events.flush()
    found = [(e["event"], round(e["from"], 2), round(e["until"], 2)) for e in lines(tmp_path / "events")]
    assert found == [("compile", 1000.05, 1001.5), ("save", 1001.5, 1002.5), ("compile", 1007.0, 1007.5)]


def test_a_full_disk_ends_the_file_alone(tmp_path, clock, caplog):
    events = TaskEventFile(tmp_path / "removed" / "events", 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            clock.now += 2
            events.stepped()
    assert len(caplog.records) == 1


class Nothing:
    """Work that is not known."""

    peak = None

    def new(self):
        return 0, 0, 0.0

    def memory(self):
        return None


class Logs:
    """An array of a device: says whether it is ready, and counts how often it is read."""

    is_fully_addressable = True

    def __init__(self, *values):
        self.values, self.done, self.reads = values, False, 0

    def is_ready(self):
        return self.done

    def __array__(self, dtype=None, copy=None):
        assert self.done, "an array was read that its device has not written"
        self.reads += 1
        return np.array(self.values, dtype)


def test_logs_are_read_once_a_second_and_only_where_they_are_ready(tmp_path, clock):
    events = TaskEventFile(tmp_path / "events", 0)
    made = []
    for _ in range(40):
        clock.now += 0.1
        made.append(Logs(7.0, 3.0, 9.0))
        events.worked(Nothing(), {"loss": made[-1]}, 2)
        events.stepped(2)
        # The devices are half a second late.
        if len(made) > 5:
            made[-6].done = True
    found = [(line["step"], line["logs"]) for line in lines(tmp_path / "events") if line["event"] == "logs"]
    # Of a group with room for three steps, of which two ran, the second's.
    assert found == [(2, {"loss": 3.0}), (22, {"loss": 3.0}), (42, {"loss": 3.0})]
    assert sum(logs.reads for logs in made) == 3


@pytest.mark.parametrize("logs", [{"loss": 1.0}, {"loss": None}, [1], None])
def test_logs_of_other_kinds_are_left_out(tmp_path, clock, logs):
    events = TaskEventFile(tmp_path / "events", 0)
    for _ in range(30):
        clock.now += 0.1
        events.worked(Nothing(), (logs, None), 1)
        events.stepped()
    assert {line["event"] for line in lines(tmp_path / "events")} == {"steps"}


def test_notes_are_written_with_the_steps_and_of_short_epochs_the_newest(tmp_path, clock):
    events = TaskEventFile(tmp_path / "events", 1)
    events.stepped(4)
    for epoch in range(20):
        clock.now += 0.01
        events.note("epoch", epoch=epoch, logs={"loss": 0.5})
    events.note("backup", step=3)
    events.flush()
    found = lines(tmp_path / "events")[1:]
    assert [line["epoch"] for line in found[:-1]] == [0, 1, 2, 3, 4, 5, 6, 19]
    assert found[-1] == {
        "event": "backup", "from": clock.now, "until": clock.now, "step": 3, "generation": 1,
    }  # fmt: skip


def test_a_text_is_new_to_the_first_generation_that_prints_it(tmp_path):
    texts = ["fit of one", "fit of two"]
    first = TaskEventFile(tmp_path / "events", 0)
    assert [first.is_new(text) for text in [*texts, texts[0]]] == [True, True, False]
    again = TaskEventFile(tmp_path / "events", 1)
    assert [again.is_new(text) for text in [*texts, "fit of three"]] == [False, False, True]
    # A later launch in the same folder begins anew.
    assert TaskEventFile(tmp_path / "events", 0).is_new("fit of one")
