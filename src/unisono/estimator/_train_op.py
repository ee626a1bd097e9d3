"""Training in a `model_fn`: gradients of its loss, and updates that are made afterwards.

Core runs `model_fn` inside a `ModelCall`. `ambient_gradients` differentiates by the call's tape, so that a
program may clip what it gets. `minimize` and `apply_gradients` return a `TrainOp`, which changes nothing:
the updates that `EstimatorSpec.train_op` reaches are made afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import keras

from unisono._errors import ContextError, InvalidArgumentError, InvalidTypeError
from unisono._system._blocks import set_for_block
from unisono._types import ArrayLike
from unisono.spi import running_step

if TYPE_CHECKING:
    from unisono.step._tape import GradientTape

#: A gradient, or None for a variable on which the loss does not depend, and the variable.
GradientAndVariable = tuple[Any, keras.Variable]


def _before() -> tuple[Any, ...]:
    """Return the updates that a block of `control_dependencies` puts before a new one."""
    call = _CALL.get()
    return () if call is None else call.before


@dataclasses.dataclass(frozen=True, eq=False)
class TrainOp:
    """An update that `EstimatorSpec.train_op` asks for; made when model_fn has returned.

    Args:
        global_step: raised by one with the update, or None.
        are_shares: whether gradients are summed over the replicas, and not averaged.
    """

    optimizer: keras.Optimizer
    gradients_and_variables: tuple[GradientAndVariable, ...]
    global_step: keras.Variable | None = None
    are_shares: bool = False
    after: tuple[Any, ...] = dataclasses.field(default_factory=_before)


@dataclasses.dataclass(frozen=True, eq=False)
class OtherUpdate:
    """An update that `EstimatorSpec.train_op` asks for, and that no optimizer makes."""

    make: Callable[[], None]
    is_alike: bool = True
    after: tuple[Any, ...] = dataclasses.field(default_factory=_before)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainOpGroup:
    """Several updates, made in this order.

    Args:
        ops: train ops, groups, variables and arrays; those that are no update ask for nothing.
    """

    ops: tuple[Any, ...]
    after: tuple[Any, ...] = dataclasses.field(default_factory=_before)


@dataclasses.dataclass(eq=False)
class ModelCall:
    """One run of a `model_fn`, and what it leaves for the loop around it.

    Args:
        tape: a persistent tape that is entered; None where nothing can be differentiated.
        store: the variables, by path: `global_step`, `variables`, `trainable_variables`.
        exposed: arrays by name, which hooks may ask for: what `expose` was given.
        extras: what other modules keep for this run, by their own names.
        initializers: called once with the variables, when they have their first values; not after a restart.
        before: the updates that the running block of `control_dependencies` names.
    """

    mode: str
    tape: GradientTape | None
    store: Any
    exposed: dict[str, Any] = dataclasses.field(default_factory=dict)
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)
    initializers: list[Callable[[Any], None]] = dataclasses.field(default_factory=list)
    before: tuple[Any, ...] = ()
    waiting: list[tuple[Any, tuple[Any, ...]]] = dataclasses.field(default_factory=list)


_CALL: ContextVar[ModelCall | None] = ContextVar("unisono_model_call", default=None)


def entered_call(call: ModelCall) -> AbstractContextManager[object]:
    """Make a call current for a block."""
    return set_for_block(_CALL, call)


def current_call() -> ModelCall | None:
    """Return the run of a model_fn that the running code is part of; None outside of every one."""
    return _CALL.get()


def require_call(what: str) -> ModelCall:
    """Return the run of a model_fn that the running code is part of.

    Raises:
        ContextError: outside of every model_fn that an Estimator runs.
    """
    call = _CALL.get()
    if call is None:
        raise ContextError(
            f"`{what}` works inside a model_fn that an Estimator runs. Received: a call outside of it. Write "
            "`Estimator(model_fn).train(input_fn)`; to look at a model_fn alone, call it in mode 'infer'."
        )
    return call


def expose(name: str, value: ArrayLike) -> ArrayLike:
    """Let hooks ask for an array of model_fn by a name, or by the array itself.

    Args:
        name: such as `"loss"`; a second array of one name gets `_1`, and so on.
    """
    exposed = require_call("expose").exposed
    unique, number = name, 0
    while unique in exposed:
        number += 1
        unique = f"{name}_{number}"
    exposed[unique] = value
    return value


def get_global_step() -> keras.Variable:
    """Return the variable that counts steps, inside a model_fn."""
    step: keras.Variable = require_call("get_global_step").store.global_step
    return step


def trainable_variables() -> list[keras.Variable]:
    """Return the trainable variables that model_fn has made or used so far, in this order."""
    return list(require_call("trainable_variables").store.trainable_variables)


# --- gradients --------------------------------------------------------------------------------


def ambient_gradients(
    loss: ArrayLike, variables: Sequence[keras.Variable] | None = None, aggregated: bool = True
) -> list[Any]:
    """Return the gradients of a loss, as arrays, inside a model_fn.

    Args:
        variables: by which; all trainable ones that model_fn has made so far by default.
        aggregated: whether to return the mean over the replicas, which every replica gets alike: what one
            device computes of the union of their batches. Otherwise this replica's own gradients.

    Returns:
        Arrays of the variables' shapes; None for a variable on which the loss does not depend.
    """
    call = require_call("compute_gradients")
    if call.tape is None:
        raise ContextError(
            "Gradients need a model_fn whose steps can be executed again. Received: one that is called by "
            f"hand, or exported, in mode {call.mode!r}. Call `minimize` in mode 'train' only."
        )
    wanted = trainable_variables() if variables is None else list(variables)
    for variable in wanted:
        if not isinstance(variable, keras.Variable):
            raise InvalidTypeError(
                f"Gradients are taken by variables. Received: {type(variable).__name__} in `var_list`. Use "
                "`unisono.GradientTape` for other arrays."
            )
    if not wanted:
        raise InvalidArgumentError(
            "There must be variables to optimize. Received: a model_fn without trainable variables. Make the "
            "layers before `minimize`."
        )
    gradients: list[Any] = call.tape.gradient(loss, wanted)
    return running_step().aggregate(gradients, wanted) if aggregated else gradients


def compute_gradients(
    optimizer: keras.Optimizer, loss: ArrayLike, var_list: Sequence[keras.Variable] | None = None
) -> list[GradientAndVariable]:
    """Return pairs of a gradient, which may be clipped, and its variable.

    Args:
        optimizer: that applies them; of a `LossScaleOptimizer`, gradients of the scaled loss.
        var_list: variables; all trainable ones by default.
    """
    wanted = trainable_variables() if var_list is None else list(var_list)
    grads = ambient_gradients(optimizer.scale_loss(loss), wanted, aggregated=not _has_shares(optimizer))
    if _has_shares(optimizer):
        with running_step().averaging(False):
            grads = running_step().aggregate(grads, wanted)
    return list(zip(grads, wanted, strict=True))


def _has_shares(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer divides the loss that it scales by the number of replicas."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def apply_gradients(
    optimizer: keras.Optimizer,
    grads_and_vars: Iterable[GradientAndVariable],
    global_step: keras.Variable | None = None,
) -> TrainOp:
    """Return the update by gradients; it is made where `EstimatorSpec.train_op` reaches it.

    Args:
        global_step: what `get_global_step` returns, to be raised by one; None leaves it to the loop.
    """
    pairs = tuple(grads_and_vars)
    if all(gradient is None for gradient, _ in pairs):
        raise InvalidArgumentError(
            "No gradients provided for any variable. Received: None for each of "
            f"{[v.path for _, v in pairs]}. The loss must depend on variables."
        )
    return TrainOp(optimizer, pairs, global_step)


def minimize(
    optimizer: keras.Optimizer,
    loss: ArrayLike,
    global_step: keras.Variable | None = None,
    var_list: Sequence[keras.Variable] | None = None,
) -> TrainOp:
    """Return the update that makes a loss smaller; it is made where `EstimatorSpec.train_op` reaches it.

    Args:
        global_step: what `get_global_step` returns, to be raised by one; None leaves it to the loop.
        var_list: variables; all trainable ones by default.
    """
    wanted = trainable_variables() if var_list is None else list(var_list)
    # Of this replica: the optimizer aggregates them once, in the message of its strategy.
    grads = ambient_gradients(optimizer.scale_loss(loss), wanted, aggregated=False)
    op = apply_gradients(optimizer, zip(grads, wanted, strict=True), global_step)
    return dataclasses.replace(op, are_shares=_has_shares(optimizer))


def group(*ops: object, name: str | None = None) -> TrainOpGroup:
    """Return several updates as one, as `tf.group` does.

    Args:
        ops: what `minimize` and its like return, other groups, and arrays, which need no update.
        name: accepted for TensorFlow's signature.

    >>> len(group(group(), None).ops)
    2
    """
    return TrainOpGroup(tuple(ops))


def train_ops_of(train_op: object, call: ModelCall) -> list[TrainOp | OtherUpdate]:
    """Return the updates that an object reaches, in order, each once."""
    ops: dict[int, TrainOp | OtherUpdate] = {}
    waiting = {id(array): before for array, before in call.waiting}

    def visit(op: object) -> None:
        for part in waiting.get(id(op), getattr(op, "after", ())):
            visit(part)
        if isinstance(op, (TrainOp, OtherUpdate)):
            ops.setdefault(id(op), op)
        elif isinstance(op, (TrainOpGroup, list, tuple)):
            for part in op.ops if isinstance(op, TrainOpGroup) else op:
                visit(part)

    visit(train_op)
    return list(ops.values())


# --- order ------------------------------------------------------------------------------------


def made_in_order(value: ArrayLike) -> ArrayLike:
    """Return a new array of model_fn, which stands for the updates of a block of `control_dependencies`."""
    call = _CALL.get()
    if call is not None and call.before:
        call.waiting.append((value, call.before))
    return value


def is_train_op(value: object) -> bool:
    """Return whether an object can be `EstimatorSpec.train_op`.

    Arrays and variables are what Keras' own optimizers return, whose update is made at once.
    """
    if isinstance(value, (list, tuple)):
        return bool(value) and all(is_train_op(part) for part in value)
    return isinstance(value, (TrainOp, OtherUpdate, TrainOpGroup, keras.Variable, jax.Array))
