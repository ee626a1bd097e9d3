"""A worker with servers that the test plays."""

import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import cloudpickle
import numpy as np
import pytest
from tests.support import LIMIT

from unisono._errors import ContextError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.server._traffic import Traffic
from unisono.parameter_server.state._push import UsedBatches
from unisono.parameter_server.worker._batched_reply import taken_apart
from unisono.parameter_server.worker._step_plan import PushPlan, StepPlan
from unisono.parameter_server.worker._step_worker import StepWorker, current_worker_index
from unisono.rpc._calls import ClientId, StaleValuesError
from unisono.rpc._frames import Frame, blob
from unisono.rpc._ops import Op

CHIEF, OTHER = ClientId(b"1", Task("chief", 0)), ClientId(b"2", Task("worker", 1))

#: Adds the pulled value, a state and the second array of the call. The sum is pushed; the result is its rest
#: after a division by 100.
PLAN = StepPlan("add", ((0, 5),), 1, (1,), (PushPlan(0, (0,), {"adds": [5]}),), (1,))


class Servers:
    """Keeps what was pulled and pushed; the test acknowledges pushes."""

    def __init__(self):
        self.pulls, self.pushes, self.traffic = [], queue.Queue(), Traffic()
        self.used = {}

    def used_batches(self):
        return self.used

    def pull(self, keys):
        self.pulls.append(tuple(keys))
        done = Future()
        done.set_result([np.float32(100)] * len(keys))
        return done

    def take_until(self, future):
        """Others set the futures of these tests."""

    def rows(self, keys, indices):
        raise AssertionError("the steps of this file use no tables")

    def push(self, pushes, pulls):
        done = [Future() for _ in pushes]
        for push, future in zip(pushes, done, strict=True):
            arrays = [float(x) for x in push.arrays]
            self.pushes.put((push.server, push.closure, push.watermark, push.fields, arrays, future))
        return done, None if pulls is None else self.pull(pulls)


class Sums:
    """A program that is compiled when it is first called."""

    def __init__(self):
        self.compiled_count = 0

    def __call__(self, *given):
        self.compiled_count = 1
        return [sum(given), np.float32(sum(given) % 100)]


class Chief:
    """Sends requests to a worker and keeps its answers."""

    def __init__(self):
        self.servers, self.answers = Servers(), queue.Queue()
        program = self.program = Sums()
        program.compiled_count = 1
        self.worker = StepWorker(
            1,
            2,
            self.servers,
            lambda digest, data: program,
            lambda client, answer: self.answers.put(answer),
            lambda client: client == CHIEF,
        )
        self.worker.start()
        self.incarnation = self.ask(Op.HELLO).meta["incarnation"]

    def ask(self, op, meta=None, arrays=(), client=CHIEF, generation=0):
        answer = self.worker.handle(client, Frame(op, 1, generation, meta or {}, list(arrays)))
        return self.answers.get(timeout=LIMIT) if answer is None else answer

    def run(self, number, plan="p", arrays=(), **meta):
        meta = {
            "closure": number,
            "watermark": 0,
            "incarnation": self.incarnation,
            "states": 1,
            "plan": plan,
            **meta,
        }
        self.worker.handle(CHIEF, Frame(Op.RUN, 1, 0, meta, list(arrays)))

    def add_plan(self, plan=PLAN, **meta):
        meta = {"name": "p", "plan": plan.to_meta(), "function": None, "signature": None, **meta}
        return self.ask(Op.PROGRAM, meta, [blob(b"program")])


@pytest.fixture
def chief():
    made = Chief()
    yield made
    made.worker.close()


def test_a_closure_is_answered_when_its_push_is_acknowledged(chief):
    assert chief.add_plan().op is Op.OK
    chief.run(7, arrays=[np.float32(1), np.float32(10), np.float32(20)])
    server, closure, watermark, meta, pushed, done = chief.servers.pushes.get(timeout=LIMIT)
    assert (server, closure, watermark, meta, pushed) == (0, 7, 0, {"adds": [5]}, [121.0])
    assert chief.servers.pulls == [((0, 5),)]
    assert chief.answers.empty()
    done.set_result(None)
    answer = chief.answers.get(timeout=LIMIT)
    assert (answer.op, answer.meta["plan"], float(answer.arrays[0])) == (Op.RESULT, "p", 21.0)


