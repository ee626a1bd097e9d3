"""The chief's side of workers that come, go, and come again."""

import re
import threading
import time

import numpy as np
import pytest
from tests.support import LIMIT

from unisono._errors import ClusterError, OutOfRangeError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.chief import _workers
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._workers import BatchFunction, RunRequest, WorkerPool
from unisono.parameter_server.state._push import UsedBatches
from unisono.parameter_server.worker._batched_reply import BatchedReply
from unisono.parameter_server.worker._step_plan import StepPlan
from unisono.rpc._loopback import LoopbackNetwork
from unisono.rpc._ops import Op


class Worker:
    """Notes what it is told, and answers closures as the test wants."""

    def __init__(self, network, address, incarnation="1", answer=None):
        self.told, self.incarnation, self.answer = [], incarnation, answer or self.result
        self.rpc_server = network.rpc_server(address, self.handle)
        self.rpc_server.start()

    def result(self, frame):
        return frame.answer(Op.RESULT, {"plan": "p", "taken": {"i": [1, 2, 3, 4]}}, frame.arrays)

    def handle(self, client, frame):
        if frame.op is Op.HEARTBEAT:
            return None
        self.told.append((frame.op, dict(frame.meta)))
        if frame.op is Op.RUN and frame.meta["incarnation"] != self.incarnation:
            return frame.answer(Op.ERROR, {"kind": "WorkerLostError", "text": "started again"})
        if frame.op is Op.RUN:
            return self.answer(frame)
        return frame.answer(Op.OK, {"incarnation": self.incarnation})


def NEVER_TRACED(form):
    raise AssertionError(form)


def pool_of(network, workers=1, prepare=lambda request, form: None, **options):
    rpc_clients = [network.rpc_client(Task("worker", i), str(i)) for i in range(workers)]
    pool = WorkerPool(rpc_clients, Rules(), prepare, **options)
    pool.start()
    return pool


def until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


PLAN = StepPlan("digest", (), 0, (), (), ())


def test_a_worker_that_comes_late_gets_what_the_others_have():
    network = LoopbackNetwork()
    pool = pool_of(network, workers=2)
    pool.add_plan("p", PLAN, [b"program"])
    pool.make_dataset("d", b"function")
    pool.iterate("i", "d")
    first = Worker(network, "0")
    future = pool.queue.schedule(RunRequest("p", [np.ones(2)]))
    assert pool.queue.result(future).arrays[0].tolist() == [1, 1]
    assert [op for op, _ in first.told] == [Op.HELLO, Op.PROGRAM, Op.DATASET, Op.DATASET, Op.RUN]
    assert first.told[3][1] == {"iterate": "i", "of": "d", "used": [0]}
    pool.forget("i")
    late = Worker(network, "1")
    until(lambda: pool.queue.num_workers == 2)
    until(lambda: len(late.told) == 3)
    assert [op for op, _ in late.told] == [Op.HELLO, Op.PROGRAM, Op.DATASET]
    pool.close()


def test_a_restarted_worker_goes_on_where_its_datasets_were():
    network = LoopbackNetwork()
    pool = pool_of(network)
    worker = Worker(network, "0")
    pool.make_dataset("d", b"function")
    pool.iterate("i", "d")
    pool.queue.result(pool.queue.schedule(RunRequest("p")))
    worker.rpc_server.close()
    future = pool.queue.schedule(RunRequest("p"))
    again = Worker(network, "0", incarnation="2")
    pool.queue.result(future)
    told = [meta for op, meta in again.told if op is Op.DATASET]
    assert told == [{"make": "d"}, {"iterate": "i", "of": "d", "used": [4]}]
    assert again.told[-1][1]["incarnation"] == "2"
    # The number is that of the first attempt.
    assert again.told[-1][1]["closure"] == 1
    pool.close()


