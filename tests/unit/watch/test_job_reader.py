"""A log folder, followed as it grows: what is shown of the job, and how little is read for it."""

import json

import pytest

from unisono.watch._job_reader import JobReader
from unisono.watch._log_folder import LocalFolder

BEGAN = 1_900_000_000.0
LAUNCH = {
    "title": "train.py",
    "command": "unisono launch -n 2 train.py",
    "host": "here",
    "max_restarts": 3,
    "restart_window_s": 600.0,
    "config": [["tasks", "worker:0 worker:1"]],
}


class Writer:
    """Writes a log folder as a launcher and its tasks do."""

    def __init__(self, root):
        self.root = root
        for folder in ("events", "progress"):
            (root / folder).mkdir()
        (root / "launch.json").write_text(json.dumps(LAUNCH))

    def history(self, at, event, task=None, generation=0, pid=None, exit_code=None, detail="", **more):
        line = {"time": BEGAN + at, "event": event, "generation": generation, "task": task, "pid": pid}
        self.append("history.jsonl", {**line, "exit_code": exit_code, "detail": detail, **more})

    def event(self, at, event, task="worker:0", generation=0, seconds=1.0, **facts):
        span = {"from": BEGAN + at - seconds, "until": BEGAN + at, "generation": generation}
        self.append(f"events/{task.replace(':', '-')}.jsonl", {"event": event, **span, **facts})

    def steps(self, at, step, count=100, task="worker:0", generation=0, **facts):
        facts = {"data": 0.1, "exchange": None, "rows": 64 * count, "host": 3e8, **facts}
        self.event(at, "steps", task, generation, step=step, count=count, **facts)

    def append(self, name, line):
        with (self.root / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def begin(self, tasks=2):
        self.history(0, "launched", pid=1)
        for i in range(tasks):
            self.history(1, "started", f"worker:{i}", pid=100 + i, detail="cold")


@pytest.fixture
def writer(tmp_path):
    return Writer(tmp_path)


def reader_of(writer, at):
    """A reader at a time, which a test may change."""
    clock = [BEGAN + at]
    reader = JobReader(LocalFolder(writer.root), lambda: clock[0])
    reader.clock = clock
    return reader


def test_a_task_that_has_begun_fit_compiles_until_its_first_step(writer):
    writer.begin()
    reader = reader_of(writer, 10)
    assert [task.state for task in reader.refresh().tasks] == ["starts", "starts"]
    writer.event(4, "fit", epochs=2, batches=100, epoch=0, step=0, config=[], host="a")
    job = reader.refresh()
    assert (job.state, [task.state for task in job.tasks]) == ("starts", ["compiles", "starts"])
    writer.steps(6, 10, count=10)
    assert reader.refresh().tasks[0].state == "runs"
    # The fit of an earlier process does not count.
    writer.history(8, "restart", generation=1, detail="2 workers in 0 s")
    writer.history(8, "started", "worker:0", generation=1, pid=200)
    assert reader.refresh().tasks[0].state == "starts"


def test_a_backup_that_a_dying_process_has_not_told_is_known_by_its_restoration(writer):
    """A process that saves because another one was killed may end before it can write so."""
    writer.begin()
    writer.event(2, "fit", epochs=2, batches=100, epoch=0, step=0, config=[], host="a")
    writer.steps(3, 40, count=40)
    writer.event(4, "backup", step=40)
    writer.steps(5, 62, count=22)
    reader = reader_of(writer, 6)
    assert (reader.refresh().backup.step, reader.refresh().backup.age_s) == (40, 2.0)
    writer.history(6, "restart", generation=1, detail="2 workers in 0 s")
    writer.history(6, "started", "worker:0", generation=1, pid=200)
    writer.steps(9, 70, count=10, generation=1)
    reader.clock[0] = BEGAN + 10
    # It was made after the last step that is known.
    assert (reader.refresh().backup.step, reader.refresh().backup.age_s) == (60, 5.0)


def test_a_training_is_shown_with_speed_epoch_loss_and_time_left(writer):
    writer.begin()
    config = [["optimizer", "SGD"]]
    writer.event(2, "fit", epochs=4, batches=500, epoch=0, step=0, config=config, host="a")
    for i in range(1, 9):
        for task in ("worker:0", "worker:1"):
            writer.steps(2 + i, 100 * i, task=task)
    writer.event(7, "epoch", epoch=1, step=500, logs={"loss": 0.75, "val_loss": 0.5})
    writer.event(9.5, "backup", step=700)
    job = reader_of(writer, 10.5).refresh()
    assert (job.title, job.state, job.epoch, job.epochs, job.step, job.steps) == (
        "train.py", "runs", 2, 4, 800, 2000,
    )  # fmt: skip
    assert job.left_s == pytest.approx(12.0)
    assert (job.backup.step, job.backup.age_s, job.restarts_left) == (700, 1.0, 3)
    first, second = job.tasks
    assert (first.name, first.host, second.host, first.pid, first.state) == (
        "worker:0", "a", "here", 100, "runs",
    )  # fmt: skip
    assert (first.steps_per_s, first.rows_per_s, first.data, first.compute) == (100.0, 6400.0, 0.1, None)
    assert (first.host_bytes, first.heartbeat_s, first.log) == (3e8, 0.5, "worker-0.log")
    assert list(job.curve("loss")) == [(500, 0.75)]
    assert list(job.curve("val_loss")) == [(500, 0.5)]
    assert [step for step, _ in job.curve("rows_per_s")] == [200, 300, 400, 500, 600, 700, 800]
    assert job.config == [
        ("tasks", "worker:0 worker:1"), ("optimizer", "SGD"), ("global batch size", "64"),
    ]  # fmt: skip
    spans = [(s.task, s.name, s.begin - BEGAN, s.end - BEGAN) for s in job.timeline]
    assert spans == [("worker:0", "train", 2.0, 10.0), ("worker:1", "train", 2.0, 10.0)]


def test_a_failure_is_shown_with_the_restart_and_what_it_has_cost(writer):
    writer.begin()
    for task in ("worker:0", "worker:1"):
        writer.steps(2, 100, task=task)
        writer.steps(3, 200, task=task)
    writer.history(3.5, "ended", "worker:1", pid=101, exit_code=137)
    writer.history(
        3.5, "failed", "worker:1", pid=101, exit_code=137, detail="killed by SIGKILL", step=211, reached=212
    )
    writer.history(3.6, "failed", "worker:0", pid=100, exit_code=1, detail="lost worker:1")
    reader = reader_of(writer, 4)
    assert (job := reader.refresh()).state == "restarts"
    assert [task.state for task in job.tasks] == ["failed", "failed"]
    assert [(f.kind, f.step, f.task, f.text) for f in job.faults] == [
        ("failure", 211, "worker:1", "killed by SIGKILL")
    ]
    writer.history(4, "restart", detail="2 workers in 0 s")
    for i in range(2):
        writer.history(4, "started", f"worker:{i}", generation=1, pid=200 + i, detail="warm")
    job = reader.refresh()
    assert (job.state, [task.state for task in job.tasks]) == ("restarts", ["starts", "starts"])
    writer.steps(6.5, 160, 10, generation=1)
    writer.steps(6.4, 160, 10, "worker:1", generation=1)
    reader.clock[0] = BEGAN + 7
    job = reader.refresh()
    assert (job.state, job.generation, job.restarts, job.restarts_left) == ("runs", 1, 1, 2)
    assert [(f.kind, f.step, f.task, f.text) for f in job.faults][1:] == [
        ("restart", 211, None, "starts again: 2 workers in 0 s"),
        ("recovery", 150, "worker:0", "resumed at step 150, lost 62 steps, 3.0 s after the failure"),
    ]  # fmt: skip
    # Beyond the window, failures do not count.
    reader.clock[0] = BEGAN + 700
    assert reader.refresh().restarts_left == 3
    # A reader that begins now sees the same.
    fresh = reader_of(writer, 7)
    assert fresh.refresh().to_json() == job.to_json()


def test_a_parameter_server_has_memory_and_a_worker_only_what_it_measures(writer):
    writer.begin(1)
    writer.history(1, "started", "ps:0", pid=102, detail="cold")
    writer.event(3, "serves", "ps:0", seconds=0, step=0, memory=4e8)
    writer.steps(3, 100, data=0.0, exchange=0.04, rows=None)
    writer.steps(4, 200, data=0.0, exchange=0.04, rows=None)
    worker, server = reader_of(writer, 5).refresh().tasks
    # The rest of its time it may wait for the chief.
    assert (worker.exchange, worker.compute) == (0.04, None)
    assert (server.state, server.host_bytes, server.heartbeat_s) == ("serves", 4e8, 2.0)
    writer.steps(5, 300, data=0.0, exchange=0.04, compute=0.25)
    assert reader_of(writer, 6).refresh().tasks[0].compute == 0.25


def test_an_end_is_shown_and_its_clock_stops(writer):
    writer.begin(1)
    writer.steps(2, 100)
    writer.history(3, "ended", "worker:0", pid=100, exit_code=0)
    writer.history(3, "quit", exit_code=0)
    job = reader_of(writer, 100).refresh()
    assert (job.state, job.exit_code, job.now - BEGAN, job.tasks[0].state) == ("ended", 0, 3.0, "ended")


def test_a_launch_in_a_used_folder_is_shown_alone(writer):
    writer.begin(1)
    writer.steps(2, 900)
    writer.history(3, "quit", exit_code=1)
    reader = reader_of(writer, 50)
    assert reader.refresh().state == "failed"
    writer.history(40, "launched", pid=2)
    writer.history(41, "started", "worker:0", pid=300)
    writer.steps(43, 10, 10)
    job = reader.refresh()
    assert (job.state, job.step, job.faults, len(job.timeline)) == ("runs", 10, [], 1)


def test_tasks_of_an_engine_are_shown_by_their_events_alone(writer):
    (writer.root / "launch.json").unlink()
    for task in ("worker:0", "worker:1"):
        writer.steps(2, 100, task=task)
        writer.steps(3, 200, task=task)
    reader = reader_of(writer, 4)
    job = reader.refresh()
    assert (job.state, job.step, [task.state for task in job.tasks]) == ("runs", 200, ["runs", "runs"])
    reader.clock[0] = BEGAN + 400
    assert reader.refresh().state == "ended"


def test_fifty_tasks_of_a_hundred_thousand_steps_are_read_once(writer):
    writer.begin(50)
    lines = 200
    for i in range(50):
        task, text = f"worker:{i}", []
        for n in range(1, lines + 1):
            event = {"event": "steps", "from": BEGAN + n, "until": BEGAN + n + 1, "generation": 0}
            event |= {
                "step": 500 * n,
                "count": 500,
                "data": 0.1,
                "exchange": None,
                "rows": 32000,
                "host": 3e8,
            }
            text.append(json.dumps(event))
        (writer.root / f"events/{task.replace(':', '-')}.jsonl").write_text("\n".join(text) + "\n")
    for n in range(1, 2500):
        writer.event(n / 20, "logs", "worker:0", step=40 * n, logs={"loss": 1 / n if n != 1250 else 7.0})
    reader = reader_of(writer, lines + 2)
    job = reader.refresh()
    assert (len(job.tasks), job.step) == (50, 100_000)
    assert all(len(curve.points) <= 1000 for curve in job.curves)
    # The one that stands out is there.
    assert (50_000, 7.0) in job.curve("loss")
    assert len(json.dumps(job.to_json())) < 300_000
    before = reader.bytes_read
    assert before == sum(p.stat().st_size for p in (writer.root / "events").iterdir()) + (
        writer.root / "history.jsonl"
    ).stat().st_size  # fmt: skip
    writer.steps(lines + 2, 100_500)
    size = reader.bytes_read
    assert reader.refresh().step == 100_500
    last = (writer.root / "events/worker-0.jsonl").read_text().splitlines()[-1]
    assert reader.bytes_read - size == len(last) + 1


def test_a_half_written_line_waits_and_a_damaged_one_is_passed_over(writer):
    writer.begin(1)
    path = writer.root / "events/worker-0.jsonl"
    path.write_text('{"event": "steps", "from": "x"}\n[1]\nnull\n{"event": "ste')
    reader = reader_of(writer, 3)
    assert reader.refresh().step == 0
    with path.open("a") as file:
        file.write('ps"}\n')
    writer.steps(2, 100)
    assert reader.refresh().step == 100
    # Removed, or emptied as by `> worker-0.jsonl`.
    path.write_text("")
    writer.steps(3, 7, 7)
    assert reader.refresh().tasks[0].step == 7
