"""Tensors, contexts and shapes as TensorFlow names them, over JAX arrays.

Tests: tests/unit/tf/test_tensors.py.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import DTypeLike
from keras import ops

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._mesh import resolve_devices
from unisono._system._replacements import missing, put
from unisono._types import PyTree
from unisono.spi import Function
from unisono.step.eager._recording import Recorder, recording_here
from unisono.step.functions._function import function as unisono_function
from unisono.tf._entries import device_dtype
from unisono.tf._gone import OF_FUNCTIONS, errors_of
from unisono.tf.adapters._spellings import Shape
from unisono.tf.adapters.inputs._host_tensor import is_text, is_text_dtype, text

#: The class of arrays, which is private: of `jax.Array` they are no subclass.
_ARRAYS = importlib.import_module("jax._src.array").ArrayImpl


def add_methods() -> None:
    """Give JAX's arrays the method `numpy()`, which tensors of TensorFlow have.

    Tracers get none: what a program computes has no numbers while it is traced, as in TensorFlow.
    """
    # A subclass is not possible: JAX makes the arrays.
    put(
        __name__,
        [
            (jax.Array, "numpy", missing(_numpy)),
            # Also of an array of shape (1,), which is no number for JAX and NumPy 2.4.
            (_ARRAYS, "__int__", functools.partial(_number_of_one, int)),
            (_ARRAYS, "__float__", functools.partial(_number_of_one, float)),
            *((_ARRAYS, name, functools.partial(_of_numpy, name)) for name in _CALLED_BY_NUMPY),
            *errors_of(Function, OF_FUNCTIONS),
        ],
    )


def _number_of_one(kind: type, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that makes a number of an array of one, and calls JAX's for others."""
    return lambda array: kind(array.item()) if array.size == 1 else method(array)


#: Methods by which functions of NumPy compute, with an argument `out` that a program does not write.
_CALLED_BY_NUMPY = (
    "all", "any", "argmax", "argmin", "cumprod", "cumsum", "max", "mean", "min", "prod", "round", "std",
    "sum", "take", "var",
)  # fmt: skip


