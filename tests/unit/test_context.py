"""The three contexts, with strategies that are nothing but a name."""

import gc
import threading
import types

import pytest

import unisono
from unisono import _context as context
from unisono._errors import ContextError, MixedStrategyError
from unisono._system._blocks import garbage_collection_paused, set_attribute
from unisono._values import PerReplica

ONE = types.SimpleNamespace(_is_default=False, worker_devices=("a", "b"))
OTHER = types.SimpleNamespace(_is_default=False)


def in_replica(strategy=ONE):
    return context.entered(context.Context(strategy, context.ReplicaContext(strategy, context.OneReplica())))


def test_outside_every_scope_one_replica_of_the_default_strategy_runs():
    assert not context.has_strategy()
    assert not context.in_cross_replica_context()
    assert unisono.get_strategy()._is_default
    replica = context.get_replica_context()
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (0, 1)


def test_in_a_scope():
    with context.entered(context.Context(ONE)):
        assert context.get_strategy() is ONE
        assert context.has_strategy()
        assert context.get_replica_context() is None
        assert context.in_cross_replica_context()
    assert not context.has_strategy()


def test_in_a_replica():
    with in_replica():
        assert context.get_replica_context().strategy is ONE
        assert context.get_replica_context().devices == ("a", "b")
        assert not context.in_cross_replica_context()


def test_in_an_update_neither_holds():
    with context.entered(context.Context(ONE, is_update=True)):
        assert context.get_replica_context() is None
        assert not context.in_cross_replica_context()


def test_a_thread_starts_outside():
    seen = []
    with context.entered(context.Context(ONE)):
        thread = threading.Thread(target=lambda: seen.append(context.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_the_context_is_left_when_the_block_raises():
    with pytest.raises(KeyError), context.entered(context.Context(ONE)):
        raise KeyError
    assert context.current() is None


def test_scopes_of_two_strategies_do_not_nest():
    with context.entered(context.Context(ONE)):
        context.check_same_strategy(ONE)
        with pytest.raises(MixedStrategyError, match="Received: the scope of"):
            context.check_same_strategy(OTHER)


def test_a_scope_does_not_open_in_a_replica():
    with in_replica(), pytest.raises(ContextError, match="must be entered in cross-replica context"):
        context.check_same_strategy(ONE)


def test_what_belongs_outside_says_so_inside():
    context.require_cross_replica("reduce")
    with in_replica(), pytest.raises(ContextError, match="`reduce` must be called in cross-replica context"):
        context.require_cross_replica("reduce")


def test_set_strategy_without_a_block():
    context.experimental_set_strategy(ONE)
    try:
        assert context.get_strategy() is ONE
        context.experimental_set_strategy(OTHER)
        assert context.get_strategy() is OTHER
    finally:
        context.experimental_set_strategy(None)
    assert not context.has_strategy()
    with context.entered(context.Context(ONE)), pytest.raises(ContextError, match="outside every"):
        context.experimental_set_strategy(OTHER)


def test_merge_call_needs_a_function_of_the_strategy():
    with in_replica(), pytest.raises(unisono.InvalidTypeError, match="with the strategy and 0 arguments"):
        context.get_replica_context().merge_call(lambda: 1)


def test_merge_call_runs_across_replicas_and_gives_each_its_part():
    def merge(strategy, x, y):
        assert strategy is ONE
        assert context.in_cross_replica_context()
        return PerReplica((x + y, "the other's")), x

    with in_replica():
        assert context.get_replica_context().merge_call(merge, (1,), {"y": 2}) == (3, 1)


def test_the_garbage_collector_pauses_until_the_last_block_ends():
    assert gc.isenabled()
    with garbage_collection_paused():
        with pytest.raises(KeyError), garbage_collection_paused():
            raise KeyError
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage_collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_attribute_has_its_old_value_after_a_block_that_fails():
    owner = types.SimpleNamespace(scale=2.0)

    def fail():
        with set_attribute(owner, "scale", None):
            assert owner.scale is None
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert owner.scale == 2.0
