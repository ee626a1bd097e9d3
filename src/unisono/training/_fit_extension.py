"""Callbacks that take part in `fit` itself: they see its arguments, its steps, and may change both."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras

from unisono._errors import InvalidArgumentError


@dataclasses.dataclass
class FitCall:
    """The arguments of a call of `fit`, which a companion may change before Keras sees them.

    Args:
        model: whose `fit`.
        arguments: by name, defaults included.
        callbacks: those of the user, flat, in order.
        wraps: what to put around the model's `train_function`, innermost first.
    """

    model: Any
    arguments: dict[str, Any]
    callbacks: list[Any]
    wraps: list[Callable[[Any], Any]] = dataclasses.field(default_factory=list)


class FitExtension(keras.callbacks.Callback, abc.ABC):
    """A callback that is asked before `fit` begins and told when it is over."""

    #: Whether a call of `fit` has asked it.
    is_joined = False
    #: Whether the state after every single batch must be there to be seen.
    sees_batches = True
    #: What of it must be the same on all workers, besides its class.
    common = ""

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras' hook: make sure that it takes part.

        Raises:
            InvalidArgumentError: in a `fit` that was looked up before Unisono had wrapped Keras.
        """
        if not self.is_joined:
            name = type(self).__name__
            raise InvalidArgumentError(
                f"`{name}` must be made before `fit` is called, which it takes part in. Received: the first "
                f"{name} of this program, made inside the call. Write `callback = {name}(...)` in a line "
                "before, and `model.fit(..., callbacks=[callback])`."
            )

    @abc.abstractmethod
    def joined(self, call: FitCall) -> contextlib.AbstractContextManager[None]:
        """Take part in a call; the context surrounds Keras' `fit`.

        Args:
            call: may be changed until the context is entered.
        """


class _Wrapper(keras.callbacks.Callback):
    """Puts the wraps of all companions around the train function, which exists when training begins."""

    def __init__(self, wraps: list[Callable[[Any], Any]]) -> None:
        super().__init__()
        self._wraps = wraps
        self._plain: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._plain = self.model.train_function
        for wrap in self._wraps:
            self.model.train_function = wrap(self.model.train_function)

    def unwrap(self) -> None:
        """Leave the model with the function that it had, which keeps its programs."""
        if self._plain is not None:
            self.model.train_function = self._plain


def flat_callbacks(callbacks: Any) -> list[Any]:
    """The callbacks of any structure that Keras takes, in order."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    if isinstance(callbacks, (list, tuple)):
        return [c for item in callbacks for c in flat_callbacks(item)]
    return [callbacks]


def overrides(callback: Any, *hooks: str) -> bool:
    """Return whether a callback does anything in one of some hooks, by its class or on the object itself.

    Args:
        callback: any.
        hooks: names of its methods.

    >>> overrides(keras.callbacks.LambdaCallback(on_epoch_end=print), "on_epoch_end")
    True
    >>> overrides(keras.callbacks.History(), "on_train_batch_end")
    False
    """
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, h), "__func__", None) is not getattr(base, h) for h in hooks)


def has_fit_extensions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `fit` has a companion among its callbacks."""
    # `callbacks` is the sixth argument after the model.
    callbacks = args[5] if len(args) > 5 else kwargs.get("callbacks")
    return any(isinstance(c, FitExtension) for c in flat_callbacks(callbacks))


@contextlib.contextmanager
def around_fit(model: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Let the companions among the callbacks of `fit` change its arguments.

    Args:
        model: the model.
        arguments: of `fit`, by name, defaults included.

    Yields:
        The arguments for Keras' own `fit`.
    """
    callbacks = flat_callbacks(arguments.get("callbacks"))
    companions = [c for c in callbacks if isinstance(c, FitExtension)]
    if not companions:
        yield arguments
        return
    call = FitCall(model, dict(arguments), callbacks)
    wrapper = _Wrapper(call.wraps)
    with contextlib.ExitStack() as stack:
        for companion in companions:
            stack.enter_context(companion.joined(call))
            companion.is_joined = True
            stack.callback(setattr, companion, "is_joined", False)
        call.arguments["callbacks"] = [wrapper, *call.callbacks]
        try:
            yield call.arguments
        finally:
            wrapper.unwrap()
