"""The group of a lone process: the same calls as for several, answered without any work."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from unisono.collectives._process_group import ProcessGroup, SingleProcessGroup, joined_group


@pytest.fixture
def group():
    return SingleProcessGroup()


def test_a_lone_process_is_the_chief_of_one(group):
    assert (group.index, group.size, group.is_chief, group.num_collectives) == (0, 1, True, 0)


def test_collectives_return_own_values_as_they_are(group):
    arrays = {"a": np.arange(3), "b": jnp.ones(2)}
    assert group.broadcast(b"own") == b"own"
    assert group.gather(b"own") == [b"own"]
    assert group.broadcast_arrays(arrays) is arrays
    assert group.are_alike(b"own")
    assert group.require_same({"batch_size": 8}, "A call of `fit`", b"own") == [b"own"]


def test_arrays_that_are_known_are_not_given_back(group):
    arrays = [np.arange(3), np.ones(2)]
    assert group.equal_arrays(arrays, [True, True], "key", "Variables") is None
    assert group.equal_arrays(arrays, [True, False], "key", "Variables") is arrays


def test_what_the_chief_makes_is_made_here_and_raises_here(group):
    def fail():
        raise KeyError("disk")

    assert group.from_chief(lambda: b"made") == b"made"
    with pytest.raises(KeyError, match="disk"):
        group.from_chief(fail)


def test_an_error_inside_a_collective_is_raised_as_it_is(group):
    error = ValueError("Gloo")
    assert group.explain(error) is None
    with pytest.raises(ValueError, match="Gloo") as info, group.collective():
        raise error
    assert info.value is error


def test_a_state_is_not_computed_to_be_compared_with_none(group):
    group.check_state(None, "key", 1, lambda: pytest.fail("The state was asked for."))
    assert group.checkpoint_number("model/ckpt", 7) == 7


def test_a_process_that_joined_no_cluster_is_alone():
    assert isinstance(joined_group(), SingleProcessGroup)


@pytest.mark.parametrize("name", sorted(ProcessGroup.__abstractmethods__))
def test_both_groups_take_the_same_arguments(name):
    from unisono.cluster._jax_process_group import JaxProcessGroup

    ours, theirs = getattr(SingleProcessGroup, name), getattr(JaxProcessGroup, name)
    if not isinstance(ours, property):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


class _Second(SingleProcessGroup):
    """The second of two processes, whose chief has made some bytes."""

    def __init__(self):
        super().__init__()
        self._index, self._size = 1, 2

    def from_chief(self, make):
        return b"made by the chief"


def test_a_lone_process_has_all_and_the_second_of_two_its_share():
    rows = [0, 1, 2, 3]
    shares = [g.share_of(rows, lambda all_, n, i: all_[i::n]) for g in (SingleProcessGroup(), _Second())]
    assert shares == [rows, [1, 3]]
    assert [g.own_name for g in (SingleProcessGroup(), _Second())] == ["this process", "worker 1"]


def test_a_value_of_the_chief_is_encoded_only_for_others():
    alone = SingleProcessGroup().value_of_chief(lambda: "own", lambda _: 1 / 0, lambda _: 1 / 0)
    assert alone == "own"
    assert _Second().value_of_chief(lambda: "own", str.encode, bytes.decode) == "made by the chief"
