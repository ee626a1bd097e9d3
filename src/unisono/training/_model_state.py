"""Who holds the state of a model while it trains, so that no exception or interrupt costs it.

Keras empties the variables while its loop runs, and each step deletes the state that it was given. At
any moment the newest state is where Keras looks for it when the loop ends: in `_jax_state`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: Keras' names of the lists of variables in a state, in its order.
_LISTS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


def hold_state(model: Any, names: Sequence[str], state: Sequence[Any]) -> None:
    """Note the newest state where Keras looks for it.

    Args:
        model: whose variables Keras has emptied, or is about to.
        names: of the lists of variables, in the order of the state.
        state: one list of arrays for each name.
    """
    # Not as an attribute, which Keras would look into: this is done at each step.
    vars(model)["_jax_state"] = dict(zip(names, state, strict=True))


def release_state(model: Any) -> None:
    """Note that the variables hold the state themselves.

    Args:
        model: whose.
    """
    vars(model)["_jax_state"] = None
    model._jax_state_synced = True


def taken_state(original: Callable[..., Any], model: Any, wanted: dict[str, bool]) -> Any:
    """Note the state before Keras empties the variables, which may be interrupted after any of them.

    Args:
        original: Keras' `_get_jax_state`.
        model: whose.
        wanted: which lists, and whether the variables are emptied.
    """
    state = original(model, **{**wanted, "purge_model_variables": False})
    hold_state(model, [name for name in _LISTS if wanted.get(name)], state)
    model._jax_state_synced = False
    lists = {name: wanted[name] for name in _LISTS if name in wanted}
    if wanted.get("purge_model_variables"):
        model._purge_model_variables(**lists)
    return state


@contextlib.contextmanager
def weights_kept(model: Any) -> Iterator[None]:
    """Put the state back into the model's variables when a callback or a step raises.

    Keras empties the variables while it trains, and fills them again only where `fit` ends.

    Args:
        model: whose.
    """
    try:
        yield
    except BaseException:
        state = getattr(model, "_jax_state", None)
        if state:
            model._jax_state_synced = False
            model.jax_state_sync()
        raise
