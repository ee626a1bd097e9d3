"""The history of a job that is made of the answers of its workers."""

import json
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from unisono._errors import ClusterError
from unisono.rpc._frames import Frame, blob
from unisono.rpc._ops import Op
from unisono.watch import _worker_folder
from unisono.watch._job_reader import JobReader
from unisono.watch._worker_folder import WorkerFolder
from unisono.watch.web._page_reader import PageReader

NOW = 1_900_000_000.0
ADDRESSES = {"worker:0": "h0:2222", "worker:1": "h1:2222"}


class Worker:
    """A worker and its client: answers at once, or not at all."""

    def __init__(self, index):
        self.task, self.index, self.pid = f"worker:{index}", index, 100 + index
        self.file, self.data, self.bytes_sent = "1", b"", 0
        self.began, self.clock, self.most = NOW, NOW, 1000
        self.more = {}
        self.is_there, self.trouble, self.waiting = True, "connection refused", None

    def send(self, frame, timeout=None):
        assert frame.op is Op.STATUS
        if "until" in frame.meta:
            if self.waiting is None:
                self.waiting = frame, Future()
            self.waiting = frame, self.waiting[1]
            return self.waiting[1]
        future = Future()
        if self.is_there:
            future.set_result(self.answer(frame))
        else:
            future.set_exception(ClusterError(self.trouble))
        return future

    def answer(self, frame, **more):
        offset = frame.meta["offset"] if frame.meta["file"] == self.file else 0
        data = self.data[offset : offset + self.most]
        self.bytes_sent += len(data)
        facts = {"watch": self.task, "tasks": ADDRESSES, "title": "train.py", "command": "train.py --lr 1"}
        facts |= {
            "host": f"node{self.index}",
            "pid": self.pid,
            "generation": 0,
            "began": self.began,
            "started": NOW,
        }
        facts |= {"file": self.file, "offset": offset, "size": len(self.data)}
        return frame.answer(Op.OK, facts | self.more | more, [blob(data)])

    def end(self, code, text=""):
        (frame, future), self.waiting = self.waiting, None
        future.set_result(self.answer(frame, exit_code=code, text=text))
        self.lose()

    def lose(self):
        self.is_there = False
        if self.waiting is not None:
            self.waiting[1].set_exception(ClusterError("the connection was lost"))
            self.waiting = None

    def start(self):
        self.began = self.clock = NOW + 8.0
        self.is_there, self.pid, self.file, self.data = True, self.pid + 100, f"{self.pid}", b""

    def step(self, step, count=1):
        self.clock += 1e-3
        line = {
            "event": "steps",
            "from": self.clock - 1e-3,
            "until": self.clock,
            "generation": 0,
            "step": step,
        }
        self.data += json.dumps(line | {"count": count, "data": None, "exchange": None}).encode() + b"\n"

    def close(self):
        self.is_there = False


class Watched:
    """Two workers that are watched by the address of the second; `see` looks at them after some seconds."""

    def __init__(self):
        self.workers, self.now, self.reader = [Worker(0), Worker(1)], 0.0, None
        self.connect = {f"h{i}:2222": worker for i, worker in enumerate(self.workers)}.__getitem__

    def watch(self):
        folder = WorkerFolder(["h1:2222"], self.connect, lambda: self.now)
        self.reader = JobReader(folder, lambda: NOW + self.now)
        return self.see()

    def see(self, seconds=1.0):
        self.now += seconds
        self.reader.refresh()
        return self.reader.refresh()


@pytest.fixture
def watched(tuned, monkeypatch):
    found = Watched()
    clocks = SimpleNamespace(time=lambda: NOW + found.now, monotonic=time.monotonic, sleep=time.sleep)
    tuned(_worker_folder, _OTHERS_SECONDS=1.0, _ANSWER_SECONDS=0.05)
    monkeypatch.setattr(_worker_folder, "time", clocks)
    yield found
    if found.reader is not None:
        found.reader.folder.close()


def states(job):
    return [job.state, *(task.state for task in job.tasks)]


def test_one_address_shows_all_workers_and_each_byte_is_sent_once(watched):
    for worker in watched.workers:
        worker.step(1)
        worker.step(2)
    job = watched.watch()
    assert (job.title, job.command, job.started) == ("train.py", "train.py --lr 1", NOW)
    assert states(job) == ["runs"] * 3
    assert [(t.name, t.host, t.pid, t.step) for t in job.tasks] == [
        ("worker:0", "node0", 100, 2),
        ("worker:1", "node1", 101, 2),
    ]
    watched.workers[0].step(3)
    assert watched.see().tasks[0].step == 3
    assert [worker.bytes_sent for worker in watched.workers] == [len(w.data) for w in watched.workers]


def test_more_events_than_one_answer_holds_are_there_at_once(watched):
    for step in range(50):
        watched.workers[0].step(step + 1)
    assert len(watched.workers[0].data) > 3000
    assert watched.watch().tasks[0].step == 50


def test_a_file_that_begins_again_is_read_from_its_beginning(watched):
    worker = watched.workers[0]
    for step in range(3):
        worker.step(step + 1)
    watched.watch()
    # As the port does where more is known than there is.
    worker.data, worker.most = b"", 1 << 20
    worker.step(1)
    worker.answer, known = (lambda frame, **more: Worker.answer(worker, from_start(frame), **more)), []

    def from_start(frame):
        known.append(frame.meta["offset"])
        is_more = frame.meta["offset"] > len(worker.data)
        return frame if not is_more else Frame(Op.STATUS, frame.request, meta={**frame.meta, "offset": 0})

    watched.see()
    worker.step(4)
    assert watched.see().tasks[0].step == 4
    assert known[-1] < known[0]
    folder = watched.reader.folder
    received = folder.read("events/worker-0.jsonl", 0, 1 << 20)
    assert received.endswith(b"\n" + worker.data)


