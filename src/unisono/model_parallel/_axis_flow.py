"""The flow of arrays' axes through a traced program: which are one, and what it costs to cut them. Pure.

Two axes are joined where an operation works on each index of both by itself, as an elementwise operation
does on all axes, and a product on those that it does not contract. If joined axes are cut together, the
operation sends nothing. Axes that are joined, directly or through others, are one *class*. What cutting a
class costs is noted beside: a contraction leaves partial sums, which are all-reduced; an operand that lacks
an axis of the result gets its gradient as partial sums; and an operation that needs an axis whole gathers it.

Source: Alabed et al., "PartIR", 2024 (https://arxiv.org/abs/2401.11202), and "TOAST", 2025
(https://arxiv.org/abs/2508.15010), which read names of axes from programs, too.

Tests: tests/unit/model_parallel/test_automatic_cut.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp

from unisono._mesh import AXIS
from unisono.training._jaxprs import called_by


@dataclasses.dataclass(frozen=True, eq=False)
class FlowArray:
    """An array of a traced program.

    Args:
        axes: the number of each of its axes.
        nbytes: of all its elements.
        gradient_bytes: of its gradient, which is summed up first where the array was repeated.
        has_gradient: whether a training step computes its gradient.
        is_weight: whether it is a weight, or made of weights alone.
        is_float: whether its elements are real numbers.
    """

    axes: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    gradient_bytes: int
    has_gradient: bool = False
    is_weight: bool = False
    is_float: bool = True


class AxisPlace(NamedTuple):
    """An axis of an operand, or of a result, of an operation.

    Args:
        number: of the operand or result.
        axis: of it.
    """

    number: int
    axis: int


class FlowStep:
    """One operation, while its rule says how axes pass through it.

    Args:
        size: over how many devices axes are cut.
    """

    def __init__(
        self, eqn: jex.JaxprEqn, operands: Sequence[FlowArray], size: int, repeated: Container[int] = ()
    ) -> None:
        self.operands, self.size = list(operands), size
        self._made_by_repeating = repeated
        self.params = eqn.params
        self.shapes = [x.shape for x in operands]
        avals: list[Any] = [v.aval for v in eqn.outvars]
        self.out_shapes = [tuple(aval.shape) for aval in avals]
        #: Axes of operands and results that are one.
        self.joined: list[tuple[AxisPlace, AxisPlace]] = []
        #: Axes of two operands that are one: those that are contracted.
        self.paired: list[tuple[AxisPlace, AxisPlace]] = []
        #: Axes of operands over which results are sums, or the like.
        self.reduced: set[AxisPlace] = set()
        #: Axes of results along which operands are repeated.
        self.repeated: set[AxisPlace] = set()
        #: Axes of results that are made of others, and are not cut with them.
        self.derived: list[tuple[AxisPlace, AxisPlace]] = []

    def join(self, operand: int, axis: int, result_axis: int, result: int = 0) -> None:
        """Say that an axis of an operand and one of a result are the same."""
        self.joined.append((AxisPlace(operand, axis), AxisPlace(result, result_axis)))

    def contract(self, one: AxisPlace, other: AxisPlace) -> None:
        """Say that results are sums over an axis that two operands share."""
        self.paired.append((one, other))
        self.reduced |= {one, other}

    def derive(self, operand: int, axis: int, result_axis: int, result: int = 0) -> None:
        """Say that an axis of a result is made of one of an operand that must be whole for it."""
        self.derived.append((AxisPlace(operand, axis), AxisPlace(result, result_axis)))

    def is_repeated(self, operand: int, axis: int) -> bool:
        """Return whether an operand has the same along all of an axis."""
        return self.operands[operand].axes[axis] in self._made_by_repeating

    def divides(self, length: int) -> bool:
        """Return whether an axis of a length can be cut."""
        return length % self.size == 0


Rule = Callable[[FlowStep], None]


class FlowOperation(NamedTuple):
    """An operation, with numbers of axes in place of places.

    Args:
        times: how often it runs in a step.
        again: how often it runs with the same weights, in a loop; 0 outside of loops.
        kept: by operand, its axes that are axes of results.
        reduced: by operand, its axes over which results are sums.
        given: by result, its axes that some operand has.
        repeated: by result, its axes along which operands are repeated.
    """

    name: str
    times: int
    again: int
    operands: tuple[FlowArray, ...]
    results: tuple[FlowArray, ...]
    kept: tuple[frozenset[int], ...]
    reduced: tuple[frozenset[int], ...]
    given: tuple[frozenset[int], ...]
    repeated: tuple[frozenset[int], ...]


class AxisFlow:
    """The operations of a program, with calls and loops opened, and the classes of their axes.

    Args:
        size: over how many devices axes are cut.
        rules: by the name of an operation.

    >>> from unisono.model_parallel._axis_rules import RULES
    >>> import jax
    >>> flow = AxisFlow(2, RULES)
    >>> program = jax.make_jaxpr(lambda w, x: x @ w)(jnp.ones((4, 6)), jnp.ones((8, 4)))
    >>> (result,) = flow.read(program, {0: True})
    >>> flow.root(result.axes[1]) == flow.root(flow.inputs[0].axes[1])
    True
    """

    def __init__(self, size: int, rules: dict[str, Rule]) -> None:
        self.size, self._rules = size, rules
        self._parents: list[int] = []
        self.operations: list[FlowOperation] = []
        self.arrays: list[FlowArray] = []
        self.inputs: list[FlowArray] = []
        self.results: list[FlowArray] = []
        #: Pairs of axes: the second is made of the first.
        self._derived: list[tuple[int, int]] = []
        #: Axes along which an array has the same.
        self._repeated: set[int] = set()
        self._times, self._again = 1, 0

    def root(self, axis: int) -> int:
        """Return the number that stands for the class of an axis."""
        while self._parents[axis] != axis:
            self._parents[axis] = self._parents[self._parents[axis]]
            axis = self._parents[axis]
        return axis

    def join(self, one: int, other: int) -> None:
        """Make one class of two."""
        a, b = self.root(one), self.root(other)
        # The older one, so that numbers do not depend on anything but the program.
        self._parents[max(a, b)] = min(a, b)

    def read(self, program: jex.ClosedJaxpr, weights: dict[int, bool]) -> list[FlowArray]:
        """Read a program; return its results.

        Args:
            weights: by the number of an argument that is a weight, whether a training step updates it.
        """
        for number, v in enumerate(program.jaxpr.invars):
            is_weight, is_trained = number in weights, weights.get(number, False)
            self.inputs.append(self.array(v.aval, is_trained, is_weight))
        constants = [self.array(v.aval) for v in program.jaxpr.constvars]
        self.results = self._body(program.jaxpr, constants, self.inputs)
        return self.results

    def data_classes(self) -> set[int]:
        """Return the classes of axes of rows, steps of a sequence, pixels and so on, which batches have."""
        classes = {self.root(a) for x in self.inputs if not x.is_weight for a in x.axes}
        while True:
            more = {self.root(b) for a, b in self._derived if self.root(a) in classes} - classes
            if not more:
                return classes
            classes |= more

    def array(self, aval: Any, has_gradient: bool = False, is_weight: bool = False) -> FlowArray:
        """Return a new array, each axis of which is a class of its own."""
        shape = tuple(aval.shape)
        first = len(self._parents)
        self._parents.extend(range(first, first + len(shape)))
        is_float = bool(jnp.issubdtype(aval.dtype, jnp.inexact))
        itemsize = getattr(aval.dtype, "itemsize", 1)
        axes, nbytes = tuple(range(first, first + len(shape))), math.prod(shape) * itemsize
        made = FlowArray(axes, shape, nbytes, nbytes, has_gradient and is_float, is_weight, is_float)
        self.arrays.append(made)
        return made

    def _body(
        self, jaxpr: jex.Jaxpr, constants: Sequence[FlowArray], given: Sequence[FlowArray]
    ) -> list[FlowArray]:
        known: dict[Any, FlowArray] = dict(zip(jaxpr.constvars, constants, strict=True))
        known |= dict(zip(jaxpr.invars, given, strict=True))

        def of(atom: Any) -> FlowArray:
            return self.array(atom.aval) if isinstance(atom, jex.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [of(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [of(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: jex.JaxprEqn, operands: list[FlowArray]) -> list[FlowArray]:
        name = eqn.primitive.name
        opened = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._mapped}
        if name in opened:
            return opened[name](eqn, operands)
        called = called_by(eqn)
        if called is not None and len(called.jaxpr.invars) == len(operands):
            return self._closed(called, operands)
        return self._operation(eqn, operands)

    def _closed(self, program: jex.ClosedJaxpr, operands: Sequence[FlowArray]) -> list[FlowArray]:
        constants = [self.array(v.aval) for v in program.jaxpr.constvars]
        return self._body(program.jaxpr, constants, operands)

    def _mapped(self, eqn: jex.JaxprEqn, operands: list[FlowArray]) -> list[FlowArray]:
        """Open a map over replicas, or over parts: axes stay what they are, whatever their lengths."""
        inner: jex.Jaxpr = eqn.params["jaxpr"]
        if AXIS not in eqn.params["newly_manual_axes"] and len(operands) == len(eqn.outvars):
            # Gradients that are reduced in parts, each by itself.
            return operands
        return self._body(inner, [], operands)

    def _scan(self, eqn: jex.JaxprEqn, operands: list[FlowArray]) -> list[FlowArray]:
        p = eqn.params
        consts, carries = p["num_consts"], p["num_carry"]
        carried, over = operands[consts : consts + carries], operands[consts + carries :]
        length = max(int(p["length"]), 1)
        rows = [
            dataclasses.replace(
                x,
                axes=x.axes[1:],
                shape=x.shape[1:],
                nbytes=x.nbytes // length,
                gradient_bytes=x.gradient_bytes // length,
            )
            for x in over
        ]
        before = self._times, self._again
        self._times *= length
        # A loop over layers has other weights each time, and sends what the layers would in a row.
        if not any(x.is_weight for x in over):
            self._again = self._times
        body = p["jaxpr"]
        inner_carry = self._carry(body.jaxpr.invars[consts : consts + carries], carried, operands)
        results = self._closed(body, [*operands[:consts], *inner_carry, *rows])
        self._times, self._again = before
        self._join_all(inner_carry, results[:carries])
        for x in over[1:]:
            self.join(over[0].axes[0], x.axes[0])
        stacked = []
        for x in results[carries:]:
            time = over[0].axes[0] if over else self.array(eqn.outvars[-1].aval).axes[0]
            made = dataclasses.replace(
                x,
                axes=(time, *x.axes),
                shape=(length, *x.shape),
                nbytes=x.nbytes * length,
                gradient_bytes=x.gradient_bytes * length,
            )
            stacked.append(made)
        self.arrays.extend(stacked)
        return [*results[:carries], *stacked]

    def _while(self, eqn: jex.JaxprEqn, operands: list[FlowArray]) -> list[FlowArray]:
        p = eqn.params
        of_condition, of_body = p["cond_nconsts"], p["body_nconsts"]
        consts, carried = operands[of_condition : of_condition + of_body], operands[of_condition + of_body :]
        inner = self._carry(p["body_jaxpr"].jaxpr.invars[of_body:], carried, operands)
        results = self._closed(p["body_jaxpr"], [*consts, *inner])
        self._join_all(inner, results)
        return results

    def _carry(
        self, inner: Sequence[Any], carried: Sequence[FlowArray], operands: Sequence[FlowArray]
    ) -> list[FlowArray]:
        """Return the state of a loop inside it, which has a gradient if any operand has."""
        has_gradient = any(x.has_gradient for x in operands)
        made = [self.array(v.aval, has_gradient) for v in inner]
        self._join_all(carried, made)
        return made

    def _cond(self, eqn: jex.JaxprEqn, operands: list[FlowArray]) -> list[FlowArray]:
        branches = [self._closed(branch, operands[1:]) for branch in eqn.params["branches"]]
        for other in branches[1:]:
            self._join_all(branches[0], other)
        return branches[0]

    def _join_all(self, some: Sequence[FlowArray], others: Sequence[FlowArray]) -> None:
        for x, y in zip(some, others, strict=True):
            for a, b in zip(x.axes, y.axes, strict=True):
                self.join(a, b)

    def _operation(self, eqn: jex.JaxprEqn, operands: list[FlowArray]) -> list[FlowArray]:
        step = FlowStep(eqn, operands, self.size, self._repeated)
        self._rules.get(eqn.primitive.name, all_whole)(step)
        has_gradient = any(x.has_gradient for x in operands)
        # Numbers alone do not make anything else of a weight.
        arrays = [x for x in operands if x.axes]
        is_weight = bool(arrays) and all(x.is_weight for x in arrays)
        results = [self.array(v.aval, has_gradient, is_weight) for v in eqn.outvars]
        if eqn.primitive.name == "broadcast_in_dim":
            results = [dataclasses.replace(x, gradient_bytes=operands[0].gradient_bytes) for x in results]
            self._repeated |= {results[j].axes[m] for j, m in step.repeated}
        for (i, k), (j, m) in step.joined:
            self.join(operands[i].axes[k], results[j].axes[m])
        for (i, k), (j, m) in step.paired:
            self.join(operands[i].axes[k], operands[j].axes[m])
        self._derived += [(operands[i].axes[k], results[j].axes[m]) for (i, k), (j, m) in step.derived]
        kept = _by_number((a for a, _ in step.joined), operands)
        given = _by_number((b for _, b in step.joined), results)
        reduced, repeated = _by_number(step.reduced, operands), _by_number(step.repeated, results)
        parts = tuple(operands), tuple(results), kept, reduced, given, repeated
        self.operations.append(FlowOperation(eqn.primitive.name, self._times, self._again, *parts))
        return results


def _by_number(places: Any, arrays: Sequence[FlowArray]) -> tuple[frozenset[int], ...]:
    """Return the numbers of axes at places, for each array."""
    numbers: list[set[int]] = [set() for _ in arrays]
    for number, axis in places:
        numbers[number].add(arrays[number].axes[axis])
    return tuple(map(frozenset, numbers))


def all_whole(step: FlowStep) -> None:
    """Apply to an operation of which nothing is known: it needs its operands whole."""
    for (i, shape), (j, out) in itertools.product(enumerate(step.shapes), enumerate(step.out_shapes)):
        for k, m in itertools.product(range(len(shape)), range(len(out))):
            step.derive(i, k, m, j)


class AxisTraffic(NamedTuple):
    """The price of cutting a class of axes, at one array.

    Args:
        array: is all-reduced or gathered.
        kind: why: `"sum"`, `"gradient"`, `"gather"`, `"gather gradient"`, or `"result"`.
        nbytes: in a step.
        again: how many messages of a step these bytes are, in a loop with the same weights; 0 outside.
    """

    array: FlowArray
    kind: str
    nbytes: int
    again: int = 0


#: Operations whose partial sums XLA adds up over devices at once.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def traffic(flow: AxisFlow) -> dict[int, list[AxisTraffic]]:
    """Return for each class of axes the messages of a training step that cutting it needs."""
    messages: dict[int, dict[tuple[tuple[int, ...], str, int], AxisTraffic]] = {}
    for number, operation in enumerate(flow.operations):
        for axis, (array, kind) in _messages(operation, flow.root):
            # Gradients of several uses are added up before they are sent; but of several products, such as
            # queries, keys and values, XLA sends each gradient by itself.
            is_apart = kind == "gradient" and operation.name in _PRODUCTS
            key = array.axes, kind, number if is_apart else -1
            nbytes = array.gradient_bytes if "gradient" in kind else array.nbytes
            one = AxisTraffic(array, kind, nbytes * operation.times, operation.again)
            messages.setdefault(axis, {}).setdefault(key, one)
    # What is returned for each row is read whole; new values of weights lie as these do.
    of_weights = {flow.root(a) for x in flow.inputs if x.is_weight for a in x.axes}
    rows = flow.data_classes() - of_weights
    for x in flow.results:
        of = {flow.root(a) for a in x.axes}
        for axis in of if of & rows else ():
            messages.setdefault(axis, {})[x.axes, "result", -1] = AxisTraffic(x, "result", x.nbytes)
    return {axis: list(sent.values()) for axis, sent in messages.items()}


def _messages(
    operation: FlowOperation, root: Callable[[int], int]
) -> Iterator[tuple[int, tuple[FlowArray, str]]]:
    outputs = {root(a) for x in operation.results for a in x.axes}
    for x, kept, reduced in zip(operation.operands, operation.kept, operation.reduced, strict=True):
        for axis, length in zip(x.axes, x.shape, strict=True):
            if length == 1 or axis in kept:
                continue
            if axis in reduced:
                yield from ((root(axis), (y, "sum")) for y in operation.results)
            else:
                yield root(axis), (x, "gather")
        if x.has_gradient:
            # A class that the operand has as another axis is cut there.
            for axis in outputs - {root(a) for a in x.axes}:
                if any(axis in map(root, (*a, *b)) for a, b in _known(operation)):
                    yield axis, (x, "gradient")
    for y, given, repeated in zip(operation.results, operation.given, operation.repeated, strict=True):
        for axis, length in zip(y.axes, y.shape, strict=True):
            if length > 1 and axis not in given and axis not in repeated and y.has_gradient:
                yield root(axis), (y, "gather gradient")


def _known(operation: FlowOperation) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    return zip(operation.given, operation.repeated, strict=True)
