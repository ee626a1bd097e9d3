"""Training without the strategy or the workers that the program was given: one warning of each kind."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import keras

from unisono._features import load
from unisono._system._environ import process_environ
from unisono.collectives._process_group import joined_group

if TYPE_CHECKING:
    from unisono.strategies._base import Strategy

Scope = TypeVar("Scope", bound=Callable[..., object])

_LOG = logging.getLogger("unisono")

_unused: weakref.WeakSet[Strategy] = weakref.WeakSet()
_said: set[str] = set()
#: One of these variables is set where a process is one of several tasks, whose package is loaded only then.
SIGNS = frozenset({
    "TF_CONFIG", "CLUSTER_SPEC", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK",
    "SLURM_STEP_NODELIST", "JAX_PROCESS_ID", "PET_NODE_RANK", "RANK",
})  # fmt: skip


def strategy_made(strategy: Strategy) -> None:
    """Note a strategy that computes nothing yet."""
    _unused.add(strategy)


def strategy_used(strategy: Strategy) -> None:
    """Note that a strategy computes: `fit` and the like of a model that it holds, or `run`."""
    _unused.discard(strategy)


def check_fit(model: keras.Model, strategy: Strategy | None) -> None:
    """Warn where `fit` begins without the strategy that was made, or without the other workers.

    A model beside a strategy that has computed before is meant to be one, as for a comparison.
    """
    unused = next(iter(_unused), None) if strategy is None else None
    if unused is not None:
        _say(
            "scope",
            f"`fit` of {model.name!r} computes without a strategy, on one device: the model was created "
            f"outside of the scope of {unused!r}, which has computed nothing yet. Write\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)",
        )
    elif strategy is None and (count := joined_group().size) > 1:
        _say(
            "apart",
            f"`fit` of {model.name!r} computes in each of the {count} workers by itself: the model was "
            "created outside of the scope of their strategy. To train it together, write\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)",
        )
    elif strategy is None or strategy.process_group.size == 1:
        own = "It has no strategy" if strategy is None else f"{strategy!r} has the devices of one process"
        warn_alone(f"`fit` of {model.name!r} trains", own)


def strategy_of_process_made(name: str) -> None:
    """Warn where a strategy of one process is made in one of several tasks of Slurm, MPI, Ray or the like."""
    if _may_have_siblings() and joined_group().size == 1 and (text := load("signs of other tasks")(name)):
        _say("tasks", text)


def warn_alone(what: str = "JAX computed", why: str = "No strategy joined them") -> None:
    """Warn where TF_CONFIG names other tasks and JAX computes in this process alone."""
    if not _said and _may_have_siblings() and (text := load("tasks of TF_CONFIG")(what, why)):
        _say("alone", text)


def _may_have_siblings() -> bool:
    """Return whether something has started this process that also starts several of a kind."""
    return "ray" in sys.modules or not SIGNS.isdisjoint(process_environ())


def _say(kind: str, text: str) -> None:
    if kind not in _said:
        _said.add(kind)
        _LOG.warning(text)


class _ScopeMethod:
    """A strategy's `scope`, which says what to write where a `with` has it without brackets or strategy."""

    def __init__(self, method: Callable[..., object], *strategy: Strategy) -> None:
        self._method, self._strategy = method, strategy
        functools.update_wrapper(self, method)

    def __get__(self, strategy: Strategy | None, kind: type | None = None) -> Callable[..., object]:
        return self._method if strategy is None else _ScopeMethod(self._method, strategy)

    def __call__(self) -> object:
        return self._method(*self._strategy)

    def __enter__(self) -> NoReturn:
        raise load("mistake")("scope without brackets")

    def __exit__(self, *error: object) -> None: ...


def scope_method(method: Scope) -> Scope:
    """Return a method of strategies whose calls are given to `with`."""

    @functools.wraps(method)
    def of_strategy(*strategy: Any) -> object:
        if not strategy:
            raise load("mistake")("scope of a class")
        return method(*strategy)

    return cast(Scope, _ScopeMethod(of_strategy))
