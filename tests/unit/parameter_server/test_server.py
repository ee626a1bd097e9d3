"""Requests to a parameter server and their answers, without sockets."""

import contextlib
import random

import numpy as np
import pytest
from tests import exported_updates as exported

from unisono import InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.server._durable import DurableStore
from unisono.parameter_server.server._server import VariableServer
from unisono.parameter_server.server._store import VariableStore
from unisono.parameter_server.state._push import COUNTER_BITS, ProgramCall, Push, UsedBatches
from unisono.parameter_server.state._request_dedup import RequestDedup
from unisono.rpc._calls import ClientId, PeerLostError
from unisono.rpc._frames import Frame, blob
from unisono.rpc._loopback import LoopbackNetwork
from unisono.rpc._ops import Op

CHIEF, WORKER = ClientId(b"1", Task("chief", 0)), ClientId(b"2", Task("worker", 0))
W, ROWS = (3, 2), (6, 2)


class Asked:
    """A server, and requests to it as bytes."""

    def __init__(self, **options):
        options.setdefault("store", VariableStore())
        self.server = VariableServer(is_chief=lambda client: client is CHIEF, **options)
        self.store, self.request = self.server.store, 1 << 32

    def frame(self, op, *arrays, generation=0, request=None, **meta):
        self.request += 1
        frame = Frame(op, self.request if request is None else request, generation, meta, arrays)
        return Frame.parse([bytes(part) for part in frame.parts()])

    def answer(self, op, *arrays, client=CHIEF, **more):
        frame = self.frame(op, *arrays, **more)
        answer = self.server.handle(client, frame)
        assert answer.request == frame.request
        return Frame.parse([bytes(part) for part in answer.parts()])

    def ok(self, *args, **more):
        answer = self.answer(*args, **more)
        assert answer.op is Op.OK, answer.meta
        return answer

    def error(self, *args, **more):
        answer = self.answer(*args, **more)
        assert answer.op is Op.ERROR
        return f"{answer.meta['kind']}: {answer.meta['text']}"

    def push(self, push, **more):
        meta, arrays = push.encode()
        return self.answer(Op.PUSH, *arrays, client=WORKER, **meta, **more)


def variable(name, shape, dtype="float32", **more):
    return {"name": name, "shape": list(shape), "dtype": dtype, **more}


@pytest.fixture
def asked():
    asked = Asked()
    specs = [variable("w", W, has_array=True), variable("rate", (), fill=0.1, role="slot")]
    specs += [variable("count", (), "int32", role="slot"), variable("v", W, role="slot")]
    specs += [variable("table", ROWS, kind="table", fill=1)]
    answer = asked.ok(Op.CREATE, np.ones(W, "float32"), variables=specs)
    assert answer.meta["ids"] == [0, 1, 2, 3, 4]
    asked.program = asked.ok(Op.PROGRAM, blob(exported.momentum_blob(W))).meta["digest"]
    return asked


def state_of(asked):
    meta, arrays = asked.store.state()
    meta.pop("answered")
    return repr(meta), [a.copy() for a in arrays], asked.store.read(4)


def assert_same(one, other):
    assert one[0] == other[0]
    np.testing.assert_equal(one[1:], other[1:])


def push_of(asked, closure, **more):
    gradient = np.full(W, closure + 1, "float32")
    return Push(closure, updates=(ProgramCall(asked.program, (0,), (1, 2, 3), (gradient,)),), **more)