def test_closures_that_differ_in_their_numbers_and_small_arrays_are_one_message():
    network = LoopbackNetwork()
    pool = pool_of(network)
    function = BatchFunction("f", (0,), NEVER_TRACED)
    requests = [RunRequest("p", [np.int32(n)], function, ("i",)) for n in range(80)]
    requests[5] = RunRequest("p", [np.ones(2)])
    requests[9].arrays = [np.zeros(1 << 20)]
    requests[14].arrays = [np.int32(14), np.int32(0)]
    futures = [pool.queue.schedule(request) for request in requests]

    def answer(frame):
        numbers = frame.meta.get("closures")
        if numbers is None:
            return frame.answer(Op.RESULT, {"plan": "p"}, [np.float32(frame.meta["closure"])])
        assert [int(array) for array in frame.arrays] == numbers
        joint, sent = BatchedReply(frame, lambda each: sent.append(each)), []
        for each in joint.closures():
            number = each.meta["closure"]
            joint.add(number, each.answer(Op.RESULT, {"plan": "p"}, [np.float32(number)]))
        return sent[0]

    worker = Worker(network, "0", answer=answer)
    assert [float(pool.queue.result(f).arrays[0]) for f in futures] == list(range(80))
    runs = [meta for op, meta in worker.told if op is Op.RUN]
    counts = [len(meta.get("closures", [None])) for meta in runs]
    assert sum(counts) == 80
    assert counts[:14] == [4, *[1] * 12, 4]
    assert counts[-16:] == [1] * 16
    pool.close()


@pytest.mark.parametrize("kind", ["ZeroDivisionError", "WorkerLostError"])
def test_an_error_may_be_that_of_one_closure_or_of_the_message(kind):
    network = LoopbackNetwork()
    pool = pool_of(network)
    function = BatchFunction("f", (0,), NEVER_TRACED)
    futures = [pool.queue.schedule(RunRequest("p", function=function, iterators=("i",))) for _ in range(80)]
    failed = []

    def answer(frame):
        error = {"kind": kind, "text": "by this one"}
        numbers = frame.meta.get("closures", [frame.meta.get("closure")])
        if kind == "WorkerLostError" and not failed:
            failed.append(frame)
            return frame.answer(Op.ERROR, error)
        each = [{"op": int(Op.RESULT), "meta": {"plan": "p"}, "arrays": 0} for _ in numbers]
        if kind != "WorkerLostError" and 2 in numbers:
            each[2] = {"op": int(Op.ERROR), "meta": error, "arrays": 0}
        return frame.answer(Op.RESULT, {"each": each} if len(each) > 1 else each[0]["meta"])

    worker = Worker(network, "0", answer=answer)
    if kind == "WorkerLostError":
        pool.queue.join()
        assert all(f.result().plan == "p" for f in futures)
        again = [meta["closure"] for op, meta in worker.told if op is Op.RUN and meta["again"]]
        assert again[:4] == [0, 1, 2, 3]
    else:
        with pytest.raises(ZeroDivisionError, match="by this one"):
            pool.queue.join()
        assert futures[1].result().plan == futures[3].result().plan == "p"
    pool.close()


def test_states_are_the_same_in_every_attempt():
    network = LoopbackNetwork()
    states = iter(range(10))
    function = BatchFunction("f", (0,), NEVER_TRACED)

    def answer(frame):
        if not frame.meta["states"]:
            return frame.answer(Op.RESULT, {"needs": "form"})
        return frame.answer(Op.RESULT, {"plan": "p"}, frame.arrays)

    def prepare(request, form):
        function.states = lambda: [np.int32(next(states))]

    pool = pool_of(network, prepare=prepare)
    worker = Worker(network, "0", answer=answer)
    futures = [pool.queue.schedule(RunRequest(None, (), function, ("i",))) for _ in range(4)]
    assert sorted(int(pool.queue.result(f).arrays[0]) for f in futures) == [0, 1, 2, 3]
    assert all(meta["takes"] == ["i"] for op, meta in worker.told if op is Op.RUN)
    pool.close()


