"""Which of a model's steps are in TensorFlow's form, and what such a model holds.

Keras on JAX calls `train_step(state, data)`, which returns the new state. TensorFlow's `train_step(data)`
reads and assigns variables. The number of arguments tells one from the other.

Tests: tests/virtual/training/stateful/test_steps.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping

import keras

from unisono._types import PyTree
from unisono.training.trainer._trainer_step import TASKS, TrainerTask

#: Models whose data have elements that are no tuples, with the names of the methods that take them.
_BARE: weakref.WeakKeyDictionary[keras.Model, set[TrainerTask]] = weakref.WeakKeyDictionary()

#: What the last call of a method of a model runs; of models with a step in TensorFlow's form alone.
_RUNNING: weakref.WeakKeyDictionary[keras.Model, TrainerTask] = weakref.WeakKeyDictionary()


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


# --- data -------------------------------------------------------------------------------------------------


def note_call(model: keras.Model, name: str, data: object) -> None:
    """Note which step a call runs, and whether its data have elements that Keras makes tuples of."""
    if not has_stateful_step(model):
        return
    task = _RUNNING[model] = TASKS[name]
    dataset = getattr(getattr(data, "position", None), "dataset", None)
    # A call with one batch has no elements: what it is given is `x`.
    is_bare = name.endswith("_on_batch")
    if dataset is not None:
        is_bare = not isinstance(dataset.element_spec, (tuple, list))
    (set.add if is_bare else set.discard)(_BARE.setdefault(model, set()), task)


def running_task(model: keras.Model) -> TrainerTask | None:
    """Return which step of a model the last call of `fit` and the like runs; None where that is not known."""
    return _RUNNING.get(model)


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


def as_tensorflow(model: keras.Model, task: TrainerTask, batch: PyTree) -> PyTree:
    """Return a batch as TensorFlow gives it to a step: without what there is not."""
    if not isinstance(batch, tuple):
        return batch
    while len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    is_bare = len(batch) == 1 and task in _BARE.get(model, ())
    return batch[0] if is_bare and not isinstance(batch[0], (tuple, list)) else batch


# --- what a model holds -----------------------------------------------------------------------------------


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