def test_pull_and_push(asked):
    first = asked.ok(Op.PULL, client=WORKER, ids=[0, 1])
    assert (first.meta["changed"], first.meta["versions"]) == ([0, 1], [0, 0])
    answer = asked.push(push_of(asked, 0))
    assert (answer.op, answer.meta) == (Op.OK, {"applied": True, "count": 1})
    assert asked.push(push_of(asked, 0)).meta == {"applied": False, "count": 1}
    known = {"ids": [4 - 4, 1], "versions": [0, 1], "lineage": first.meta["lineage"]}
    second = asked.ok(Op.PULL, client=WORKER, **known)
    # The program has written the rate, too: it has version 1 by now.
    assert (second.meta["changed"], second.meta["versions"]) == ([0], [1, 1])
    np.testing.assert_allclose(second.arrays[0], 1 - 0.1 * np.ones(W), rtol=1e-6)
    # Of another lineage, or of none, versions mean nothing.
    for other in ("old", None):
        again = asked.ok(Op.PULL, client=WORKER, **known | {"lineage": other, "versions": [1, 1]})
        assert again.meta["changed"] == [0, 1]


def test_values_are_rounded_where_they_are_asked_for_so(asked):
    value = np.linspace(-1, 1, 6, dtype="float32").reshape(W)
    asked.ok(Op.WRITE, value, ids=[0])
    asked.ok(Op.WRITE, np.tile(value[:1], (6, 1)), ids=[4])
    known = {"ids": [0, 2, 4], "rounded": [0, 4], "dtype": "bfloat16"}
    first = asked.ok(Op.PULL, client=WORKER, **known)
    assert [a.dtype.name for a in first.arrays] == ["bfloat16", "int32", "bfloat16"]
    np.testing.assert_array_equal(first.arrays[0], value.astype("bfloat16"))
    # A version is that of the exact value.
    known |= {"versions": first.meta["versions"], "lineage": first.meta["lineage"]}
    assert asked.ok(Op.PULL, client=WORKER, **known).meta["changed"] == []
    asked.push(Push(0, adds=((0, value),)))
    (after,) = asked.ok(Op.PULL, client=WORKER, **known | {"dtype": "float16"}).arrays
    np.testing.assert_array_equal(after, (2 * value).astype("float16"))
    np.testing.assert_array_equal(asked.ok(Op.PULL, ids=[0]).arrays[0], 2 * value)
    rows = asked.ok(Op.ROWS, np.array([3]), ids=[4], rounded=[4], dtype="float16").arrays[0]
    np.testing.assert_array_equal(rows, value[:1].astype("float16"))
    for said, meta in (
        ("`dtype` must be", {"ids": [0], "rounded": [0]}),
        ("to one of bfloat16, float16. Received: values of float32, and 'int8'", known | {"dtype": "int8"}),
        ("Received: values of int32", {"ids": [2], "rounded": [2], "dtype": "float16"}),
    ):
        assert said in asked.error(Op.PULL, client=WORKER, **meta | {"versions": [-1] * len(meta["ids"])})


def test_pushes_count_once_where_messages_are_lost_and_repeated(asked):
    seed = random.randrange(10**6)
    print(f"{seed=}")
    draw = random.Random(seed)
    network = LoopbackNetwork(lambda frame, is_answer: draw.choice([0, 1, 1, 1, 2]))
    rpc_server = network.rpc_server("ps", asked.server.handle)
    rpc_server.start()
    rpc_clients = [network.rpc_client(Task("ps", 0), "ps", Task("worker", i)) for i in range(2)]
    for closure in range(40):
        meta, arrays = push_of(asked, closure, watermark=max(0, closure - 3)).encode()
        frame = asked.frame(Op.PUSH, *arrays, **meta)
        answered = False
        while not answered:
            # A worker that does not get an answer, or another one in its place.
            with contextlib.suppress(PeerLostError):
                answered = draw.choice(rpc_clients).call(frame, timeout=0.03).op is Op.OK
    for rpc_client in rpc_clients:
        rpc_client.close()
    rpc_server.close()
    assert asked.store.applied_count == 40
    assert asked.store.read(2) == 40
    velocities, values = [np.zeros(W, "float32")], [np.ones(W, "float32")]
    for closure in range(40):
        exported.by_hand(values, velocities, [np.full(W, closure + 1, "float32")])
    np.testing.assert_allclose(asked.store.read(0), values[0], rtol=1e-5)


