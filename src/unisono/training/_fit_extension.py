"""Callbacks that extend `fit` itself: they see its arguments and its steps, and may change both."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator

import jax
import keras

from unisono._errors import InvalidArgumentError, InvalidTypeError, MissingPackageError
from unisono._types import KerasWrap, PyTree, UserValue

#: Keras' `logs`: numbers by name.
Logs = dict[str, float | jax.Array]

#: A `train_function`, from a state and an iterator of batches; what wraps one.
TrainFunction = Callable[[PyTree, Iterator[PyTree]], tuple[PyTree, PyTree]]
Wrap = Callable[[TrainFunction], TrainFunction]


@dataclasses.dataclass
class FitCall:
    """The arguments of a call of `fit`, which a `FitExtension` may change before Keras sees them.

    Args:
        callbacks: those of the user, flat, in order.
        wraps: what to put around the model's `train_function`, innermost first.
    """

    model: keras.Model
    arguments: dict[str, UserValue]
    callbacks: list[keras.callbacks.Callback]
    wraps: list[Wrap] = dataclasses.field(default_factory=list)


class RunNumber(float):
    """A number in the logs of an epoch that says how a run went, such as its speed, and nothing of the model.

    Callbacks see it, and the history of `fit` does not.
    """


class FitExtension(keras.callbacks.Callback, abc.ABC):
    """A callback with a context around Keras' `fit`, in which it may change the call."""

    #: Whether a call of `fit` has entered its context.
    _is_entered = False
    #: Whether it reads the state after every single batch: then no step runs ahead.
    _sees_batches = True
    #: Whether it reads weights where an epoch ends, perhaps on one worker alone.
    _reads_weights = True
    #: What of it must be the same on all workers, besides its class.
    _common = ""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Check that the context was entered.

        Raises:
            InvalidArgumentError: the callback is not one of `fit`.
        """
        if not self._is_entered:
            name = type(self).__name__
            raise InvalidArgumentError(
                f"`{name}` must be a callback of `fit`. Received: a call of `on_train_begin` outside of "
                f"it. Write `model.fit(..., callbacks=[{name}(...)])`; in a loop of your own write "
                "`unisono.checkpoint.Checkpoint(...)`."
            )

    @abc.abstractmethod
    def _around_fit(self, call: FitCall) -> contextlib.AbstractContextManager[None]:
        """Return the context for Keras' `fit`.

        Args:
            call: may be changed until the context is entered.
        """


class _Wrapper(keras.callbacks.Callback):
    """Puts the wraps of all extensions around the train function.

    Keras makes that function within `fit`, before `on_train_begin`.
    """

    #: It stays before callbacks that measure what it has wrapped.
    _adds_to_logs = True

    def __init__(self, wraps: list[Wrap]) -> None:
        super().__init__()
        self._wraps = wraps
        self._plain: TrainFunction | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._plain = self.model.train_function
        for wrap in self._wraps:
            self.model.train_function = wrap(self.model.train_function)

    def unwrap(self) -> None:
        """Restore the function that the model had, which keeps its compiled programs for the next `fit`."""
        if self._plain is not None:
            self.model.train_function = self._plain


def flat_callbacks(callbacks: object) -> list[keras.callbacks.Callback]:
    """Return the callbacks of any structure that Keras takes, in order."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    if isinstance(callbacks, (list, tuple)):
        return [c for item in callbacks for c in flat_callbacks(item)]
    if isinstance(callbacks, type):
        raise InvalidTypeError(
            f"Callbacks must be objects. Received: the class {callbacks.__name__}. "
            f"Write `callbacks=[{callbacks.__name__}(...)]`."
        )
    return [callbacks]


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of Keras' TensorBoard and of `History`."""
    return [
        (keras.callbacks.TensorBoard, "set_model", check_tensorboard),
        (keras.callbacks.History, "on_epoch_end", without_run_numbers),
    ]


def without_run_numbers(
    original: Callable[..., None], self: keras.callbacks.History, epoch: int, logs: Logs | None = None
) -> None:
    """Add an epoch's logs to the history; takes the place of `History.on_epoch_end`."""
    original(self, epoch, {n: x for n, x in (logs or {}).items() if not isinstance(x, RunNumber)})


def check_tensorboard(
    original: Callable[..., None], self: keras.callbacks.TensorBoard, model: keras.Model
) -> None:
    """Call Keras' `TensorBoard.set_model` where there is TensorFlow, which writes its files."""
    spec = importlib.util.find_spec("tensorflow")
    # `python -m unisono.tf` provides a module without a file, and without all that Keras' callback needs.
    if spec is None or spec.origin is None:
        raise MissingPackageError(
            "`keras.callbacks.TensorBoard` needs the package `tensorflow`. Received: a Python without it. "
            "Write: `unisono.callbacks.TensorBoard(…)`, which needs `pip install 'unisono[tensorboard]'`.",
            name="tensorflow",
        )
    original(self, model)


def overrides(callback: keras.callbacks.Callback, *hooks: str) -> bool:
    """Return whether a callback does anything in one of some hooks, by its class or on the object itself.

    >>> overrides(keras.callbacks.LambdaCallback(on_epoch_end=print), "on_epoch_end")
    True
    >>> overrides(keras.callbacks.History(), "on_train_batch_end")
    False
    """
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, h), "__func__", None) is not getattr(base, h) for h in hooks)


@contextlib.contextmanager
def around_fit(model: keras.Model, arguments: dict[str, object]) -> Iterator[dict[str, object]]:
    """Enter the contexts of the extensions among the callbacks of `fit`, which may change its arguments."""
    callbacks = flat_callbacks(arguments.get("callbacks"))
    extensions = [c for c in callbacks if isinstance(c, FitExtension)]
    if not extensions:
        yield arguments
        return
    call = FitCall(model, dict(arguments), callbacks)
    wrapper = _Wrapper(call.wraps)
    with contextlib.ExitStack() as stack:
        for extension in extensions:
            stack.enter_context(extension._around_fit(call))
            extension._is_entered = True
            stack.callback(setattr, extension, "_is_entered", False)
        call.arguments["callbacks"] = [wrapper, *call.callbacks]
        try:
            yield call.arguments
        finally:
            wrapper.unwrap()
