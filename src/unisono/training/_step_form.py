"""Which of a model's steps are in TensorFlow's form; what runs them is loaded for such models alone.

Keras on JAX calls `train_step(state, data)`, which returns the new state. TensorFlow's `train_step(data)`
reads and assigns variables. The number of arguments tells one from the other.

Tests: tests/virtual/training/stateful/test_steps.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from unisono import _features
from unisono._types import KerasWrap
from unisono.step._program import current_frame
from unisono.training.trainer._trainer_step import TASKS, TrainerTask


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of `keras.Model`: its own steps, which a step in TensorFlow's form may call."""
    return [(keras.Model, task.step, functools.partial(_inherited_step, task)) for task in TrainerTask]


def _inherited_step(
    task: TrainerTask, original: Callable[..., Any], self: keras.Model, *args: object, **kwargs: object
) -> Any:
    """Run one of Keras' own steps, also where it is given the data alone: `super().train_step(data)`."""
    if len(args) + len(kwargs) != 1 or current_frame() is None:
        return original(self, *args, **kwargs)
    return _features.load("Keras' step in TensorFlow's form")(original, self, task, *args, **kwargs)


def is_stateful(model: keras.Model, task: TrainerTask) -> bool:
    """Return whether one of a model's steps takes the data alone, as in TensorFlow.

    >>> class Tuned(keras.Model):
    ...     def train_step(self, data):
    ...         return {}
    >>> is_stateful(Tuned(), TrainerTask.TRAIN), is_stateful(Tuned(), TrainerTask.TEST)
    (True, False)
    """
    name = task.step
    # Of the object itself, where a program has set it: there it has no `self`.
    own = vars(model).get(name)
    if own is not None:
        return _takes_data_alone(own, 0)
    step = getattr(type(model), name)
    return step is not getattr(keras.Model, name) and _takes_data_alone(step, 1)


def has_stateful_step(model: keras.Model) -> bool:
    """Return whether any step of a model is in TensorFlow's form."""
    return any(is_stateful(model, task) for task in TrainerTask)


_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


@functools.lru_cache(maxsize=256)
def _takes_data_alone(step: Callable[..., object], bound: int) -> bool:
    """Return whether a step has one argument besides the first `bound` ones."""
    arguments = inspect.signature(step).parameters.values()
    needed = [p for p in arguments if p.default is p.empty and p.kind in _POSITIONAL]
    return len(needed) == bound + 1 and all(p.kind is not p.VAR_POSITIONAL for p in arguments)


def task_of_state(wanted: Mapping[str, bool]) -> TrainerTask:
    """Return for which function Keras takes the state of a model."""
    if wanted.get("optimizer_variables"):
        return TrainerTask.TRAIN
    return TrainerTask.TEST if wanted.get("metrics_variables") else TrainerTask.PREDICT


@contextlib.contextmanager
def explaining_form(model: keras.Model, name: str) -> Iterator[None]:
    """Add a note where Keras itself has called a step in TensorFlow's form, which it cannot on JAX."""
    try:
        yield
    except (TypeError, RuntimeError) as error:
        task = TASKS[name]
        # Of a call with the state, or of a model without `call`, which Keras cannot build.
        texts = ("positional argument", "automatically build the model")
        if any(text in str(error) for text in texts) and is_stateful(model, task):
            error.add_note(
                f"`{type(model).__name__}.{task.step}` has TensorFlow's form, `{task.step}(self, data)`. A "
                "strategy runs it, also one for a single device: create and compile the model inside "
                "`with unisono.OneDeviceStrategy('cpu:0').scope():`."
            )
        raise


def held_optimizers(model: keras.Model) -> dict[str, keras.Optimizer]:
    """Return the optimizers that a model with a step of its own holds besides `model.optimizer`, by name.

    Args:
        model: any; for one with Keras' form of steps there are none.

    >>> class Pair(keras.Model):
    ...     def train_step(self, data):
    ...         return {}
    >>> pair = Pair()
    >>> pair.both = [keras.optimizers.SGD(), {"second": keras.optimizers.Adam()}]
    >>> list(held_optimizers(pair))
    ['both/0', 'both/1/second']
    """
    if not has_stateful_step(model):
        return {}
    main = getattr(model, "optimizer", None)
    found: dict[str, keras.Optimizer] = {}
    known = {id(main)}
    for name, value in vars(model).items():
        for path, optimizer in _optimizers_in(name, value):
            if id(optimizer) not in known:
                known.add(id(optimizer))
                found[path] = optimizer
    return found


def _optimizers_in(path: str, value: object) -> Iterator[tuple[str, keras.Optimizer]]:
    if isinstance(value, keras.Optimizer):
        yield path, value
    elif isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _optimizers_in(f"{path}/{key}", item)


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Return all optimizers that train a model: `model.optimizer`, and those that `held_optimizers` finds."""
    main = getattr(model, "optimizer", None)
    return [*([] if main is None else [main]), *held_optimizers(model).values()]


#: The attribute of a model with what is called when a step has built it.
WHEN_BUILT = "_unisono_when_built"


def when_built_by_step(model: keras.Model, call: Callable[[], None]) -> None:
    """Call a function once, when a step in TensorFlow's form has built a model."""
    # Not by Keras' own `__setattr__`, which tracks lists.
    vars(model).setdefault(WHEN_BUILT, []).append(call)