def test_parts_and_rows(asked):
    asked.ok(Op.WRITE, np.full((1, 2), 5, "float32"), ids=[4], begin=2)
    asked.ok(Op.WRITE, np.full((2, 2), 6, "float32"), np.array([5, 0]), ids=[4], rows=True)
    (rows,) = asked.ok(Op.ROWS, np.array([2, 5, 5, 1]), client=WORKER, ids=[4]).arrays
    assert rows[:, 0].tolist() == [5, 6, 6, 1]
    part = asked.ok(Op.READ, client=WORKER, id=4, begin=1, end=3)
    assert part.arrays[0][:, 0].tolist() == [1, 5]
    assert part.meta == {"version": 2}
    assert asked.ok(Op.READ, client=WORKER, id=1).arrays[0].shape == ()


def test_a_repeated_write_or_reset_changes_nothing(asked):
    frame = asked.frame(Op.WRITE, np.zeros(W, "float32"), ids=[0])
    assert asked.server.handle(CHIEF, frame).meta == {"applied": True}
    asked.push(push_of(asked, 0))
    before = state_of(asked)
    assert asked.server.handle(CHIEF, frame).meta == {"applied": False}
    assert_same(state_of(asked), before)

    hello = asked.frame(Op.HELLO, reset=True)
    create = asked.frame(Op.CREATE, variables=[variable("new", (2,))])
    for frame in (hello, create, hello, create):
        assert asked.server.handle(CHIEF, frame).op is Op.OK
    assert list(asked.store.variables) == [0]
    asked.ok(Op.HELLO, reset=True)
    assert "dropped since" in asked.server.handle(CHIEF, create).meta["text"]
    assert not asked.store.variables


def test_a_repetition_is_recognized_for_long():
    answered = RequestDedup()
    for number in range(1, 3000):
        answered.note((7 << 32) | number)
    again = RequestDedup(*answered.encode())
    assert (7 << 32) | 2999 in again
    assert (8 << 32) | 1 not in again
    with pytest.raises(InvalidArgumentError, match="It is a repetition"):
        assert (7 << 32) | 5 in again
    answered.note(0)
    assert 0 not in answered


def test_an_older_chief_is_rejected(asked):
    asked.ok(Op.HELLO, generation=2)
    before = state_of(asked)
    value = np.zeros(W, "float32")
    for op, arrays, meta in (
        (Op.HELLO, (), {"reset": True}),
        (Op.WRITE, (value,), {"ids": [0]}),
        (Op.CREATE, (), {"variables": [variable("x", (1,))]}),
        (Op.END, (), {}),
    ):
        assert "generation 2 leads the job" in asked.error(op, *arrays, generation=1, **meta)
    # So are closures that it made, and a newer one that has not said HELLO.
    assert "a closure of generation 1" in asked.push(push_of(asked, 1 << COUNTER_BITS)).meta["text"]
    assert "must have the variables of the job" in asked.error(Op.WRITE, value, generation=3, ids=[0])
    assert_same(state_of(asked), before)
    assert not asked.server.ended.is_set()
    assert "must have the variables" in asked.push(push_of(asked, 3 << COUNTER_BITS)).meta["text"]
    assert asked.push(push_of(asked, 2 << COUNTER_BITS)).op is Op.OK


def test_a_push_pulls_what_is_there_behind_it(asked):
    first = asked.ok(Op.PULL, client=WORKER, ids=[0, 1])
    known = {"ids": [0, 1], "versions": [0, 0], "lineage": first.meta["lineage"]}
    answer = asked.push(push_of(asked, 0), pull=known)
    after = asked.ok(Op.PULL, client=WORKER, **known)
    assert (answer.meta["applied"], answer.meta["pulled"]) == (True, after.meta)
    np.testing.assert_array_equal(answer.arrays[0], asked.store.read(0))
    # A repetition changes nothing, and brings the values again: the first answer may be lost.
    again = asked.push(push_of(asked, 0), pull=known)
    assert (again.meta["applied"], again.meta["pulled"]) == (False, after.meta)
    assert "`pull` must be an object" in asked.push(push_of(asked, 1), pull=[0]).meta["text"]
    assert asked.store.applied_count == 1