def test_a_closures_error_is_raised_and_others_run():
    network = LoopbackNetwork()

    def answer(frame):
        return frame.answer(Op.ERROR, {"kind": "OutOfRangeError", "text": "end"})

    pool = pool_of(network)
    Worker(network, "0", answer=answer)
    pool.queue.schedule(RunRequest("p"))
    with pytest.raises(OutOfRangeError, match="end"):
        pool.queue.join()
    pool.close()


def test_without_any_worker_the_error_names_them():
    pool = pool_of(LoopbackNetwork(), workers=2, absence_limit=0.3)
    pool.queue.schedule(RunRequest("p"))
    with pytest.raises(ClusterError, match=r"no answer from worker:0 at 0, worker:1 at 1 for 0\.3 s"):
        pool.queue.join()


def test_the_log_names_a_worker_that_is_away_once(monkeypatch, caplog):
    monkeypatch.setattr(_workers, "WARN_AFTER", 0.05)
    network = LoopbackNetwork()
    pool = pool_of(network, workers=2)
    until(lambda: len(caplog.records) == 2)
    assert re.match(r"worker:0 at 0 has been away for 0\.\d s. Others run its steps; ", caplog.messages[0])
    Worker(network, "1")
    until(lambda: pool.queue.num_workers == 1)
    # It has looked again, several times.
    until(lambda: pool._absent[0].tries >= 4)
    assert len(caplog.records) == 2
    pool.close()


def test_the_end_reaches_the_workers():
    network = LoopbackNetwork()
    worker = Worker(network, "0")
    pool = pool_of(network)
    until(lambda: pool.queue.num_workers == 1)
    pool.end(0)
    assert worker.told[-1] == (Op.END, {"code": 0})


def test_a_worker_that_missed_a_program_is_told_all_again():
    network = LoopbackNetwork()
    pool = pool_of(network)
    worker = Worker(network, "0")
    until(lambda: pool.queue.num_workers == 1)
    handle, worker.dropped = worker.rpc_server._handler, []

    def lose_first_program(client, frame):
        if frame.op is Op.PROGRAM and not worker.dropped:
            worker.dropped.append(frame)
            threading.Thread(target=worker.rpc_server.close).start()
            return None
        return handle(client, frame)

    worker.rpc_server._handler = lose_first_program
    pool.add_plan("p", PLAN, [b"program"])
    until(lambda: worker.dropped and pool.queue.num_workers == 0)
    again = Worker(network, "0")
    pool.queue.result(pool.queue.schedule(RunRequest("p")))
    assert [op for op, _ in again.told if op is not Op.HELLO] == [Op.PROGRAM, Op.RUN]
    pool.close()


def test_a_worker_that_ends_with_nothing_to_run_is_missed():
    network = LoopbackNetwork()
    pool = pool_of(network, workers=2)
    workers = [Worker(network, str(i)) for i in range(2)]
    until(lambda: pool.queue.num_workers == 2)
    assert pool.away == []
    workers[0].rpc_server.close()
    until(lambda: pool.queue.num_workers == 1)
    assert pool.away == ["0"]
    pool.close()


@pytest.mark.parametrize(("told", "late"), [((), 0.5), (("0",), 2 * LIMIT)])
def test_the_end_of_a_job_waits_for_a_worker_that_may_just_be_starting(monkeypatch, told, late):
    monkeypatch.setattr(_workers, "_INFORMED_WITHIN", 0.05)
    monkeypatch.setattr(_workers, "_LATE_WITHIN", late)
    pool = pool_of(LoopbackNetwork())
    began = time.monotonic()
    pool.end(0, told)
    assert (time.monotonic() - began >= late) == (not told)


