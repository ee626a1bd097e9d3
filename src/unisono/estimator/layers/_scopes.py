"""Scopes of names, and which layers and variables are used again: TensorFlow 1's rule.

A layer or variable of a name that was used before in the same run of the model_fn is an error, unless `reuse`
says that the earlier one is meant. `reuse=True` for a name that was not used before is an error, too;
`AUTO_REUSE` takes either. A scope that is entered again numbers its layers from zero again.

Tests: tests/unit/estimator/test_layers.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import keras

from unisono._context import get_strategy, has_strategy
from unisono._errors import InvalidArgumentError
from unisono._system._blocks import set_for_block
from unisono.estimator._collections import current_collections, required_collections
from unisono.step.variables._merge_rules import VariableAggregation

Part = TypeVar("Part")

#: Make what is not there, and use what is.
AUTO_REUSE = "auto_reuse"


@dataclasses.dataclass(eq=False)
class VariableScope:
    """A block in which names have a prefix.

    Args:
        name: string; the prefix, with the prefixes of the scopes around it.
        reuse: True, False, `AUTO_REUSE` or None; whether names of earlier layers and variables are meant.
        counts: how many automatic names there are of each kind.

    >>> VariableScope("encoder").name
    'encoder'
    """

    name: str = ""
    reuse: bool | str | None = None
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def original_name_scope(self) -> str:
        """The prefix with a slash."""
        return f"{self.name}/"

    def reuse_variables(self) -> None:
        """Let the names of all later layers and variables in this scope mean earlier ones."""
        self.reuse = True

    def path(self, name: str) -> str:
        """Return a name with the prefix.

        Args:
            name: string; the name without it.

        Returns:
            A string, with slashes between its parts.
        """
        return f"{self.name}/{name}" if self.name else name

    def number(self, kind: str) -> str:
        """Return the next automatic name of this scope.

        Args:
            kind: string; what the name begins with.

        Returns:
            A string, such as `"dense_1"`.
        """
        count = self.counts.get(kind, 0)
        self.counts[kind] = count + 1
        return f"{kind}_{count}" if count else kind


_SCOPE: ContextVar[VariableScope | None] = ContextVar("unisono_variable_scope", default=None)


def get_variable_scope() -> VariableScope:
    """Return the scope of the running code.

    Returns:
        A `VariableScope`, outside of all scopes one without a name.

    >>> with variable_scope("net"):
    ...     get_variable_scope().name
    'net'
    """
    return _SCOPE.get() or VariableScope()


@contextlib.contextmanager
def variable_scope(
    name_or_scope: str | VariableScope | None,
    default_name: str | None = None,
    values: object = None,
    initializer: object = None,
    regularizer: object = None,
    reuse: bool | str | None = None,
) -> Iterator[VariableScope]:
    """Put a prefix before the names of the layers and variables of a block.

    Args:
        name_or_scope: string, the prefix; or a `VariableScope` that was entered before; or None.
        default_name: string; the prefix where `name_or_scope` is None, to which a number is added.
        values: any value; has no effect.
        initializer: must be None; layers take initializers.
        regularizer: must be None; layers take regularizers.
        reuse: True, False or `AUTO_REUSE`; whether names of earlier layers and variables are meant. None for
            what the scope around says.

    Returns:
        A context manager, whose value is the `VariableScope`.

    Raises:
        InvalidArgumentError: both names are None, an initializer or regularizer is given, or a scope is
            entered again inside another scope than its own.
    """
    if initializer is not None or regularizer is not None:
        raise InvalidArgumentError(
            "Initializers and regularizers belong to layers and variables. Received: one for a scope. Pass "
            "it to each `tf.layers` function or `get_variable`."
        )
    outer = get_variable_scope()
    name = _name_below(outer, name_or_scope) or (default_name and outer.number(default_name))
    if not name:
        raise InvalidArgumentError("A scope must have a name. Received: None. Write `variable_scope('net')`.")
    own = VariableScope(outer.path(name), (outer.reuse or None) if reuse is None else reuse)
    with set_for_block(_SCOPE, own), contextlib.ExitStack() as stack:
        for part in name.split("/"):
            stack.enter_context(keras.name_scope(part))
        yield own


def _name_below(outer: VariableScope, given: str | VariableScope | None) -> str | None:
    if not isinstance(given, VariableScope):
        return given
    if outer.name and not given.name.startswith(f"{outer.name}/"):
        raise InvalidArgumentError(
            f"A scope is entered again outside of others, or in the one around it. Received: {given.name!r} "
            f"in {outer.name!r}. Leave that one first."
        )
    return given.name.removeprefix(f"{outer.name}/") if outer.name else given.name


def found_or_made(
    kind: str, cls: type[Part], name: str | None, reuse: bool | str | None, make: Callable[[str | None], Part]
) -> Part:
    """Return a layer or variable of an earlier call, or make it, by the rule of this module.

    Raises:
        ContextError: `reuse` is True or `AUTO_REUSE` outside of a model_fn.
        InvalidArgumentError: the name was used before, or was not, against the rule.
    """
    scope = get_variable_scope()
    again = scope.reuse if reuse is None else reuse
    collections = required_collections("reuse") if again else current_collections()
    if name is None and not scope.name:
        if again:
            raise InvalidArgumentError(
                f"What is used again must have a name. Received: reuse={again!r} without `name`. Write "
                f"`name={kind!r}` in both calls."
            )
        return make(None)
    own = scope.number(kind) if name is None else name
    path = scope.path(own)
    variable_or_layer = None if collections is None else collections.named.get(path)
    if variable_or_layer is not None and not again:
        raise InvalidArgumentError(
            f"A name stands for one layer or variable. Received: {path!r} for a second one. Write "
            "`reuse=True` if the first is meant, or choose another name."
        )
    if variable_or_layer is None and again and again != AUTO_REUSE:
        raise InvalidArgumentError(
            f"What is used again must be there. Received: reuse=True for {path!r}, which was not made "
            "before. Write `reuse=AUTO_REUSE` to make it where it is not there."
        )
    if variable_or_layer is None:
        variable_or_layer = make(own)
        if collections is not None:
            collections.named[path] = variable_or_layer
    if not isinstance(variable_or_layer, cls):
        raise InvalidArgumentError(
            f"What is used again must be of the same kind. Received: a {cls.__name__} of the name {path!r}, "
            f"which is a {type(variable_or_layer).__name__}. Choose another name."
        )
    return variable_or_layer


def get_variable(
    name: str,
    shape: Any = None,
    dtype: Any = "float32",
    initializer: Any = None,
    regularizer: object = None,
    trainable: bool = True,
    collections: object = None,
    aggregation: object = None,
    **options: object,
) -> keras.Variable:
    """Return a variable of the current scope.

    Args:
        name: string; the name below the scope.
        shape: list or tuple of whole numbers; None where `initializer` is an array.
        dtype: string or dtype; the type of the elements.
        initializer: initializer of Keras or its name, function of a shape, or array; None for
            `"glorot_uniform"`.
        regularizer: must be None; `tf.losses.add_loss` adds the loss of a variable.
        trainable: bool; whether optimizers change the variable.
        collections: any value; has no effect.
        aggregation: `VariableAggregation`; what several replicas assign is averaged, and SUM is an error.
        options: other arguments of TensorFlow 1; they have no effect.

    Returns:
        A Keras variable: a new one, or an earlier call's, where `reuse` of the scope says so.

    Raises:
        ContextError: `reuse` of the scope is True or `AUTO_REUSE` outside of a model_fn.
        InvalidArgumentError: an earlier call has used the name, or has not, against what `reuse` says; there
            is a regularizer; or `aggregation` is SUM where there are several replicas.

    >>> with variable_scope("net"):
    ...     get_variable("w", [2], initializer="zeros").path
    'net/w'
    """
    if regularizer is not None:
        raise InvalidArgumentError(
            "A variable by itself has no regularizer. Received: one for "
            f"{name!r}. Add the loss by `tf.losses.add_loss(regularizer(variable))`."
        )
    _check_aggregation(name, aggregation)
    kind = str(getattr(dtype, "name", None) or dtype)

    def make(own: str | None) -> keras.Variable:
        if initializer is None or isinstance(initializer, str) or callable(initializer):
            initial = keras.initializers.get(initializer or "glorot_uniform")
            return keras.Variable(initial, tuple(shape), kind, trainable=trainable, name=own)
        return keras.Variable(initializer, dtype=kind, trainable=trainable, name=own)

    return found_or_made("variable", keras.Variable, name, None, make)


def _check_aggregation(name: str, aggregation: object) -> None:
    replicas = get_strategy().num_replicas_in_sync if has_strategy() else 1
    if replicas > 1 and getattr(aggregation, "value", aggregation) == VariableAggregation.SUM.value:
        raise InvalidArgumentError(
            "What replicas assign to a variable of a model_fn is averaged. Received: aggregation=SUM for "
            f"{name!r} on {replicas} replicas. Leave it out, and assign the value times {replicas}."
        )
