"""`unisono.ShardedVariable`: a divided variable is used like any other, and reads only what it needs."""

import copy

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.partitioners import FixedShardsPartitioner
from unisono.rpc._ops import Op

VALUE = np.arange(20, dtype="float32").reshape(10, 2)

INDICES = [
    3,
    -1,
    np.int64(4),
    slice(2, 5),
    slice(None),
    slice(-3, None),
    slice(8, 1, -3),
    slice(None, None, -1),
    slice(5, 5),
    slice(1, 100, 4),
    (slice(None), 0),
    (slice(2, 9, 2), slice(None, None, -1)),
    (4, 1),
    (slice(3, 5), None, Ellipsis),
    Ellipsis,
    (Ellipsis, 1),
    None,
    (None, slice(1, 3)),
    np.array([9, 0]),
    VALUE[:, 0] > 9,
]


@pytest.fixture(scope="module")
def strategy():
    with local_strategy(servers=2, variable_partitioner=FixedShardsPartitioner(3)) as strategy:
        yield strategy


def made(strategy, value=VALUE, **options):
    with strategy.scope():
        return unisono.Variable(value, **options)


@pytest.fixture(params=["here", "on servers"])
def variable(strategy, request):
    variable = made(strategy, name="v")
    if request.param == "on servers":
        strategy._job.variables.place([(variable, None)])
    return variable


def test_it_shows_parts_and_looks_like_one_variable(variable):
    assert isinstance(variable, (unisono.ShardedVariable, unisono.Variable))
    assert (variable.shape, variable.dtype, variable.name) == ((10, 2), "float32", "v")
    parts = variable.variables
    assert [part.rows for part in parts] == [(0, 4), (4, 7), (7, 10)]
    assert [(p.name, p.shape, p.dtype) for p in parts][1] == ("v/part_1", (3, 2), "float32")
    np.testing.assert_array_equal(np.concatenate(parts), VALUE)
    np.testing.assert_array_equal(variable.numpy(), VALUE)
    np.testing.assert_array_equal(variable.read_value(), VALUE)
    np.testing.assert_array_equal(keras.ops.matmul(variable, np.ones((2, 1))), VALUE.sum(1, keepdims=True))
    np.testing.assert_array_equal(2 * variable + VALUE, 3 * VALUE)
    np.testing.assert_array_equal([row for part in variable for row in part], VALUE)
    text = repr(variable)
    assert text.startswith(
        "ShardedVariable:{\n  0: <VariableShard 'v/part_0' shape=(4, 2) dtype=float32, numpy="
    )
    assert text.count("part_") == 3
    assert "[18. 19.]" in text


def test_indices_are_those_of_an_array(variable):
    for index in INDICES:
        np.testing.assert_array_equal(variable[index], VALUE[index], err_msg=str(index))
    # As JAX does it for any array.
    np.testing.assert_array_equal(variable[12], unisono.Variable(VALUE)[12])
    with pytest.raises((TypeError, IndexError)):
        variable["a"]


def test_assignments_reach_all_parts(variable):
    variable.assign(VALUE + 1)
    variable.assign_add(np.ones((10, 2)))
    variable.assign_sub(2 * np.ones((10, 2)))
    np.testing.assert_array_equal(variable, VALUE)
    first, second, third = variable.variables
    second.assign(np.zeros((3, 2)))
    third.assign_add(1.0)
    first.assign_sub(np.ones(2))
    expected = VALUE.copy()
    expected[4:7], expected[7:], expected[:4] = 0, VALUE[7:] + 1, VALUE[:4] - 1
    np.testing.assert_array_equal(variable, expected)
    np.testing.assert_array_equal(second.numpy(), expected[4:7])
    np.testing.assert_array_equal(third[0], expected[7])
    np.testing.assert_array_equal(
        2 - third * third / 4 + keras.ops.square(-third), 2 + expected[7:] ** 2 * 3 / 4
    )
    np.testing.assert_array_equal(first @ np.ones((2, 1)) > 3, expected[:4] @ np.ones((2, 1)) > 3)
    variable.scatter_add(unisono.IndexedSlices(np.ones((2, 2), "float32"), np.array([5, 9])))
    expected[[5, 9]] += 1
    np.testing.assert_array_equal(variable, expected)
    with pytest.raises(ValueError, match="shape"):
        variable.assign(np.zeros((9, 2)))
    with pytest.raises(ValueError, match="broadcast"):
        second.assign(np.zeros((4, 2)))


def test_only_the_needed_rows_travel(strategy):
    variable = made(strategy)
    strategy._job.variables.place([(variable, None)])
    before = [dict(server.counts) for server in strategy.cluster.servers]
    np.testing.assert_array_equal(variable[5:6], VALUE[5:6])
    np.testing.assert_array_equal(unisono.nn.embedding_lookup(variable, [3, 8]), VALUE[[3, 8]])
    after = [server.counts for server in strategy.cluster.servers]
    sent = sum(new["bytes sent"] - old.get("bytes sent", 0) for new, old in zip(after, before, strict=True))
    assert sent == 3 * VALUE[0].nbytes
    reads = [new[Op.READ.name] - old.get(Op.READ.name, 0) for new, old in zip(after, before, strict=True)]
    # The second part alone is asked.
    assert sum(reads) == 1