def test_a_restarted_worker_goes_on_behind_the_batches_in_the_servers_updates():
    network = LoopbackNetwork()
    # The chief knows of 4; the update with the 6th batch was applied, and its acknowledgement lost. That of
    # the 5th was not: its closure had ended with another worker's batch.
    used = {"i@0": UsedBatches(6, [2, 5]), "i@1": UsedBatches(9), "other@0": UsedBatches(7)}
    pool = pool_of(network, find_used=lambda: used)
    worker = Worker(network, "0")
    pool.make_dataset("d", b"function")
    pool.iterate("i", "d")
    pool.queue.result(pool.queue.schedule(RunRequest("p")))
    assert [meta["used"] for op, meta in worker.told if "iterate" in meta] == [[0]]
    worker.rpc_server.close()
    again = Worker(network, "0", incarnation="2")
    until(lambda: len(again.told) >= 3)
    assert [meta for op, meta in again.told if op is Op.HELLO][-1]["anew"] is True
    assert [meta["used"] for op, meta in again.told if "iterate" in meta] == [[6, 5]]
    pool.close()


def test_a_worker_stays_away_while_the_servers_do_not_say_how_far_its_data_are():
    network = LoopbackNetwork()
    asked = []

    def find_used():
        asked.append(1)
        if len(asked) == 1:
            raise ClusterError("no server answers")
        return {}

    pool = pool_of(network, find_used=find_used)
    worker = Worker(network, "0")
    pool.make_dataset("d", b"function")
    until(lambda: pool.queue.num_workers == 1)
    worker.rpc_server.close()
    until(lambda: pool.queue.num_workers == 0)
    Worker(network, "0", incarnation="2")
    until(lambda: pool.queue.num_workers == 1)
    assert len(asked) >= 2
    pool.close()


def test_a_worker_that_is_lost_just_before_it_may_run_closures_is_missed():
    network = LoopbackNetwork()
    pool = pool_of(network)
    came, lost = pool.queue.worker_came, []

    def lose_first(number):
        if not lost:
            lost.append(number)
            worker.rpc_server.close()
        came(number)

    pool.queue.worker_came = lose_first
    worker = Worker(network, "0")
    pool.add_plan("p", PLAN, [b"program"])
    until(lambda: lost)
    until(lambda: 0 in pool._absent)
    again = Worker(network, "0", incarnation="2")
    assert pool.queue.result(pool.queue.schedule(RunRequest("p"))).plan == "p"
    assert [op for op, _ in again.told if op in (Op.PROGRAM, Op.RUN)] == [Op.PROGRAM, Op.RUN]
    pool.close()


def test_an_answer_that_is_there_at_once_is_noted_without_the_lock():
    """Who has the queue's lock may want the pool's: one of them would wait for ever."""
    network = LoopbackNetwork()
    pool = WorkerPool([network.rpc_client(Task("worker", 0), "0")], Rules(), NEVER_TRACED)
    send, note, owned = pool._send, pool._on_instructed, []

    def answered(worker, op, *given, **options):
        sent = send(worker, op, *given, **options)
        if op in (Op.PROGRAM, Op.DATASET):
            sent.result(LIMIT)
        return sent

    def noted(*given):
        owned.append(pool._lock._is_owned())
        note(*given)

    pool._send, pool._on_instructed = answered, noted
    pool.make_dataset("d", b"function")
    Worker(network, "0")
    pool.start()
    until(lambda: pool.queue.num_workers)
    pool.add_plan("p", PLAN, [b"program"])
    until(lambda: len(owned) >= 2)
    pool.close()
    assert not any(owned)


def test_what_a_worker_was_told_in_an_earlier_life_is_no_error_of_the_program():
    network = LoopbackNetwork()
    pool = pool_of(network)
    worker = Worker(network, "0")
    until(lambda: pool.queue.num_workers == 1)
    handle, refused = worker.rpc_server._handler, []

    def refuse_once(client, frame):
        if frame.op is Op.PROGRAM and not refused:
            refused.append(frame)
            return frame.answer(Op.ERROR, {"kind": "WorkerLostError", "text": "started again"})
        return handle(client, frame)

    worker.rpc_server._handler = refuse_once
    pool.add_plan("p", PLAN, [b"program"])
    # It is told all again, and the program sees nothing of that.
    assert pool.queue.result(pool.queue.schedule(RunRequest("p"))).plan == "p"
    assert len(refused) == 1
    pool.queue.join()
    pool.close()