def test_closures_of_one_message_are_answered_in_one(chief):
    plan = StepPlan("add", ((0, 5),), 0, (), (PushPlan(0, (0,), {"adds": [5]}),), (1,))
    chief.add_plan(plan)
    chief.run(None, states=0, closures=[4, 5, 6])
    pushed = [chief.servers.pushes.get(timeout=LIMIT) for _ in range(3)]
    assert [push[1] for push in pushed] == [4, 5, 6]
    # In the order of the closures, whichever is acknowledged first.
    for at in (2, 0):
        pushed[at][-1].set_result(None)
    assert chief.answers.empty()
    pushed[1][-1].set_result(None)
    found = taken_apart(chief.answers.get(timeout=LIMIT))
    assert [(answer.op, answer.meta["plan"], len(answer.arrays)) for answer in found] == [
        (Op.RESULT, "p", 1)
    ] * 3


def test_after_an_error_the_rest_of_a_message_is_not_begun(chief):
    chief.add_plan(StepPlan("add", (), 0, (3,), (), ()))
    chief.run(None, states=0, closures=[4, 5])
    first, second = taken_apart(chief.answers.get(timeout=LIMIT))
    assert (first.op, first.meta["kind"]) == (Op.ERROR, "IndexError")
    assert (second.op, second.meta["kind"]) == (Op.ERROR, "CancelledError")
    assert chief.servers.pushes.empty()


def test_a_step_that_was_compiled_runs_with_what_is_there_then(chief):
    chief.add_plan()
    chief.program.compiled_count = 0
    pull = chief.servers.pull

    def changing(keys):
        pull(keys)
        done = Future()
        done.set_result([np.float32(100 * len(chief.servers.pulls))])
        return done

    chief.servers.pull = changing
    for number in range(2):
        chief.run(number, arrays=[np.float32(0)] * 3)
        pushed = chief.servers.pushes.get(timeout=LIMIT)
        # The first one pulls twice; the second is not compiled.
        assert (pushed[1], pushed[4]) == (number, [200.0 + 100 * number])
    assert len(chief.servers.pulls) == 3


def test_values_are_pulled_behind_the_pushes_of_the_closure_before(chief):
    chief.add_plan()
    order, pull, push = [], chief.servers.pull, chief.servers.push
    came = threading.Event()
    chief.servers.pull = lambda keys: order.append("pull") or (came.wait(LIMIT) and pull(keys))
    chief.servers.push = lambda pushes, pulls: order.append(("push", pulls)) or push(pushes, pulls)
    for number in range(3):
        chief.run(number, arrays=[np.float32(0)] * 3)
    came.set()
    assert [chief.servers.pushes.get(timeout=LIMIT)[1] for _ in range(3)] == [0, 1, 2]
    # In the pushes, where the next closure had come: one message for both. No push was acknowledged.
    assert order == ["pull", ("push", ((0, 5),)), "pull", ("push", ((0, 5),)), "pull", ("push", None)]
    chief.run(3, arrays=[np.float32(0)] * 3)
    assert chief.servers.pushes.get(timeout=LIMIT)[1] == 3
    # One that comes later pulls what is there then, as the bound of staleness assumes.
    assert order[-2:] == ["pull", ("push", None)]


def test_a_pull_whose_push_failed_is_repeated(chief):
    chief.add_plan()
    push, came = chief.servers.push, threading.Event()
    pull = chief.servers.pull
    chief.servers.pull = lambda keys: came.wait(LIMIT) and pull(keys)

    def refused(pushes, pulls):
        done, pulled = push(pushes, pulls)
        if pulled is not None:
            pulled = Future()
            pulled.set_exception(ValueError("refused"))
        return done, pulled

    chief.servers.push = refused
    for number in range(2):
        chief.run(number, arrays=[np.float32(0)] * 3)
    came.set()
    assert [chief.servers.pushes.get(timeout=LIMIT)[1] for _ in range(2)] == [0, 1]
    assert len(chief.servers.pulls) == 3


def test_a_failed_push_is_the_closures_error(chief):
    chief.add_plan()
    chief.run(0, arrays=[np.float32(0)] * 3)
    chief.servers.pushes.get(timeout=LIMIT)[-1].set_exception(ValueError("refused"))
    answer = chief.answers.get(timeout=LIMIT)
    assert (answer.op, answer.meta) == (Op.ERROR, {"kind": "ValueError", "text": "refused"})