def test_before_its_first_step_a_job_starts(watched):
    assert states(watched.watch()) == ["starts"] * 3


def test_a_program_that_ends_is_known_at_once_with_its_last_step(watched):
    watched.watch()
    for worker in watched.workers:
        worker.step(7)
        worker.end(0)
    job = watched.see(0.0)
    assert (states(job), job.exit_code, job.step) == (["ended"] * 3, 0, 7)


def test_an_error_of_the_program_is_told_and_ends_the_job_after_a_while(watched):
    watched.watch()
    watched.workers[1].end(1, "ValueError: no data")
    watched.workers[0].lose()
    assert states(watched.see()) == ["restarts", "starts", "failed"]
    job = watched.see(10.0)
    assert states(job) == ["restarts", "failed", "failed"]
    assert [(f.kind, f.task, f.text) for f in job.faults] == [("failure", "worker:1", "ValueError: no data")]
    assert (watched.see(60.0).state, watched.see().exit_code) == ("failed", 1)


def test_a_restart_and_its_recovery_are_seen(watched):
    for worker in watched.workers:
        worker.step(40, count=40)
    watched.watch()
    for worker in watched.workers:
        worker.lose()
    assert states(watched.see()) == ["runs"] * 3
    assert states(watched.see(6.0)) == ["restarts", "failed", "failed"]
    for worker in watched.workers:
        worker.start()
        worker.step(31)
    job = watched.see()
    assert states(job) == ["runs"] * 3
    assert [fault.kind for fault in job.faults] == ["failure", "restart", "recovery"]
    assert "connection refused" in job.faults[0].text
    assert "resumed at step 30, lost 10 steps" in job.faults[2].text
    assert job.restarts == 1


def test_processes_that_are_replaced_between_two_looks_are_one_restart(watched):
    watched.watch()
    for worker in watched.workers:
        worker.lose()
        worker.start()
    watched.workers[1].is_there = False
    watched.see()
    watched.workers[1].is_there = True
    job = watched.see(10.0)
    assert [(f.kind, f.text) for f in job.faults] == [
        ("failure", "another process has taken its place"),
        ("restart", "starts again: other processes answer"),
    ]
    assert states(job) == ["restarts", "starts", "starts"]


def test_a_job_that_starts_again_long_after_its_end_is_another_one(watched):
    watched.workers[0].step(9)
    watched.watch()
    for worker in watched.workers:
        worker.end(0)
    assert watched.see().state == "ended"
    for worker in watched.workers:
        worker.start()
    watched.workers[0].step(2)
    watched.see()
    job = watched.see()
    assert (states(job), job.step, job.faults) == (["runs", "runs", "starts"], 2, [])


def test_a_worker_that_the_watcher_does_not_reach_says_so(watched):
    watched.workers[0].is_there = False
    watched.workers[1].step(3)
    assert states(watched.watch()) == ["runs", "no answer", "runs"]
    assert states(watched.see(100.0)) == ["runs", "no answer", "runs"]


def test_an_address_where_no_worker_answers_is_an_error(watched):
    watched.workers[1].is_there = False
    with pytest.raises(ClusterError, match="connection refused"):
        watched.watch()


@pytest.mark.parametrize(
    "facts",
    [{"watch": 3}, {"watch": "../x"}, {"tasks": 3}, {"tasks": {"worker:0": 3}}, {"offset": -1}, {"size": "x"},
     {"began": "x", "pid": []}, {"generation": 1e300}],
)  # fmt: skip
def test_what_no_worker_tells_does_no_harm(watched, facts):
    worker = watched.workers[1]
    worker.step(1)
    honest = worker.answer
    worker.answer = lambda frame, **more: honest(frame, **more, **facts)
    try:
        job = watched.watch()
    except ClusterError:
        assert "watch" in facts
    else:
        assert [task.name for task in job.tasks][-1] == "worker:1"


def test_a_page_shows_every_step_of_a_long_job(watched):
    """The job and its timeline are read one after the other, in pieces."""
    worker = watched.workers[0]
    for step in range(3000):
        worker.step(step + 1)
    worker.most = 1 << 20
    watched.watch()
    row = PageReader(watched.reader).read()["timeline"]["worker:0"]
    assert "step 3000" in row["steps"][-1][3]


def test_a_worker_that_was_cut_off_answers_again(watched):
    watched.watch()
    worker = watched.workers[1]
    worker.lose()
    watched.see()
    assert states(watched.see(6.0)) == ["restarts", "starts", "failed"]
    worker.is_there = True
    worker.step(1)
    watched.see()
    job = watched.see()
    assert (states(job), [f.text for f in job.faults][1:]) == (
        ["runs", "starts", "runs"],
        ["worker:1 answers again"],
    )


def test_a_job_of_a_later_generation_may_begin_again_with_the_first(watched):
    watched.workers[0].more = watched.workers[1].more = {"generation": 3}
    watched.watch()
    for worker in watched.workers:
        worker.end(0)
    assert watched.see().state == "ended"
    for worker in watched.workers:
        worker.start()
        worker.more = {}
    watched.see()
    assert states(watched.see()) == ["starts"] * 3


def test_a_worker_that_the_next_generation_lacks_is_no_failure(watched):
    watched.watch()
    for worker in watched.workers:
        worker.lose()
    watched.see(1.0)
    watched.see(6.0)
    one = watched.workers[1]
    one.start()
    one.more = {"generation": 1, "tasks": {"worker:1": "h1:2222"}}
    watched.see()
    job = watched.see(100.0)
    assert [task.name for task in job.tasks] == ["worker:1"]
    assert [fault.kind for fault in job.faults] == ["failure", "restart"]
