"""`ReduceOp`, `PerReplica` and `Mirrored` as containers and as pytrees."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from unisono import DistributedValues, Mirrored, PerReplica, ReduceOp
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


#: What users write where they forgot to reduce; numpy and `bool` gave nonsense without an error.
USES = {
    "asarray": np.asarray,
    "jnp.asarray": jnp.asarray,
    "keras": keras.ops.convert_to_tensor,
    "np.mean": np.mean,
    "bool": bool,
    "float": float,
    "int": int,
    "format": lambda x: f"{x:.4f}",
    "x + 1": lambda x: x + 1,
    "1 + x": lambda x: 1 + x,
    "numpy + x": lambda x: np.float32(1) + x,
    "jax + x": lambda x: jnp.ones(2) + x,
    "-x": lambda x: -x,
    "x < 1": lambda x: x < 1,
}


@pytest.mark.parametrize("value", [PerReplica((1, 2)), PerReplica.from_stacked(np.ones(2))], ids=str)
@pytest.mark.parametrize("use", USES)
def test_there_is_no_one_array(use, value):
    with pytest.raises(TypeError, match=r"between replicas.*strategy\.reduce"):
        USES[use](value)


def test_what_has_a_value_for_each_replica():
    assert all(isinstance(v, DistributedValues) for v in (PerReplica((1, 2)), Mirrored(1)))
    assert not isinstance(jnp.ones(2), DistributedValues)
    assert f"{PerReplica((1, 2))}" == repr(PerReplica((1, 2)))


def test_repr_names_each_replica():
    assert repr(PerReplica((1, 2))) == "PerReplica:{\n  0: 1,\n  1: 2\n}"
    assert repr(Mirrored(3)) == "Mirrored(3)"