def test_batches_of_an_unknown_form_are_kept_for_the_next_attempt(chief):
    batches = cloudpickle.dumps(lambda context: [np.float32(3), np.float32(4)])
    chief.ask(Op.DATASET, {"make": "d"}, [blob(batches)])
    chief.ask(Op.DATASET, {"iterate": "i", "of": "d"})
    call = {"function": "f", "takes": ["i"], "states": 0}
    chief.run(0, plan=None, **call)
    form = chief.answers.get(timeout=LIMIT).meta["needs"]
    assert form == '{"t":[["float32",[]]]}'
    chief.add_plan(StepPlan("add", (), 0, (0,), (), (1,)), name="q", function="f", signature=form)
    for number, expected in enumerate([3.0, 4.0]):
        chief.run(number, plan=None, **call)
        answer = chief.answers.get(timeout=LIMIT)
        assert (answer.meta["plan"], answer.meta["taken"]) == ("q", {"i": [number + 1]})
        assert float(answer.arrays[0]) == expected
    chief.run(2, plan=None, **call)
    assert chief.answers.get(timeout=LIMIT).meta["kind"] == "OutOfRangeError"


def test_who_is_not_the_chief_is_refused(chief):
    answer = chief.ask(Op.DATASET, {"make": "d"}, [blob(b"anything")], client=OTHER)
    assert (answer.op, answer.meta["kind"]) == (Op.ERROR, "ContextError")


def test_closures_of_an_earlier_life_are_refused(chief):
    answer = chief.ask(Op.RUN, {"incarnation": "another"})
    assert (answer.op, answer.meta["kind"]) == (Op.ERROR, "WorkerLostError")


def test_cancelled_closures_are_not_run(chief):
    chief.add_plan()
    chief.ask(Op.CANCEL, {"first": 0, "below": 5})
    chief.run(4, arrays=[np.float32(0)] * 3)
    assert chief.answers.get(timeout=LIMIT).meta["kind"] == "CancelledError"
    assert chief.servers.pushes.empty()


def test_the_chief_ends_the_worker(chief):
    assert chief.ask(Op.END, {"code": 3}).op is Op.OK
    assert chief.worker.ended.is_set()
    assert chief.worker.exit_code == 3


def test_the_workers_number_is_known_in_its_functions(chief):
    chief.ask(
        Op.DATASET,
        {"make": "d"},
        [blob(cloudpickle.dumps(lambda context: [np.int32(current_worker_index())]))],
    )
    chief.ask(Op.DATASET, {"iterate": "i", "of": "d"})
    form = '{"t":[["int32",[]]]}'
    chief.add_plan(StepPlan("add", (), 0, (0,), (), (1,)), name="q", function="f", signature=form)
    chief.run(0, plan=None, function="f", takes=["i"], states=0)
    assert float(chief.answers.get(timeout=LIMIT).arrays[0]) == 1.0
    with pytest.raises(ContextError, match="outside of them"):
        current_worker_index()


def test_a_closure_that_came_before_its_plan_runs_by_it(chief):
    chief.ask(Op.DATASET, {"make": "d"}, [blob(cloudpickle.dumps(lambda context: Slow()))])
    chief.ask(Op.DATASET, {"iterate": "i", "of": "d"})
    chief.run(0, plan=None, function="f", takes=["i"], states=0)
    plan = StepPlan("add", (), 0, (0,), (), (1,)).to_meta()
    meta = {"name": "q", "plan": plan, "function": "f", "signature": '{"t":[["float32",[]]]}'}
    # While the thread that computes waits for the batch.
    assert chief.worker.handle(CHIEF, Frame(Op.PROGRAM, 1, 0, meta, [blob(b"program")])) is None
    READY.set()
    assert float(chief.answers.get(timeout=LIMIT).arrays[0]) == 9.0


READY = threading.Event()


class Slow:
    """One batch, which is there when the test says so."""

    def __iter__(self):
        yield READY.wait(LIMIT) and np.float32(9)


def test_a_chief_that_starts_again_begins_anew_and_the_one_before_is_refused(chief):
    chief.add_plan()
    assert chief.ask(Op.HELLO).meta["incarnation"] == chief.incarnation
    hello = {"chief": "second"}
    incarnation = chief.ask(Op.HELLO, hello, generation=3).meta["incarnation"]
    assert incarnation != chief.incarnation
    assert chief.ask(Op.HELLO, hello, generation=3).meta["incarnation"] == incarnation
    # What the first one has sent, and arrives now; and the first one itself.
    chief.run(7)
    assert (
        chief.worker.handle(CHIEF, Frame(Op.PROGRAM, 1, 2, {"name": "p"})).meta["kind"] == "WorkerLostError"
    )
    answer = chief.ask(Op.HELLO)
    assert (answer.op, "another one has taken over" in answer.meta["text"]) == (Op.ERROR, True)
    answer = chief.ask(Op.END, {"code": 1}, generation=2)
    assert (answer.op, chief.worker.ended.is_set()) == (Op.ERROR, False)
    assert chief.servers.pushes.empty()
    # Its programs are not known any more.
    call = {"closure": 0, "watermark": 0, "incarnation": incarnation, "states": 0, "plan": "p"}
    assert chief.ask(Op.RUN, call, generation=3).meta["kind"] == "KeyError"


