"""What Keras 3 no longer takes and TensorFlow 2 did: lists of numbers, `lr`, names of dtypes, `get_shape()`.

Tests: tests/unit/tf/test_spellings.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence, ValuesView
from typing import Any

import jax
import keras
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.step._keras_internals import all_layers
from unisono.step.variables._merge_rules import VariableAggregation, VariableSynchronization
from unisono.step.variables._variable import Variable
from unisono.tf._entries import device_dtype
from unisono.tf.adapters._random import as_initializer, layer_call


class Submodules:
    """The attribute `submodules` of a layer; one that a program sets itself comes first."""

    def __get__(self, layer: keras.Layer | None, owner: type) -> Any:
        return self if layer is None else tuple(all_layers(layer, include_self=False))


def taking_lists(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Layer.__call__` that takes lists of numbers; Keras 3 takes each number for a tensor.

    The call may draw random numbers without a seed.
    """

    @functools.wraps(call)
    def called(self: keras.Layer, *args: object, **kwargs: object) -> Any:
        if args and isinstance(args[0], (list, tuple, int, float)) and _is_number(args[0]):
            args = (_as_array(args[0]), *args[1:])
        elif args and isinstance(args[0], ValuesView):
            args = (list(args[0]), *args[1:])
        with layer_call(self):
            return call(self, *args, **kwargs)

    return called


def _is_number(value: object) -> bool:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (bool, int, float))


def _as_array(value: PyTree) -> np.ndarray:
    array = np.asarray(value)
    return array.astype("float32") if array.dtype == np.float64 else array.astype(device_dtype(array.dtype))


#: The order of arguments of TensorFlow's `add_weight`.
_OF_WEIGHTS = ("name", "shape", "dtype", "initializer", "regularizer", "trainable", "constraint")


