"""Where the state of a model is while it trains, so that no exception or interrupt loses it.

Keras empties the variables while its loop runs, and each step donates the state that it was given. At
any moment the newest state is where Keras looks for it when the loop ends.

Tests: tests/virtual/training/test_failures.py and test_interrupts.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax
import keras

from unisono.step._keras_internals import empty_variables, mark_synced, set_training_state, training_state
from unisono.step._value_handle import in_parts

#: One list of arrays for each of Keras' lists of variables.
State = tuple[Sequence[jax.Array], ...]

#: Keras' names of the lists of variables in a state, in its order.
LISTS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def hold_state(model: keras.Model, names: Sequence[str], state: Sequence[Sequence[jax.Array]]) -> None:
    """Note the newest state where Keras looks for it."""
    set_training_state(model, dict(zip(names, state, strict=True)))


def release_state(model: keras.Model) -> None:
    """Note that the variables hold the state themselves."""
    set_training_state(model, None)
    mark_synced(model, True)


def taken_state(original: Callable[..., State], model: keras.Model, wanted: dict[str, bool]) -> State:
    """Take the state from a model's variables, and note it before Keras empties the first of them.

    Args:
        wanted: which lists, and whether the variables are emptied.

    Returns:
        What `original` returns.
    """
    # Keras empties variable by variable, and notes the state afterwards: an interrupt between the two
    # would lose the weights.
    with in_parts():
        state = original(model, **{**wanted, "purge_model_variables": False})
    hold_state(model, [name for name in LISTS if wanted.get(name)], state)
    mark_synced(model, False)
    lists = {name: wanted[name] for name in LISTS if name in wanted}
    if wanted.get("purge_model_variables"):
        empty_variables(model, lists)
    return state


@contextlib.contextmanager
def weights_kept(model: keras.Model) -> Iterator[None]:
    """Put the state back into the model's variables when a callback or a step raises.

    Keras empties the variables while it trains, and fills them again only where `fit` ends.
    """
    try:
        yield
    except BaseException:
        if training_state(model):
            mark_synced(model, False)
            model.jax_state_sync()
        raise