def _of_numpy(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of arrays that gives NumPy's functions its numbers, as TensorFlow's tensors do."""

    @functools.wraps(method)
    def compute(array: jax.Array, *args: object, **kwargs: object) -> Any:
        if "out" in kwargs:
            return getattr(np.asarray(array), name)(*args, **kwargs)
        return method(array, *args, **kwargs)

    return compute


def _numpy(array: jax.Array) -> Any:
    # A number where the tensor is one, and a copy that may be changed, as TensorFlow gives it.
    return np.array(array)[()]


def constant(value: PyTree, dtype: DTypeLike | None = None, shape: Sequence[int] | None = None) -> Any:
    """Return a tensor of a value; one of strings stays on the host.

    Args:
        value: numbers or strings, nested lists, or an array.
        dtype: of the tensor; None for the value's, with float32 for Python's floats and int32 for its
            integers.
        shape: of the tensor: one number fills it.

    Raises:
        InvalidArgumentError: an integer of it needs 64 bits, and JAX was not told to have them.

    >>> constant([1, 2]).dtype, constant(0.5).dtype
    (dtype('int32'), dtype('float32'))
    """
    array = value if isinstance(value, jax.Array) else getattr(value, "value", value)
    if is_text_dtype(dtype) or is_text(array if hasattr(array, "dtype") else np.asarray(array)):
        strings = text(array)
        if shape is None:
            return strings
        return text(np.broadcast_to(strings, shape)) if strings.ndim == 0 else strings.reshape(shape)
    target = device_dtype(None if dtype is None else np.dtype(dtype))
    if not isinstance(array, jax.Array):
        _check_fits(array, target)
    made = jnp.asarray(array, target)
    # A step donates what a variable holds: the tensor keeps its values.
    if made is array and array is not value and not isinstance(array, jax.core.Tracer):
        made = jax.device_put(array, may_alias=False)
    if shape is None:
        return made
    return jnp.broadcast_to(made, shape) if made.ndim == 0 else made.reshape(shape)


def _check_fits(value: PyTree, dtype: np.dtype | None) -> None:
    """Raise an error for integers that JAX would cut."""
    given = np.asarray(value)
    if given.dtype.kind not in "iu" or given.dtype.itemsize < 8 or not given.size:
        return
    target = device_dtype(given.dtype) if dtype is None else dtype
    if target.kind in "iu" and (given.min() < np.iinfo(target).min or given.max() > np.iinfo(target).max):
        raise InvalidArgumentError(
            f"Integers must fit into {target}. Received: values from {given.min()} to {given.max()}. Write "
            "`jax.config.update('jax_enable_x64', True)` at the program's start for 64 bits, or keep such "
            "numbers in NumPy's arrays."
        )


def function(func: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Return `unisono.function` of a function, which runs as plain Python where it needs a tensor's value.

    Args:
        func: the function; without it, a decorator is returned.
        *args: of `unisono.function`.
        **kwargs: likewise.
    """
    if func is None:
        return lambda decorated: function(decorated, *args, **kwargs)
    made: Function = unisono_function(func, *args, **kwargs)
    made.may_need_values = True
    return made


class UnconnectedGradients(enum.StrEnum):
    """What `tape.gradient` gives for a source that the target does not depend on."""

    NONE = "none"
    ZERO = "zero"


def shape_of(dims: Sequence[int | None] | int | None) -> Shape | None:
    """Return a shape as a tuple: what `tf.TensorShape` is here.

    >>> shape_of([None, 3])
    (None, 3)
    """
    return None if dims is None else Shape([dims] if isinstance(dims, int) else dims)


def executing_eagerly() -> bool:
    """Return whether operations run at once: not while a function is traced."""
    return not isinstance(jnp.zeros(()), jax.core.Tracer)


def inside_function() -> bool:
    """Return whether a function is being traced."""
    return not executing_eagerly()


def device(name: object) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which arrays are made on a device.

    Under a strategy, variables and replicas stay where the strategy puts them, as in TensorFlow. Where no
    device is of that kind, the default one is used, as TensorFlow's soft placement does.

    Args:
        name: such as `"/gpu:0"`, `"CPU:1"` or `"/job:worker/task:1"`, of which only the device counts.

    Raises:
        DeviceError: there are devices of that kind, but not this one.
    """
    found = re.search(r"(?i)\b(cpu|gpu|tpu)(?::(\d+|\*))?", str(name))
    if found is None or found[1].lower() not in ("cpu", jax.default_backend()):
        return contextlib.nullcontext()
    index = found[2] if found[2] and found[2] != "*" else "0"
    context: contextlib.AbstractContextManager[Any] = jax.default_device(
        resolve_devices([f"{found[1]}:{index}"])[0]
    )
    return context


def no_op(*args: object, **kwargs: object) -> None:
    """Do nothing: what this sets has no meaning here."""


def same(value: object = None) -> object:
    """Return the argument: a decorator that changes nothing."""
    return value


def print_values(*inputs: object, sep: str = " ", end: str = "\n", **kwargs: object) -> None:
    """Print values, also inside a function, each time that it runs.

    Args:
        *inputs: what to print.
        sep: between the values.
        end: is not used inside a function.
        **kwargs: are not used.
    """
    # The value, and not that of each replica.
    inputs = tuple(x.value if isinstance(x, keras.Variable) else x for x in inputs)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inputs)):
        texts = [x.replace("{", "{{").replace("}", "}}") if isinstance(x, str) else "{}" for x in inputs]
        arrays = [x for x in inputs if not isinstance(x, str)]
        jax.debug.callback(lambda *given: print(sep.join(texts).format(*given)), *arrays)
        return
    print(*(np.asarray(x) if isinstance(x, jax.Array) else x for x in inputs), sep=sep, end=end)


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a gradient of its own, `f(*args) -> (result, gradient)`.

    >>> @custom_gradient
    ... def double(x):
    ...     return 2 * x, lambda upstream: 3 * upstream
    >>> float(jax.grad(double)(1.0))
    3.0
    """

    @jax.custom_vjp
    def call(*args: object) -> Any:
        return function(*args)[0]

    @functools.wraps(function)
    def wrapped(*args: object, **kwargs: object) -> Any:
        recorder = recording_here()
        if recorder is not None:
            return _recorded_call(recorder, functools.partial(function, **kwargs), args)
        return call(*args, **kwargs)

    def backward(args: tuple[Any, ...], upstream: Any) -> tuple[Any, ...]:
        gradients = function(*args)[1](upstream)
        return gradients if isinstance(gradients, tuple) else tuple(jax.tree.leaves([gradients]))

    call.defvjp(lambda *args: (function(*args)[0], args), backward)
    return wrapped


def _recorded_call(recorder: Recorder, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function with a gradient of its own where a tape records: with values, as TensorFlow does."""
    arrays = [ops.convert_to_tensor(x) for x in args]

    def call() -> tuple[Any, Callable[..., Any]]:
        result, gradient = function(*arrays)

        def backward(variables: list[keras.Variable], *upstream: Any) -> list[Any]:
            takes = "variables" in inspect.signature(gradient).parameters
            if variables and not takes:
                raise InvalidTypeError(
                    "The gradient of a function that reads variables must take them. Received: one without "
                    f"the argument `variables`, for {variables[0].path!r}. Write `def gradient(upstream, "
                    "variables=None)`, and return a pair: those by the arguments, those by the variables."
                )
            found = gradient(*upstream, variables=variables) if variables else gradient(*upstream)
            of_args, of_variables = found if variables else (found, [])
            of_args = of_args if isinstance(of_args, (list, tuple)) else [of_args]
            if len(of_args) != len(arrays):
                raise InvalidArgumentError(
                    "The gradient of a function must return one value for each of its arguments. Received: "
                    f"{len(of_args)} for {len(arrays)}. Return None for an argument without a gradient."
                )
            return [*of_args, *of_variables]

        return result, backward

    return recorder.call(call, arrays)