def wait_for_queue(chief, count):
    """Wait until the worker has begun all but so many closures."""
    deadline = time.monotonic() + LIMIT
    while chief.worker._tasks.qsize() > count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_waits_of_an_earlier_chief_is_not_run(chief):
    chief.add_plan()
    never = Future()
    chief.servers.pull = lambda keys: never
    chief.run(0, arrays=[np.float32(0)] * 3)
    chief.run(1, arrays=[np.float32(0)] * 3)
    wait_for_queue(chief, 1)
    chief.ask(Op.HELLO, {"chief": "second"}, generation=3)
    never.set_result([np.float32(0)])
    # The first one was under way; its push is refused by the servers, whose chief is the second one, too.
    assert chief.servers.pushes.get(timeout=LIMIT)[1] == 0
    assert chief.answers.get(timeout=LIMIT).meta["kind"] == "WorkerLostError"
    assert chief.servers.pushes.empty()


def test_a_closure_whose_values_a_server_has_lost_is_to_run_again(chief):
    chief.add_plan()
    chief.run(0, arrays=[np.float32(0)] * 3)
    chief.servers.pushes.get(timeout=LIMIT)[-1].set_exception(StaleValuesError("pull again"))
    assert chief.answers.get(timeout=LIMIT).meta["kind"] == "WorkerLostError"


def own_batches(chief, count):
    """Let the worker have a dataset whose batches are pushed to a server."""
    batches = cloudpickle.dumps(lambda context: [np.float32(i) for i in range(count)])
    chief.ask(Op.DATASET, {"make": "d"}, [blob(batches)])
    chief.ask(Op.DATASET, {"iterate": "i", "of": "d"})
    plan = StepPlan("add", (), 0, (0,), (PushPlan(0, (0,), {"adds": [5]}),), (1,))
    chief.add_plan(plan, name="q", function="f", signature='{"t":[["float32",[]]]}')


def acknowledged(applied):
    return Frame(Op.OK, meta={"applied": applied})


CALL = {"plan": None, "function": "f", "takes": ["i"], "states": 0}


def test_a_push_says_how_far_the_worker_s_own_data_are(chief):
    own_batches(chief, 3)
    for number in range(2):
        chief.run(number, **CALL)
        *_, meta, pushed, done = chief.servers.pushes.get(timeout=LIMIT)
        assert (meta, pushed) == ({"adds": [5], "used": {"i@1": [number + 1]}}, [float(number)])
        done.set_result(acknowledged(True))
        # The servers know, so that the chief need not.
        assert chief.answers.get(timeout=LIMIT).meta["taken"] == {}


@pytest.mark.parametrize(("applied", "following"), [(False, 0.0), (True, 1.0)])
def test_a_closure_that_a_lost_worker_had_pushed_uses_no_second_batch(chief, applied, following):
    own_batches(chief, 3)
    chief.run(0, again=True, **CALL)
    chief.run(1, **CALL)
    *_, pushed, done = chief.servers.pushes.get(timeout=LIMIT)
    assert pushed == [0.0]
    # The next closure waits: which batch it takes is not known yet.
    assert chief.servers.pushes.empty()
    done.set_result(acknowledged(applied))
    assert chief.answers.get(timeout=LIMIT).op is Op.RESULT
    *_, pushed, done = chief.servers.pushes.get(timeout=LIMIT)
    assert pushed == [following]
    done.set_result(acknowledged(True))


def test_a_batch_whose_push_was_applied_is_kept_where_the_answer_was_lost(chief):
    """Found by the simulation: the push was sent again, and the batch was used a second time."""
    own_batches(chief, 3)
    chief.servers.used = {"i@0": UsedBatches(7), "i@1": UsedBatches(1)}
    chief.run(0, again=True, **CALL)
    chief.run(1, **CALL)
    chief.servers.pushes.get(timeout=LIMIT)[-1].set_result(acknowledged(False))
    assert chief.answers.get(timeout=LIMIT).op is Op.RESULT
    *_, pushed, done = chief.servers.pushes.get(timeout=LIMIT)
    assert pushed == [1.0]
    done.set_result(acknowledged(True))


