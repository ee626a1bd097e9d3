"""The table from declaration to merge rule, and the arithmetic of each rule."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from unisono._context import OneReplica
from unisono._errors import InvalidArgumentError
from unisono._values import ReduceOp
from unisono.step.variables._merge_rules import (
    Merge,
    VariableAggregation,
    VariableKind,
    VariableSynchronization,
    localize,
    merge_all,
    merge_in_turn,
    merge_rule,
    read_copies,
    spread_copies,
)

S, A = VariableSynchronization, VariableAggregation

#: aggregation -> (rule of a float of Keras, rule of an integer of Keras)
KERAS = {
    A.NONE: (Merge.MEAN, Merge.FIRST),
    A.SUM: (Merge.SUM, Merge.SUM),
    A.MEAN: (Merge.MEAN, Merge.MEAN),
    A.ONLY_FIRST_REPLICA: (Merge.FIRST, Merge.FIRST),
}


@pytest.mark.parametrize(("synchronization", "aggregation"), list(itertools.product(S, A)))
def test_what_keras_declares(synchronization, aggregation):
    rules = [merge_rule(VariableKind(synchronization, aggregation, is_float)) for is_float in (True, False)]
    assert tuple(rules) == KERAS[aggregation]


@pytest.mark.parametrize(("synchronization", "aggregation"), list(itertools.product(S, A)))
def test_variables_that_own_their_copies(synchronization, aggregation):
    rule = merge_rule(VariableKind(synchronization, aggregation, True, owns_copies=True))
    keeps_apart = synchronization is S.ON_READ or aggregation is A.NONE
    assert rule is (Merge.STACK if keeps_apart else Merge.KEEP)


def test_a_random_state_is_a_stream_per_replica_whatever_is_declared():
    for synchronization, aggregation in itertools.product(S, A):
        assert merge_rule(VariableKind(synchronization, aggregation, False, is_seed=True)) is Merge.SEED


class Replica(OneReplica):
    """One of several replicas, which are asked by hand: `others` are their operands."""

    def __init__(self, replica_id, others):
        self.num_replicas = 1 + len(others)
        self.replica_id = replica_id
        self.others = others
        self.calls = []

    def all_reduce(self, op, tree):
        self.calls.append(op)
        total = [sum((o[i] for o in self.others), x) for i, x in enumerate(tree)]
        return [t / self.num_replicas for t in total] if op is ReduceOp.MEAN else total


def test_a_sum_starts_from_the_value_once():
    starts = [localize(Merge.SUM, jnp.array(5.0), Replica(i, [None] * 2)) for i in range(3)]
    np.testing.assert_array_equal(starts, [5, 0, 0])


@pytest.mark.parametrize("rule", [Merge.MEAN, Merge.FIRST, Merge.KEEP, Merge.STACK])
def test_all_others_start_from_the_value(rule):
    assert localize(rule, 5.0, Replica(1, [None])) == 5.0


def test_streams_differ_and_come_back():
    state = jnp.array([7, 3], jnp.uint32)
    starts = [localize(Merge.SEED, state, Replica(i, [None] * 3)) for i in range(4)]
    assert len({tuple(np.asarray(s)) for s in starts}) == 4
    assert all(s[1] == 3 for s in starts)
    for i, start in enumerate(starts):
        (back,) = merge_all([Merge.SEED], [start + jnp.array([0, 1], jnp.uint32)], Replica(i, [None] * 3))
        np.testing.assert_array_equal(back, [7, 4])


def test_sums_travel_together_and_means_together():
    first = Replica(0, [[jnp.array(10.0), jnp.array(0)]])
    rules = [Merge.SUM, Merge.KEEP, Merge.FIRST]
    merged = merge_all(rules, [jnp.array(1.0), jnp.array(9.0), jnp.array(4)], first)
    assert [float(m) for m in merged] == [11, 9, 4]
    assert first.calls == [ReduceOp.SUM]
    second = Replica(1, [[jnp.array(4.0)]])
    assert float(merge_all([Merge.MEAN], [jnp.array(2.0)], second)[0]) == 3
    assert second.calls == [ReduceOp.MEAN]


def test_the_first_copy_wins_on_every_replica():
    second = Replica(1, [[jnp.array(4)]])
    assert int(merge_all([Merge.FIRST], [jnp.array(7)], second)[0]) == 4


def test_truth_values_keep_their_type():
    (merged,) = merge_all([Merge.FIRST], [jnp.array(True)], Replica(0, [[jnp.array(0)]]))
    assert merged.dtype == jnp.bool_
    assert bool(merged)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(Merge.SUM, 6), (Merge.MEAN, 2), (Merge.FIRST, 1), (Merge.KEEP, 1), (Merge.SEED, 1)],
)
def test_one_program_that_holds_all_copies(rule, expected):
    merged = merge_in_turn(rule, [jnp.array(1.0), jnp.array(2.0), jnp.array(3.0)], [True] * 3)
    assert float(merged) == expected
    assert merged.dtype == jnp.float32


def test_one_program_stacks_what_stays_apart():
    np.testing.assert_array_equal(
        merge_in_turn(Merge.STACK, [jnp.array(1), jnp.array(2)], [True] * 2), [1, 2]
    )


@pytest.mark.parametrize(("aggregation", "read"), [(A.SUM, 6), (A.MEAN, 3), (A.ONLY_FIRST_REPLICA, 2)])
def test_reading_copies(aggregation, read):
    assert int(read_copies(aggregation, jnp.array([2, 4]), "v")) == read


@pytest.mark.parametrize("aggregation", [A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA])
@pytest.mark.parametrize("value", [7, 7.5])
def test_an_assignment_reads_back(aggregation, value):
    copies = spread_copies(aggregation, jnp.array(value), 4, "v")
    assert copies.shape == (4,)
    assert read_copies(aggregation, copies, "v") == value


@pytest.mark.parametrize(
    "call", [lambda: read_copies(A.NONE, None, "v"), lambda: spread_copies(A.NONE, 1, 2, "v")]
)
def test_without_an_aggregation_the_error_names_the_variable(call):
    with pytest.raises(InvalidArgumentError, match="Received: v with aggregation NONE"):
        call()


def test_a_replica_without_rows_has_no_part_in_a_mean():
    copies = [jnp.array(1.0), jnp.array(3.0), jnp.array(np.nan)]
    assert float(merge_in_turn(Merge.MEAN, copies, [True, True, False])) == 2.0
    assert float(merge_in_turn(Merge.FIRST, copies[::-1], [False, True, True])) == 3.0
    assert float(merge_in_turn(Merge.KEEP, copies[::-1], [False, True, True])) == 3.0
