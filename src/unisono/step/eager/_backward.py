"""Derivatives of a recording: one compiled program, found again by the structure of what was recorded.

The program goes through the recorded operations from the last to the first. The arrays that were computed are
its arguments, so that it computes no forward pass again; XLA drops what the derivative does not need. As the
program is itself an operation on these arrays, a tape around records it, and can differentiate it again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import keras

from unisono._errors import TapeError
from unisono._lowering._compiler_options import compiler_options
from unisono._types import PyTree
from unisono._values import IndexedSlices
from unisono.step.eager._jax_internals import Operand
from unisono.step.eager._operation import Operation, Pullback, is_differentiable
from unisono.step.eager._recording import TapeRecording

#: From the inputs of all operations and the targets' weights to derivatives.
DerivativeProgram: TypeAlias = Callable[[Sequence[Operand], Sequence[jax.Array] | None], list[jax.Array]]

#: Compiled derivatives, the last used ones at the end.
_PROGRAMS: collections.OrderedDict[Hashable, DerivativeProgram] = collections.OrderedDict()
_PROGRAMS_KEPT = 256


def num_programs() -> int:
    """Return how many derivatives are compiled and kept."""
    return len(_PROGRAMS)


@dataclasses.dataclass(frozen=True, eq=False)
class _BackwardStep:
    """One operation in a program.

    Args:
        pullback: its derivative.
        inputs: the numbers of its inputs among the program's arguments.
        outs: the values whose derivatives it gets.
        wanted: the values whose derivatives it gives.
    """

    pullback: Pullback
    inputs: tuple[int, ...]
    outs: tuple[int, ...]
    wanted: tuple[int, ...]


class _Numbers:
    """Numbers for objects, in the order in which they are first met."""

    def __init__(self) -> None:
        self.objects: list[Operand] = []
        self._by_id: dict[int, int] = {}

    def of(self, value: Operand) -> int:
        """Return the number of an object."""
        # Numbers that are no arrays are not kept by anything else: each is an argument of its own.
        number = self._by_id.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return number


def differentiate(
    recording: TapeRecording,
    targets: Sequence[jax.Array],
    sources: Sequence[Sequence[jax.Array]],
    weights: PyTree,
    each: bool = False,
) -> list[jax.Array | None]:
    """Return the derivative of the sum of targets by each source.

    Args:
        sources: for each one the arrays that stand for it.
        weights: an array, `IndexedSlices` or None for each target, or None for ones.
        each: whether the weights have a further axis in front: there is a derivative for each row.

    Raises:
        TapeError: an array that was recorded is not there any more.
    """
    live, weights = recording.live, _weights_of(weights, targets)
    chosen = [i for i, t in enumerate(targets) if id(t) in live]
    path = _Path(recording.operations, [targets[i] for i in chosen], [a for s in sources for a in s])
    connected = [[a for a in arrays if id(a) in path.reached and id(a) in live] for arrays in sources]
    if not any(connected):
        return [None] * len(sources)
    values, arguments = _Numbers(), _Numbers()
    steps, keys = [], []
    for operation in reversed(path.operations):
        step, key = _step(operation, path, values, arguments)
        steps.append(step)
        keys.append((key, step.inputs, step.outs, step.wanted))
    ends = tuple(values.of(targets[i]) for i in chosen)
    starts = tuple(tuple(values.of(a) for a in arrays) for arrays in connected)
    seeds = [weights[i] for i in chosen] if weights is not None else None
    shapes = tuple((targets[i].shape, str(targets[i].dtype)) for i in chosen)
    # In a function that JAX traces this is a part of its program.
    is_traced = any(isinstance(x, jax.core.Tracer) for x in (*arguments.objects, *(seeds or ())))
    key = (tuple(keys), ends, shapes, starts, seeds is None, each, is_traced)
    program = _program(key, lambda: _Derivative(steps, ends, shapes, starts).compiled(each, is_traced))
    try:
        found = program(_on_same_devices(arguments.objects), seeds)
    except RuntimeError as error:
        if not any(isinstance(x, jax.Array) and _is_deleted(x) for x in arguments.objects):
            raise
        raise TapeError(
            "What a tape has recorded must be there when it is differentiated. Received: an array that was "
            "given to a step since, which used its memory again. Call `tape.gradient` before `fit`, `run` or "
            "another program that trains the same variables."
        ) from error
    grads = iter(found)
    return [_beside(arrays[0], next(grads)) if arrays else None for arrays in connected]


def _on_same_devices(arrays: Sequence[Operand]) -> Sequence[Operand]:
    """Return arrays of which some are on one device, and others on all of a strategy, on the latter."""
    committed = [x for x in arrays if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    committed = [x for x in committed if x.committed]
    if len({frozenset(x.sharding.device_set) for x in committed}) < 2:
        return arrays
    widest = max((x.sharding for x in committed), key=lambda s: len(s.device_set))
    whole = widest
    if isinstance(widest, jax.sharding.NamedSharding):
        whole = jax.sharding.NamedSharding(widest.mesh, jax.sharding.PartitionSpec())
    moved = {id(x) for x in committed if x.sharding.device_set != widest.device_set}
    return [jax.device_put(x, whole) if id(x) in moved else x for x in arrays]


def _beside(source: jax.Array, grad: jax.Array) -> jax.Array:
    """Return a derivative on the devices of its source."""
    if isinstance(source, jax.core.Tracer) or isinstance(grad, jax.core.Tracer) or not source.committed:
        return grad
    if grad.sharding.device_set == source.sharding.device_set:
        return grad
    placed: jax.Array = jax.device_put(grad, source.sharding)
    return placed


def _weights_of(weights: PyTree, targets: Sequence[jax.Array]) -> list[jax.Array] | None:
    """Return the weights of targets as arrays; None where all are one.

    Args:
        weights: a structure with an array, `IndexedSlices` or None for each target, or None.
    """
    if weights is None:
        return None

    def is_leaf(value: object) -> bool:
        return value is None or isinstance(value, IndexedSlices)

    leaves = jax.tree.leaves(weights, is_leaf=is_leaf)
    return [_dense(w, t) for w, t in zip(leaves, targets, strict=True)]


def _dense(weight: jax.Array | IndexedSlices | keras.Variable | None, target: jax.Array) -> jax.Array:
    if weight is None:
        return jnp.ones(target.shape, target.dtype)
    if isinstance(weight, IndexedSlices):
        return jnp.zeros(target.shape, target.dtype).at[weight.indices].add(weight.values)
    return weight.value if isinstance(weight, keras.Variable) else weight


def _is_deleted(array: jax.Array) -> bool:
    return not isinstance(array, jax.core.Tracer) and array.is_deleted()


class _Path:
    """The operations between sources and targets."""

    def __init__(
        self, operations: Sequence[Operation], targets: Sequence[jax.Array], sources: Sequence[jax.Array]
    ) -> None:
        leading = {id(s) for s in sources}
        for operation in operations:
            for i, out in enumerate(operation.outs):
                if any(id(x) in leading for x in operation.inputs_of(i)) and is_differentiable(out):
                    leading.add(id(out))
        #: Ids of what the targets depend on, and what depends on a source.
        self.reached = {id(t) for t in targets} & leading
        needed = []
        for operation in reversed(operations):
            outs = [i for i, out in enumerate(operation.outs) if id(out) in self.reached]
            if not outs:
                continue
            inputs = {id(x) for i in outs for x in operation.inputs_of(i)} & leading
            if inputs:
                needed.append(operation)
                self.reached |= inputs
        self.operations = needed[::-1]


def _step(
    operation: Operation, path: _Path, values: _Numbers, arguments: _Numbers
) -> tuple[_BackwardStep, Hashable]:
    outs = tuple(i for i, out in enumerate(operation.outs) if id(out) in path.reached)
    inputs = {id(x) for i in outs for x in operation.inputs_of(i)} & path.reached
    wanted = tuple(i for i, x in enumerate(operation.args) if id(x) in inputs and is_differentiable(x))
    rule = operation.rule(wanted, outs)
    step = _BackwardStep(
        rule.pullback,
        tuple(arguments.of(x) for x in (*operation.args, *rule.consts)),
        tuple(values.of(operation.outs[i]) for i in outs),
        tuple(values.of(operation.args[i]) for i in wanted),
    )
    return step, rule.key


class _Derivative:
    """A derivative as a pure function.

    Args:
        steps: from the last operation to the first.
        starts: for each source the values that stand for it.
    """

    def __init__(
        self,
        steps: Sequence[_BackwardStep],
        ends: Sequence[int],
        shapes: Sequence[tuple[tuple[int, ...], str]],
        starts: Sequence[Sequence[int]],
    ) -> None:
        self._steps, self._ends, self._shapes, self._starts = steps, ends, shapes, starts

    def __call__(self, arguments: Sequence[Operand], seeds: Sequence[jax.Array] | None) -> list[jax.Array]:
        """Return the derivatives by the sources on which a target depends."""
        grads: dict[int, jax.Array] = {}
        for i, (end, (shape, dtype)) in enumerate(zip(self._ends, self._shapes, strict=True)):
            seed = jnp.ones(shape, dtype) if seeds is None else jnp.asarray(seeds[i], dtype)
            # TensorFlow's derivative by a complex number is the conjugate of JAX's.
            _add(grads, end, _conjugate(jnp.broadcast_to(seed, shape)))
        for step in self._steps:
            # An operation with several outputs may have some that the targets do not need.
            inputs = [arguments[i] for i in step.inputs]
            found = step.pullback(inputs, [grads[n] for n in step.outs])
            for number, grad in zip(step.wanted, found, strict=True):
                _add(grads, number, grad)
        sums = [[grads[n] for n in numbers] for numbers in self._starts if numbers]
        return [_conjugate(sum(of_one[1:], of_one[0])) for of_one in sums]

    def compiled(self, each: bool, is_traced: bool) -> DerivativeProgram:
        """Return the compiled program."""
        # JAX takes options for whole programs alone.
        options = {} if is_traced else compiler_options(jax.default_backend())
        return jax.jit(self.each if each else self, compiler_options=options or None)

    def each(self, arguments: Sequence[Operand], seeds: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the derivatives for each row of weights."""
        found: list[jax.Array] = jax.vmap(lambda own: self(arguments, own))(seeds)
        return found


def _add(grads: dict[int, jax.Array], number: int, grad: jax.Array) -> None:
    grads[number] = grads[number] + grad if number in grads else grad


def _conjugate(grad: jax.Array) -> jax.Array:
    return jnp.conj(grad) if jnp.iscomplexobj(grad) else grad


def _program(key: Hashable, make: Callable[[], DerivativeProgram]) -> DerivativeProgram:
    """Return the compiled program of a structure."""
    program = _PROGRAMS.get(key)
    if program is None:
        program = _PROGRAMS[key] = make()
        if len(_PROGRAMS) > _PROGRAMS_KEPT:
            _PROGRAMS.popitem(last=False)
    _PROGRAMS.move_to_end(key)
    return program