def taking_name(add_weight: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Layer.add_weight` as in TensorFlow 2: a name first, `synchronization` and `aggregation`."""

    @functools.wraps(add_weight)
    def added(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        if callable(kwargs.get("initializer")):
            kwargs["initializer"] = as_initializer(kwargs["initializer"])
        if args and isinstance(args[0], str):
            args, kwargs = (), {**dict(zip(_OF_WEIGHTS, args, strict=False)), **kwargs}
        if "synchronization" in kwargs or isinstance(kwargs.get("aggregation"), VariableAggregation):
            return _with_rule(*args, **{"dtype": self.variable_dtype, **kwargs})
        return add_weight(self, *args, **kwargs)

    return added


def _with_rule(
    shape: Sequence[int] = (),
    initializer: Any = "glorot_uniform",
    dtype: Any = None,
    trainable: bool = True,
    regularizer: Any = None,
    **options: Any,
) -> Variable:
    """Return a weight that says how the values of several replicas become one."""
    if options.get("synchronization") in (VariableSynchronization.ON_READ, "on_read"):
        trainable = False
    # Also where the first call of a step builds the layer, while it is traced.
    with jax.ensure_compile_time_eval():
        made = keras.initializers.get(initializer)(tuple(shape), dtype)
    variable = Variable(made, trainable=trainable, dtype=dtype, **options)
    variable.regularizer = regularizer
    return variable


def _taking(method: Callable[..., Any], change: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """Return a method that takes what `change` of the object and the arguments makes arguments of Keras 3."""

    @functools.wraps(method)
    def taking(self: keras.Layer, *args: object, **kwargs: object) -> Any:
        args, kwargs = change(self, args, kwargs)
        return method(self, *args, **kwargs)

    # Keras looks at the arguments of a layer's `__init__` to save it.
    taking.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return taking


def taking_self(init: Callable[..., None]) -> Callable[..., None]:
    """Return `Layer.__init__` that takes `super().__init__(self)`, as TensorFlow 2 did."""
    return _taking(init, lambda self, args, kwargs: (args[1:] if args and args[0] is self else args, kwargs))


def taking_first(as_taken: Callable[[Any], Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what makes an `__init__` of Keras 3 take the first argument that TensorFlow 2 took."""

    def taking(init: Callable[..., None]) -> Callable[..., None]:
        name = list(inspect.signature(init).parameters)[1]

        def change(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            named = {key: as_taken(value) if key == name else value for key, value in kwargs.items()}
            return (*map(as_taken, args[:1]), *args[1:]), named

        return _taking(init, change)

    return taking


def as_size(units: object) -> object:
    """Return the units of `Dense`: an integer of NumPy as Python's, as `tf.size(x).numpy()` is."""
    return int(units) if isinstance(units, np.integer) else units


def as_layers(layers: object) -> object:
    """Return the layers of `Sequential`: one alone as a list."""
    return [layers] if isinstance(layers, keras.Layer) else layers


def taking_dtype(get_initial_state: Callable[..., Any]) -> Callable[..., Any]:
    """Return `get_initial_state` of a cell of an RNN that takes Keras 2's `inputs` and `dtype`."""

    @functools.wraps(get_initial_state)
    def taking(
        self: keras.Layer, inputs: Any = None, batch_size: Any = None, dtype: str | None = None
    ) -> Any:
        # By position Keras 3 has the number of rows there.
        rows = inputs if batch_size is None else batch_size
        state = get_initial_state(self, rows.shape[0] if getattr(rows, "ndim", 0) else rows)
        return state if dtype is None else jax.tree.map(lambda x: keras.ops.cast(x, dtype), state)

    return taking


def taking_lr(init: Callable[..., None]) -> Callable[..., None]:
    """Return an optimizer's constructor with `lr`, and with `decay`, which Keras 3 ignores."""

    @functools.wraps(init)
    def initialized(
        self: keras.Layer,
        learning_rate: object = 0.001,
        *args: object,
        lr: object = None,
        decay: float | None = None,
        **kwargs: object,
    ) -> None:
        rate = learning_rate if lr is None else lr
        if decay:
            rate = keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)
        init(self, rate, *args, **kwargs)

    return initialized


class DtypeName(str):
    """The name of a dtype, as Keras has it, with TensorFlow's attributes.

    >>> DtypeName("float16").name
    'float16'
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """The plain name."""
        return str(self)

    @property
    def as_numpy_dtype(self) -> type:
        """The type of NumPy's numbers."""
        return jax.numpy.dtype(str(self)).type

    @property
    def is_floating(self) -> bool:
        """Whether numbers have a fraction."""
        return bool(jax.numpy.issubdtype(jax.numpy.dtype(str(self)), np.floating))


def with_name(dtype: property) -> property:
    """Return the property of a dtype whose value has a `name`."""
    read: Any = dtype.fget

    @functools.wraps(read)
    def named(self: keras.Layer) -> Any:
        value = read(self)
        return DtypeName(value) if type(value) is str else value

    return property(named, dtype.fset, dtype.fdel, dtype.__doc__)


class Dimension(int):
    """A size of TensorFlow 1: a number.

    >>> Dimension(3).value + Dimension(4)
    7
    """

    @property
    def value(self) -> int:
        """The number."""
        return int(self)

    def is_compatible_with(self, other: int | None) -> bool:
        """Return whether the two may be the same size."""
        return other is None or other == self


class Shape(tuple[Any, ...]):
    """A shape: a tuple, with what `tf.TensorShape` has.

    >>> Shape([None, 3]).as_list(), Shape([2, 3]).num_elements()
    ([None, 3], 6)
    """

    __slots__ = ()

    def __new__(cls, dims: Sequence[int | None] = ()) -> Shape:
        return super().__new__(cls, dims)

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self)

    ndims = rank

    @property
    def dims(self) -> list[Dimension | None]:
        """The sizes as TensorFlow 1 has them."""
        return [None if size is None else Dimension(size) for size in self]

    def __bool__(self) -> bool:
        """Return True: a scalar has a shape, too."""
        return True

    def as_list(self) -> list[int | None]:
        """Return the sizes."""
        return list(self)

    def num_elements(self) -> int | None:
        """Return the number of entries, or None where it is not known."""
        return None if None in self else int(np.prod(self, dtype=np.int64))

    def is_fully_defined(self) -> bool:
        """Return whether all sizes are known."""
        return None not in self

    def is_compatible_with(self, other: Sequence[int | None]) -> bool:
        """Return whether the two may be the same shape."""
        return len(self) == len(other) and all(
            None in (a, b) or a == b for a, b in zip(self, other, strict=True)
        )


def check_shape(tensor: jax.Array | np.ndarray, shape: Sequence[int | None] | None) -> None:
    """Do what `tensor.set_shape` does where all sizes are known: check them.

    Args:
        tensor: any array.
        shape: with None where any size is allowed; None for any shape.

    Raises:
        InvalidArgumentError: the tensor has another shape.
    """
    if shape is not None and not Shape(tensor.shape).is_compatible_with(shape):
        raise InvalidArgumentError(
            f"`set_shape` says what a tensor's shape is. Received: {tuple(shape)}, for a tensor of shape "
            f"{tuple(tensor.shape)}. Write `tf.reshape` for another one."
        )


class Reference:
    """A key of dicts and sets for a variable or tensor, which cannot be one itself."""

    def __init__(self, of: object) -> None:
        self._of = of

    def deref(self) -> object:
        """Return the variable or tensor."""
        return self._of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and self._of is other._of

    def __hash__(self) -> int:
        return id(self._of)
