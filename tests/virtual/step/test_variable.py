"""`unisono.Variable`: tf.distribute's table of what an assignment does, on two replicas."""

import numpy as np
import pytest

import unisono

ERROR = "error"

#: (synchronization, aggregation): what the copies are after, from 1.0 on both,
#: (a) replica `assign(id + 2)`, (b) replica `assign_add(id + 1)`, (c) replica `assign_add(1.0)`,
#: (d) cross `assign(6)`, (e) cross `assign_add(1)`, (f) cross `assign(PerReplica(0, 1))`.
#: Source: observed in TensorFlow 2.21; (f) of an aggregated variable would diverge there silently.
TABLE = {
    ("on_write", "none"): [[2, 3], [2, 3], [2, 2], [6, 6], [2, 2], [0, 1]],
    ("on_write", "sum"): [[5, 5], [4, 4], ERROR, [6, 6], [2, 2], ERROR],
    ("on_write", "mean"): [[2.5, 2.5], [2.5, 2.5], [2, 2], [6, 6], [2, 2], ERROR],
    ("on_write", "only_first_replica"): [[2, 2], [2, 2], [2, 2], [6, 6], [2, 2], ERROR],
    ("on_read", "none"): [[2, 3], [2, 3], [2, 2], ERROR, ERROR, ERROR],
    ("on_read", "sum"): [[2, 3], [2, 3], [2, 2], [3, 3], ERROR, ERROR],
    ("on_read", "mean"): [[2, 3], [2, 3], [2, 2], [6, 6], [2, 2], ERROR],
    ("on_read", "only_first_replica"): [[2, 3], [2, 3], [2, 2], [6, 6], [2, 2], ERROR],
}

#: What cross-replica code reads of copies [2, 3].
READS = {"sum": 5, "mean": 2.5, "only_first_replica": 2}


def replica_id():
    return unisono.get_replica_context().replica_id_in_sync_group


@pytest.fixture(scope="module")
def two():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


def acts(strategy, variable, ragged):
    (batch,) = strategy.distribute_dataset([np.ones(3 if ragged else 2, "f4")])

    def in_replica(fn):
        # The zero makes the value an array of the replica, as values in real steps are.
        return lambda: strategy.run(lambda x: fn(x[0] * 0.0) and None, args=(batch,))

    return [
        in_replica(lambda z: variable.assign(replica_id() + 2.0 + z) is None),
        in_replica(lambda z: variable.assign_add(replica_id() + 1.0 + z) is None),
        in_replica(lambda z: variable.assign_add(1.0) is None),
        lambda: variable.assign(6.0),
        lambda: variable.assign_add(1.0),
        lambda: variable.assign(unisono.PerReplica((0.0, 1.0))),
    ]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("column", range(6), ids="abcdef")
@pytest.mark.parametrize("kind", TABLE, ids=str)
def test_table(two, kind, column, ragged):
    with two.scope():
        variable = unisono.Variable(1.0, synchronization=kind[0], aggregation=kind[1])
    expected = TABLE[kind][column]
    act = acts(two, variable, ragged)[column]
    if expected is ERROR:
        with pytest.raises(ValueError, match="Received"):
            act()
        return
    act()
    assert [float(v) for v in variable.values] == expected
    if kind[0] == "on_read" and column == 0 and kind[1] != "none":
        assert float(variable.value) == READS[kind[1]]


def test_on_read_without_aggregation_cannot_be_read(two):
    with two.scope():
        variable = unisono.Variable(1.0, synchronization="on_read")
    with pytest.raises(ValueError, match="must have an aggregation"):
        _ = variable.value


def test_repr_shows_each_replica(two):
    with two.scope():
        variable = unisono.Variable(1.0, name="v")
    assert repr(variable) == (
        "MirroredVariable:{\n"
        "  0: <unisono.Variable 'v' shape=() dtype=float32, numpy=1.0>,\n"
        "  1: <unisono.Variable 'v/replica_1' shape=() dtype=float32, numpy=1.0>\n"
        "}"
    )


def test_created_in_the_first_call(two):
    made = []

    def step():
        if not made:
            made.append(unisono.Variable(1.0, aggregation="sum"))
        made[0].assign_add(np.float32(1.0) * (replica_id() + 1))

    with two.scope():
        two.run(step)
    two.run(step)
    assert float(made[0].value) == 7.0
    assert len(made[0].values) == 2


def test_created_in_a_later_call_is_an_error(two):
    def step():
        return unisono.Variable(1.0).value

    with pytest.raises(unisono.ContextError, match="first call only"):
        two.run(step)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_value": 1, "aggregation": "mean"}, "integer variable"),
        ({"initial_value": 1.0, "synchronization": "none"}, "on write or on read"),
        ({"initial_value": 1.0, "aggregation": "max"}, "must be one of"),
    ],
)
def test_bad_declarations(two, arguments, message):
    with two.scope(), pytest.raises(ValueError, match=message):
        unisono.Variable(**arguments)


def test_on_read_is_not_trainable(two):
    with two.scope():
        assert unisono.Variable(1.0).trainable
        assert not unisono.Variable(1.0, synchronization="on_read", aggregation="sum").trainable