def test_a_copy_is_a_variable_of_its_own(variable):
    twin = copy.deepcopy(variable)
    twin.assign(np.zeros((10, 2)))
    assert [part.rows for part in twin.variables] == [part.rows for part in variable.variables]
    np.testing.assert_array_equal(variable, VALUE)
    np.testing.assert_array_equal(twin, 0 * VALUE)


def test_keras_layers_make_them_with_keras_values(strategy):
    keras.utils.set_random_seed(5)
    alone = keras.layers.Dense(4)
    alone.build((None, 7))
    keras.utils.set_random_seed(5)
    with strategy.scope():
        dense = keras.layers.Dense(4)
        dense.build((None, 7))
        dropout = keras.layers.Dropout(0.5, seed=1)
        scalar = unisono.Variable(1.0)
    assert isinstance(dense.kernel, unisono.ShardedVariable)
    np.testing.assert_array_equal(dense.kernel, alone.kernel)
    x = np.ones((2, 7), "float32")
    np.testing.assert_allclose(dense(x), alone(x), rtol=1e-6)
    # Neither a generator's state nor a scalar.
    assert not isinstance(dropout.seed_generator.state, unisono.ShardedVariable)
    assert not isinstance(scalar, unisono.ShardedVariable)
    assert not isinstance(alone.kernel, unisono.ShardedVariable)


def test_scheduled_functions_use_it_as_a_whole(strategy):
    variable, ids = made(strategy), np.array([[1, 9], [4, 4]])

    @unisono.function
    def looked_up(ids):
        rows = unisono.nn.embedding_lookup(variable, ids)
        variable.assign_add(0.5 * variable)
        variable.variables[1].assign(variable[0:3])
        return rows, variable[7:3:-2], variable.variables[2].value

    coordinator = unisono.coordinator.ClusterCoordinator(strategy)
    rows, some, last = coordinator.fetch(coordinator.schedule(looked_up, args=(ids,)))
    after = 1.5 * VALUE
    after[4:7] = after[0:3]
    np.testing.assert_array_equal(rows, VALUE[ids])
    np.testing.assert_array_equal(some, after[7:3:-2])
    np.testing.assert_array_equal(last, after[7:])
    np.testing.assert_array_equal(variable, after)
    assert strategy._job.variables[variable].division.is_divided


@pytest.mark.parametrize("ids", [3, [0, 9, 9], np.zeros((0,), "int32"), np.array([[[1], [2]]], "int64")])
def test_lookup_is_that_of_tensorflow(variable, ids):
    for table in (variable, VALUE, list(variable.variables), unisono.Variable(VALUE)):
        rows = unisono.nn.embedding_lookup(table, ids)
        np.testing.assert_array_equal(rows, VALUE[np.asarray(ids)])
        clipped = unisono.nn.embedding_lookup(table, ids, max_norm=5.0)
        norms = np.linalg.norm(VALUE, axis=1, keepdims=True)
        np.testing.assert_allclose(clipped, (VALUE * 5 / np.maximum(norms, 5))[np.asarray(ids)], rtol=1e-6)


def test_lookup_of_what_is_no_row_is_an_error(variable):
    for ids in ([10], [0, -1]):
        with pytest.raises(unisono.InvalidArgumentError, match="rows of the table, from 0 to 9"):
            unisono.nn.embedding_lookup(variable, ids)
    with pytest.raises(unisono.InvalidArgumentError, match="ids of dtype float32"):
        unisono.nn.embedding_lookup(variable, [0.5])
    with pytest.raises(unisono.InvalidArgumentError, match=r"table of shape \(\)"):
        unisono.nn.embedding_lookup(np.float32(1), [0])


def test_other_variables_may_lie_beside_a_part(strategy, variable):
    with strategy.scope(), strategy.extended.colocate_vars_with(variable.variables[0]):
        other = unisono.Variable([4.0, 5.0])
    np.testing.assert_array_equal(other, [4.0, 5.0])


def test_a_variable_of_each_worker_is_refused(strategy):
    with strategy.scope(), pytest.raises(unisono.UnsupportedError, match="one value for all workers"):
        unisono.Variable([0.0], per_worker_variable=True)


def test_a_bad_partitioner_is_named_where_the_variable_is_made():
    answers = {(3, 2): [0, 1], (3,): "ab", (4, 4): [2, 2]}
    with local_strategy(servers=2, variable_partitioner=lambda shape, dtype: answers[shape]) as strategy:
        for shape in answers:
            with pytest.raises(unisono.InvalidArgumentError, match=r"`variable_partitioner` must.*'bad'"):
                made(strategy, np.zeros(shape), name="bad")
