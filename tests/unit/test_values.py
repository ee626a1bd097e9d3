"""`ReduceOp`, `PerReplica` and `Mirrored` as containers and as pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono import Mirrored, PerReplica, ReduceOp
from unisono._errors import InvalidArgumentError


@pytest.mark.parametrize("written", ["sum", "SUM", "Sum", ReduceOp.SUM])
def test_a_reduce_op_is_read_in_any_case(written):
    assert ReduceOp.parse(written) is ReduceOp.SUM


@pytest.mark.parametrize("written", ["max", "", None, 0])
def test_an_unknown_reduce_op_names_what_was_received(written):
    with pytest.raises(InvalidArgumentError, match="Received: reduce_op=") as error:
        ReduceOp.parse(written)
    assert repr(written) in str(error.value)


def test_unequal_shapes_are_kept_as_they_are():
    value = PerReplica((np.zeros(3), np.zeros(2)))
    assert value.stacked is None
    assert value.num_replicas == 2
    assert [v.shape for v in value.values] == [(3,), (2,)]


def test_a_stacked_value_has_its_rows_as_values():
    value = PerReplica.from_stacked(jnp.arange(6).reshape(2, 3))
    assert value.num_replicas == 2
    np.testing.assert_array_equal(value.values[1], [3, 4, 5])


@pytest.mark.parametrize(
    "value", [PerReplica((1, 2)), PerReplica.from_stacked(np.array([1, 2])), Mirrored([1, 2])]
)
def test_tree_map_goes_through_and_keeps_the_kind(value):
    doubled = jax.tree.map(lambda x: x * 2, value)
    assert type(doubled) is type(value)
    assert jax.tree.structure(doubled) == jax.tree.structure(value)
    np.testing.assert_array_equal(np.ravel(jax.tree.leaves(doubled)), [2, 4])


def test_there_is_no_arithmetic():
    with pytest.raises(TypeError):
        PerReplica((1, 2)) + 1


def test_repr_names_each_replica():
    assert repr(PerReplica((1, 2))) == "PerReplica:{\n  0: 1,\n  1: 2\n}"
    assert repr(Mirrored(3)) == "Mirrored(3)"