def test_workers_do_not_lead(asked):
    for op in (Op.HELLO, Op.CREATE, Op.PROGRAM, Op.WRITE, Op.END):
        assert f"{op.name} is for the chief alone" in asked.error(op, client=WORKER)
    assert "Received: RUN" in asked.error(Op.RUN)


def test_pushes_of_another_lineage_are_rejected(asked):
    assert "pull again" in asked.push(push_of(asked, 0), lineage="other").meta["text"]
    assert asked.push(push_of(asked, 0), lineage=asked.store.lineage).op is Op.OK


def test_bad_requests_say_what_is_wrong_and_change_nothing(asked):
    before = state_of(asked)
    one = np.ones(W, "float32")
    for said, op, arrays, meta in (
        ("`ids` must be a list", Op.PULL, (), {"ids": 3}),
        ("by number. Received: 9", Op.PULL, (), {"ids": [9]}),
        ("one version for each", Op.PULL, (), {"ids": [0], "versions": [], "lineage": asked.store.lineage}),
        ("`closure` must be a whole number", Op.PUSH, (), {}),
        ("the arrays that it names", Op.PUSH, (one,), {"closure": 1, "watermark": 0, "adds": [0, 0]}),
        ("not complete while", Op.PUSH, (), {"closure": 1, "watermark": 2}),
        ("shape and dtype of 'w'", Op.PUSH, (one[:1],), {"closure": 1, "watermark": 0, "adds": [0]}),
        ("`id` must be", Op.READ, (), {"id": -1}),
        ("within its 3 rows", Op.READ, (), {"id": 0, "begin": 2, "end": 9}),
        ("instead of 1", Op.ROWS, (), {"ids": [4]}),
        ("from 7 to 7", Op.ROWS, (np.array([7]),), {"ids": [4]}),
        ("names one variable", Op.WRITE, (one,), {"ids": [0, 1]}),
        ("instead of 2", Op.WRITE, (one,), {"ids": [0], "rows": True}),
        ("instead of 1", Op.PROGRAM, (), {}),
        ("what `jax.export` has written", Op.PROGRAM, (blob(b"abc"),), {}),
        ("Unknown dtype", Op.CREATE, (), {"variables": [variable("x", (1,), "float33")]}),
        ("An initial value is missing", Op.CREATE, (), {"variables": [variable("x", (1,), has_array=True)]}),
        ("1 more", Op.CREATE, (one,), {"variables": []}),
    ):
        assert said in asked.error(op, *arrays, **meta), op
    assert_same(state_of(asked), before)


def test_random_requests_change_nothing(asked):
    """Whatever is in `meta`: each is answered, and none is applied by accident."""
    seed = random.randrange(10**6)
    print(f"{seed=}")
    draw = random.Random(seed)
    before = state_of(asked)
    fields = [
        "ids",
        "id",
        "versions",
        "variables",
        "updates",
        "adds",
        "assigns",
        "closure",
        "watermark",
        "end",
    ]
    values = [
        None,
        -1,
        2**70,
        1.5,
        "x",
        [],
        [[]],
        [None],
        {"a": 1},
        [0, 99],
        [{"name": "x"}],
        [{}],
        True,
        "0" * 32,
    ]
    errors = 0
    for _ in range(500):
        op = draw.choice([Op.CREATE, Op.PROGRAM, Op.PULL, Op.PUSH, Op.READ, Op.ROWS, Op.WRITE])
        meta = {name: draw.choice(values) for name in draw.sample(fields, 5)}
        if op is Op.PUSH:
            meta["adds"] = [99]
        arrays = [np.ones(draw.choice([(), (3,), (0, 5)]), draw.choice(["float32", "uint8", "bool"]))]
        errors += asked.answer(op, *arrays, **meta).op is Op.ERROR
    assert errors > 300
    assert_same(state_of(asked), before)