def test_a_worker_that_was_missed_drops_what_waits_and_finishes_what_it_has_begun(chief):
    own_batches(chief, 3)
    chief.run(0, **CALL)
    *_, done = chief.servers.pushes.get(timeout=LIMIT)
    waiting = Future()
    chief.servers.pull = lambda keys: waiting
    chief.add_plan()
    chief.run(1, arrays=[np.float32(0)] * 3)
    chief.run(2, **CALL)
    wait_for_queue(chief, 1)
    incarnation = chief.incarnation
    assert chief.worker.handle(CHIEF, Frame(Op.HELLO, 9, 0, {"anew": True})) is None
    waiting.set_result([np.float32(0)])
    # The one that was begun pushes, the one that waited does not.
    assert chief.servers.pushes.get(timeout=LIMIT)[1] == 1
    assert chief.answers.get(timeout=LIMIT).meta["kind"] == "WorkerLostError"
    assert chief.servers.pushes.empty()
    assert chief.answers.empty()
    for push in [done, *chief.worker._pushing]:
        if not push.done():
            push.set_result(acknowledged(True))
    found = [chief.answers.get(timeout=LIMIT) for _ in range(3)]
    (answer,) = [a for a in found if a.request == 9]
    assert (answer.op, answer.meta["incarnation"] != incarnation) == (Op.OK, True)
    # Of several greetings in a row, the first one begins the life.
    assert chief.ask(Op.HELLO, {"anew": True}).meta["incarnation"] == answer.meta["incarnation"]


def test_the_end_waits_for_the_program_that_runs(chief):
    began, may_end = threading.Event(), threading.Event()

    def program(*given):
        began.set()
        may_end.wait(LIMIT)
        return [np.float32(0), np.float32(0)]

    program.compiled_count = 1
    chief.worker._load = lambda digest, data: program
    chief.add_plan()
    chief.run(1, arrays=[np.float32(1)] * 3)
    chief.run(2, arrays=[np.float32(1)] * 3)
    assert began.wait(LIMIT)
    chief.worker.close()
    chief.worker.join(0.2)
    assert chief.worker._thread.is_alive()
    threading.Timer(0.2, may_end.set).start()
    chief.worker.join(LIMIT)
    assert not chief.worker._thread.is_alive()
    assert chief.servers.pushes.get_nowait()[1] == 1
    assert chief.servers.pushes.empty(), "the second closure is left"


def test_the_end_does_not_wait_for_a_dataset_that_blocks(chief):
    began, may_end = threading.Event(), threading.Event()

    def take(names):
        began.set()
        may_end.wait(30)
        raise ValueError("the end")

    chief.worker._data.take = take
    chief.add_plan()
    chief.run(1, arrays=[np.float32(1)] * 3, takes=["i"])
    assert began.wait(LIMIT)
    chief.worker.close()
    chief.worker.join(20)
    assert chief.worker._thread.is_alive()
    may_end.set()
    chief.worker._thread.join(LIMIT)
    assert not chief.worker._thread.is_alive()


#: A worker that is told to end while it computes, in the middle of the program or of its compilation.
ENDS_WHILE_IT_COMPUTES = """
import threading, time, types
import jax, numpy as np
from unisono.cluster_resolver._spec import Task
from unisono.rpc._frames import Frame, blob
from unisono.rpc._ops import Op
from unisono.parameter_server.strategy._serve import WorkerService
from unisono.parameter_server.worker._step_plan import StepPlan

step = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda i, y: jax.numpy.tanh(y @ y), x))
program = jax.export.export(step)(jax.ShapeDtypeStruct((500, 500), "float32")).serialize()
me = Task("worker", 0)
roles = types.SimpleNamespace(task=me, workers=(me,), accepted=(me,))
ends = types.SimpleNamespace(start=lambda: None, close=lambda: None, reply=lambda *_: print("answered"))
service = WorkerService(roles, [], lambda handler: ends)
worker = service._worker
began, run = threading.Event(), worker._execute

def execute(task):
    began.set()
    run(task)

worker._execute = execute
who = types.SimpleNamespace(acts_for=lambda task: True)
plan = StepPlan("p", (), 1, (), (), (0,)).to_meta()
worker.handle(who, Frame(Op.PROGRAM, 1, 0, {"name": "p", "plan": plan}, [blob(bytes(program))]))
began.wait()
print("ends", flush=True)
service.close()

class Slow:
    def __del__(self, sleep=time.sleep):
        # Where the interpreter has ended already, a thread comes back from the compiler.
        sleep(0.7)

slow = Slow()
"""


def test_a_process_that_ends_while_its_worker_computes_does_so_without_a_signal():
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", ENDS_WHILE_IT_COMPUTES],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "ends" in ended.stdout
