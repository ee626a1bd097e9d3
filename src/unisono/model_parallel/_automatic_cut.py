"""The axis of each weight that a replica's devices share, chosen from the traced program of a model. Pure.

A class of axes (see `_axis_flow`) is cut as a whole: the hidden axis between two products of a row, so
that they cost one all-reduce forward and one backward; the heads of an attention; the rows of an embedding,
and of the head that shares it; the channels between two convolutions; experts; and every bias or scale that
goes along.

Classes are taken in the order of the bytes that they take off each device (of weights, their gradients and
two slots, and of activations) for each byte that a step must send for it, as long as the former are more and
no array would be cut twice. Never cut are axes of a batch (rows, steps of a sequence, pixels), those that do
not divide, and those for which a weight would have to be gathered. A large weight that then is whole is cut
by itself, where that saves more than it costs. In a loop that uses the same weights again and again, as a
recurrent layer does, each message has a price besides its bytes: the next step of the loop waits for it.

Source: Shoeybi et al., "Megatron-LM", 2019 (https://arxiv.org/abs/1909.08053).

Tests: tests/unit/model_parallel/test_automatic_cut.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import jax.extend.core as jex

from unisono.model_parallel._axis_flow import AxisFlow, FlowArray, FlowOperation, traffic
from unisono.model_parallel._axis_rules import RULES

#: Bytes of weights below which a class is not worth a message, and a weight is not cut by itself.
_SMALL, _SMALL_ALONE = 1 << 14, 1 << 20

#: Bytes that a link sends in the time that a message takes, however short it is.
_MESSAGE = 1 << 16

#: How many arrays of its size a weight that is trained needs: itself, its gradient and two slots.
_COPIES = 4


@dataclasses.dataclass(frozen=True)
class GivenWeight:
    """A weight among the arguments of a program.

    Args:
        is_trained: whether a training step updates it.
        is_decided: whether it lies already as it will.
        cut: the axis that is cut already; None for a whole weight.
    """

    is_trained: bool
    is_decided: bool = False
    cut: int | None = None


class CutClass(NamedTuple):
    """Axes that are cut together.

    Args:
        axes: by the number of a weight, the axis that is cut.
        weight_bytes: of these weights.
        saved: bytes that each device has less.
        sent: bytes that a training step all-reduces or gathers for it.
        again: messages of a step in loops that use the same weights again.
        paths: of these weights, for people.
    """

    axes: dict[int, int]
    weight_bytes: int
    saved: float
    sent: int
    again: int = 0
    paths: tuple[str, ...] = ()


def choose_cuts(
    program: jex.ClosedJaxpr,
    weights: Mapping[int, GivenWeight],
    size: int,
    small: int = _SMALL,
    message: int = _MESSAGE,
) -> list[CutClass]:
    """Return which axes of weights are cut.

    Args:
        program: a model's forward pass, perhaps with its loss; or a whole training step, if no weight is
            given as trained.
        weights: by number of the argument; the other arguments are batches.
        size: how many devices a replica has.
        small: bytes of weights from which on a class is cut.
        message: bytes that a message in a loop is worth besides its own.

    >>> import jax
    >>> def model(up, down, x):
    ...     return jax.nn.relu(x @ up) @ down
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 256), (256, 64), (8, 64))]
    >>> both = {0: GivenWeight(True), 1: GivenWeight(True)}
    >>> [cut.axes for cut in choose_cuts(jax.make_jaxpr(model)(*shapes), both, 2)]
    [{0: 1, 1: 0}]
    """
    return cuts_and_reasons(program, weights, size, small, message)[0]


def cuts_and_reasons(
    program: jex.ClosedJaxpr,
    weights: Mapping[int, GivenWeight],
    size: int,
    small: int = _SMALL,
    message: int = _MESSAGE,
) -> tuple[list[CutClass], dict[int, str]]:
    """Return which axes of weights are cut, and by number why others are whole; see `choose_cuts`."""
    flow = AxisFlow(size, RULES)
    flow.read(program, {n: w.is_trained for n, w in weights.items()})
    choice = _Choice(flow, weights, size, small, message)
    cuts = [*choice.of_classes(), *choice.alone()]
    return cuts, choice.reasons(cuts)


def loop_messages(
    program: jex.ClosedJaxpr, weights: Mapping[int, GivenWeight], axes: Mapping[int, int], size: int
) -> dict[int, int]:
    """Return by number how many messages a step sends for weights that a loop uses again and again.

    Args:
        program: as in `choose_cuts`.
        weights: as in `choose_cuts`.
        axes: by number of a weight, the axis that is cut.
        size: how many devices a replica has.
    """
    flow = AxisFlow(size, RULES)
    flow.read(program, {n: w.is_trained for n, w in weights.items()})
    choice, messages = _Choice(flow, weights, size, 0, 0), traffic(flow)
    counts = {}
    for number, axis in axes.items():
        weight = flow.inputs[number]
        _, in_loops = choice.cost_alone(weight, axis) or (0, 0)
        # A weight outside of the loop may have an axis of the same class.
        of_class = messages.get(flow.root(weight.axes[axis]), [])
        counts[number] = max(in_loops, sum(m.again for m in of_class)) if in_loops else 0
    return counts


class _Choice:
    """The choice for one program."""

    def __init__(
        self, flow: AxisFlow, weights: Mapping[int, GivenWeight], size: int, small: int, message: int
    ) -> None:
        self._flow, self._weights, self._small, self._message = flow, weights, small, message
        self._share = 1 - 1 / size
        #: By number: each weight that can be cut.
        self._open = {
            n: flow.inputs[n] for n, w in weights.items() if not w.is_decided and flow.inputs[n].is_float
        }
        self._size = size
        #: The numbers of arrays with an axis of a class that is cut, and of weights that are.
        self._taken: set[int] = set()
        self._cut: set[int] = set()
        #: By class: why it is not cut.
        self._refused: dict[int, str] = {}

    def of_classes(self) -> list[CutClass]:
        """Return the classes that are cut."""
        flow = self._flow
        members = self._members()
        # A class of which a weight lies in parts already is cut, whatever it costs.
        fixed = {
            flow.root(flow.inputs[number].axes[weight.cut])
            for number, weight in self._weights.items()
            if weight.is_decided and weight.cut is not None
        }
        having = self._having({*members, *fixed})
        for root in fixed:
            self._taken |= having[root]
        classes = []
        for root, candidate in self._ranked(members, having, fixed):
            if root not in fixed and self._taken & having[root]:
                self._refused[root] = "another axis of the same arrays is cut"
                continue
            self._taken |= having[root]
            self._cut |= set(candidate.axes)
            classes.append(candidate)
        return classes

    def _members(self) -> dict[int, dict[int, int]]:
        """Return by class the axis of each weight that it could cut."""
        members: dict[int, dict[int, int]] = {}
        without = self._flow.data_classes()
        for number, array in self._open.items():
            for axis, root in enumerate(map(self._flow.root, array.axes)):
                if array.shape[axis] % self._size == 0 and root not in without:
                    members.setdefault(root, {}).setdefault(number, axis)
        return members

    def _having(self, roots: Iterable[int]) -> dict[int, set[int]]:
        """Return by class the numbers of the arrays that have an axis of it."""
        having: dict[int, set[int]] = {root: set() for root in roots}
        for number, array in enumerate(self._flow.arrays):
            for root in map(self._flow.root, array.axes):
                if root in having:
                    having[root].add(number)
        return having

    def _ranked(
        self, members: dict[int, dict[int, int]], having: dict[int, set[int]], fixed: Container[int]
    ) -> list[tuple[int, CutClass]]:
        """Return the classes that are worth it, the best first, and those that are cut anyway."""
        messages = traffic(self._flow)
        classes = []
        for root, axes in members.items():
            sent = messages.get(root, [])
            if any(m.kind == "gather" and m.array.is_weight for m in sent):
                self._refused[root] = "it would be gathered"
                continue
            arrays = (self._flow.arrays[i] for i in having[root])
            activations = sum(x.nbytes for x in arrays if x.is_float and not x.is_weight)
            # An array that is gathered is whole on each device, besides its part.
            gathered = sum(m.array.nbytes for m in sent if m.kind == "gather" and m.array.is_float)
            candidate = CutClass(
                axes,
                sum(self._open[n].nbytes for n in axes),
                (self._of_weights(axes) + activations) * self._share - gathered,
                sum(m.nbytes for m in sent),
                sum(m.again for m in sent),
            )
            if root not in fixed and (reason := self._reason_against(candidate)):
                self._refused[root] = reason
            else:
                classes.append((root, candidate))
        # Between equal classes the first weight in the program decides.
        return sorted(classes, key=lambda pair: (-pair[1].saved / (self._price(pair[1]) + 1), pair[0]))

    def _reason_against(self, candidate: CutClass) -> str:
        """Return why a class is not worth it; an empty text if it is."""
        if candidate.weight_bytes < self._small:
            return "small"
        if candidate.saved > self._price(candidate):
            return ""
        if candidate.saved > candidate.sent:
            return f"{candidate.again} messages in loops"
        return f"sends {_kilobytes(candidate.sent)} to save {_kilobytes(candidate.saved)}"

    def reasons(self, cuts: Iterable[CutClass]) -> dict[int, str]:
        """Return by number why a weight is whole."""
        cut = {n for each in cuts for n in each.axes}
        data = self._flow.data_classes()
        reasons = {}
        for number, array in self._open.items():
            if number in cut or not array.axes:
                continue
            roots = [self._flow.root(a) for a in array.axes]
            texts = [self._refused[r] for r in roots if r in self._refused]
            if array.nbytes < self._small:
                reasons[number] = "small"
            elif texts:
                # Bytes say more than that an axis is in another's way.
                reasons[number] = max(texts, key=lambda text: (text.startswith("sends"), text))
            elif any(n % self._size == 0 and r in data for n, r in zip(array.shape, roots, strict=True)):
                reasons[number] = "its axes are a batch's"
            else:
                reasons[number] = f"no axis divides by {self._size}"
        return reasons

    def _price(self, candidate: CutClass) -> int:
        """Return the bytes that a class sends, and what its messages in loops are worth besides."""
        return candidate.sent + candidate.again * self._message

    def _of_weights(self, numbers: Iterable[int]) -> int:
        """Return the bytes of weights and of what is kept for them."""
        return sum(self._open[n].nbytes * (_COPIES if self._weights[n].is_trained else 1) for n in numbers)

    def alone(self) -> list[CutClass]:
        """Return the large weights that no class cuts, and that are cut by themselves."""
        classes = []
        for number, array in self._open.items():
            if number in self._cut or array.nbytes < max(_SMALL_ALONE, self._small):
                continue
            saved = self._of_weights([number]) * self._share
            costs = [
                (cost + again * self._message, axis, cost, again)
                for axis in range(len(array.shape))
                if array.shape[axis] % self._size == 0 and (found := self.cost_alone(array, axis)) is not None
                for cost, again in [found]
            ]
            if costs and min(costs)[0] < saved:
                _, axis, cost, again = min(costs)
                classes.append(CutClass({number: axis}, array.nbytes, saved, cost, again))
        return classes

    def cost_alone(self, weight: FlowArray, axis: int) -> tuple[int, int] | None:
        """Return the bytes that are sent where a weight alone is cut, and the messages of them in loops.

        None stands for a weight that would be gathered.
        """
        own, cost, again = {weight.axes[axis]}, 0, 0
        for operation in self._flow.operations:
            for i, x in enumerate(operation.operands):
                mine = own & set(x.axes)
                if not mine:
                    continue
                if mine - operation.kept[i] - operation.reduced[i]:
                    return None
                if all(x.is_weight for x in operation.operands if x.axes):
                    own |= self._continued(operation, mine)
                else:
                    cost += operation.times * _sent_alone(operation, i, mine <= operation.reduced[i])
                    again += operation.again
        return cost, again

    def _continued(self, operation: FlowOperation, mine: set[int]) -> set[int]:
        """Return the axes of results, made of weights alone, that are axes of their operand."""
        roots = {self._flow.root(a) for a in mine}
        given = [a for axes in operation.given for a in axes]
        return {a for a in given if self._flow.root(a) in roots}


def _sent_alone(operation: FlowOperation, number: int, is_reduced: bool) -> int:
    """Return the bytes that an operation of activations sends for an operand that is cut alone.

    Args:
        number: of the operand.
        is_reduced: whether the results are sums over the axis that is cut.
    """
    others = [x for i, x in enumerate(operation.operands) if i != number and x.has_gradient and x.axes]
    # Partial sums of results, and gradients of operands in parts; or the other way round.
    return sum(x.nbytes for x in (*operation.results, *others))


def _kilobytes(nbytes: float) -> str:
    return f"{nbytes / 1000:,.1f} kB"