def test_status_and_end(asked):
    asked.push(push_of(asked, 3, watermark=2))
    status = asked.ok(Op.STATUS, client=WORKER, variables=True).meta
    assert {k: status[k] for k in ("generation", "count", "watermark", "variables", "programs")} == {
        "generation": 0, "count": 1, "watermark": 2, "variables": 5, "programs": 1
    }  # fmt: skip
    assert status["counts"]["PUSH"] == 1
    assert [v["name"] for v in status["list"]] == ["w", "rate", "count", "v", "table"]
    asked.ok(Op.END, code=3)
    assert asked.server.ended.is_set()
    assert asked.server.exit_code == 3


def test_a_lost_state_ends_the_server(asked, monkeypatch):
    def fail(*args):
        args[0][0].delete()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(asked.store.programs[asked.program], "_call", fail)
    assert "out of memory" in asked.push(push_of(asked, 0)).meta["text"]
    assert asked.server.ended.is_set()
    assert asked.server.exit_code == 1


def test_the_status_says_how_far_the_snapshot_is(tmp_path):
    durable = DurableStore(tmp_path, interval=None)
    asked = Asked(store=durable.store, durable=durable)
    asked.ok(Op.CREATE, variables=[variable("x", (1,))])
    assert asked.ok(Op.STATUS).meta["snapshot"] is None
    durable.snapshot()
    assert asked.ok(Op.STATUS).meta["snapshot"] == 1
    durable.close()


def test_the_status_says_how_far_workers_data_are(asked):
    assert asked.push(push_of(asked, 0), used={"i@0": [1, 3]}).op is Op.OK
    assert asked.ok(Op.STATUS, client=WORKER, used=True).meta["used"] == {"i@0": [3, 2]}
    assert "used" not in asked.ok(Op.STATUS, client=WORKER).meta
    for wrong, field in (([1], "used"), ({"i@0": [0]}, "i@0"), ({"i@0": ["3"]}, "i@0")):
        assert f"`{field}`" in asked.push(push_of(asked, 1), used=wrong).meta["text"]
    assert asked.ok(Op.STATUS, client=WORKER).meta["count"] == 1


def test_a_batch_is_in_the_updates_of_one_closure(asked):
    """A killed worker's push may arrive when the next one has begun with the same batch."""
    assert asked.push(push_of(asked, 1), used={"i@0": [1]}).meta["applied"]
    late = asked.push(push_of(asked, 0), used={"i@0": [1]})
    assert (late.op, late.meta["kind"]) == (Op.ERROR, "StaleValuesError")
    assert asked.ok(Op.STATUS, client=WORKER).meta["count"] == 1
    # Its closure may bring another batch, and pushes may overtake each other.
    assert asked.push(push_of(asked, 2), used={"i@0": [3]}).meta["applied"]
    assert asked.push(push_of(asked, 0), used={"i@0": [2]}).meta["applied"]
    assert not asked.push(push_of(asked, 0), used={"i@0": [1]}).meta["applied"]
    assert asked.ok(Op.STATUS, client=WORKER, used=True).meta["used"] == {"i@0": [3]}


def test_batches_that_were_left_out_long_ago_count_as_used():
    used = UsedBatches()
    for number in [*range(2, 10_000, 2), 10**15]:
        used.add(number)
    assert len(used.left) <= 1024
    assert 1 in used
    assert 10**15 - 1 not in used


def test_without_a_log_variables_are_in_a_snapshot_once_they_are_made(tmp_path):
    durable = DurableStore(tmp_path, log_bytes=0, interval=None)
    server = VariableServer(durable.store, durable)
    answer = server.handle(CHIEF, Frame(Op.CREATE, 1, 0, {"variables": [variable("x", (2,))]}))
    assert answer.op is Op.OK
    assert durable.snapshot_number == durable.number == 1
    durable.close()
