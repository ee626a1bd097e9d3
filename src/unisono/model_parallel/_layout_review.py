"""Reads the compiled first step of a layout: more messages than with other axes are a warning.

The axes of a layout map may be those of another model, and an estimate may leave out what XLA adds. So the
program of the first training step is read once, where the compiler has made it: the bytes that devices of a
replica send each other are compared with the bytes for the axes that follow from the traced program.

Tests: tests/virtual/strategies/test_layout_review.py.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import keras

from unisono.model_parallel._automatic_cut import CutClass, GivenWeight, choose_cuts, loop_messages
from unisono.model_parallel._program_messages import gathered_parameters, messages_of
from unisono.model_parallel._replica_grid import MODEL_AXIS
from unisono.step._keras_internals import stored_dtype
from unisono.step._layout import is_slot, own_layout

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

_LOG = logging.getLogger("unisono")

#: Bytes of weights in parts from which on a program is read.
WORTH = 1 << 20

#: A program may send so many times what was estimated, and so many bytes besides: sums for metrics and
#: norms, and activations that are computed twice, are left out of the estimate.
_TIMES, _BESIDES = 2, 1 << 16


def axis_of(variable: keras.Variable) -> int | None:
    """Return along which axis a replica's devices share a variable."""
    axis: int | None = getattr(own_layout(variable), "axis", None)
    return axis


def bytes_of(variable: keras.Variable) -> int:
    """Return the bytes of a whole variable."""
    size: int = math.prod(variable.shape) * jax.numpy.dtype(stored_dtype(variable)).itemsize
    return size


class _OtherAxis(NamedTuple):
    """A weight that should be cut along another axis.

    Args:
        axis: the better one; None to leave the weight whole.
        in_loops: messages that a step sends for it as it is cut, because a loop uses it again and again.
    """

    variable: keras.Variable
    axis: int | None
    in_loops: int


@dataclasses.dataclass(frozen=True)
class LayoutReview:
    """A step whose compiled program is to be read.

    Args:
        size: how many devices a replica has.
        variables: of the model or step.
        traced: returns the program of which these are the first arguments.
        has_gradients: whether that program computes gradients itself.
        of_map: whether a `layout_map` has chosen the axes.
        planned: bytes that the chosen axes should send; None to trace the program for that.
    """

    size: int
    variables: Sequence[keras.Variable]
    traced: Callable[[], ClosedJaxpr]
    has_gradients: bool
    of_map: bool
    planned: int | None = None

    @property
    def is_worth_it(self) -> bool:
        """True if enough of the weights is in parts."""
        return sum(bytes_of(v) for v in self.variables if axis_of(v) is not None) >= WORTH

    def warn(self, program: str, steps: int = 1) -> None:
        """Say once if a program sends more than it needs to.

        Args:
            program: XLA's text of it.
            steps: how many it has in a loop of known length.
        """
        messages = [m for m in messages_of(program, self.size) if m.is_inside]
        sent = sum(m.times * m.nbytes for m in messages) // steps
        if sent <= _allowed(self.planned or 0):
            return
        try:
            cuts, in_loops = self._fresh_choice()
        except Exception:  # a user's code may do anything; the layout then stands as it is
            return
        planned = sum(cut.sent for cut in cuts)
        if sent <= _allowed(planned):
            return
        better = {n: axis for cut in cuts for n, axis in cut.axes.items()}
        differing = [
            _OtherAxis(variable, better.get(n), in_loops.get(n, 0))
            for n, variable in enumerate(self.variables)
            if axis_of(variable) not in (None, better.get(n)) and (n in better or in_loops.get(n))
        ]
        gathers = sum(m.times for m in messages if m.kind != "all-reduce") // steps
        if differing:
            self._name_axis(differing, sent, planned, gathers)
        elif (gathered := self._gathered(program)) is not None:
            _LOG.warning(
                "A training step sends %.1f MB between the devices of a replica, where %.1f MB were "
                "expected: XLA puts the weight %r together, which is cut along its axis %d. Leave it "
                "whole, or cut another axis, by a `layout_map`. `unisono plan` shows what a layout sends.",
                sent / 1e6,
                planned / 1e6,
                gathered.path,
                axis_of(gathered),
            )

    def _fresh_choice(self) -> tuple[list[CutClass], dict[int, int]]:
        """Return the axes that follow from the program, and messages in loops for those that were chosen."""
        given = {
            n: GivenWeight(bool(v.trainable) and not self.has_gradients, is_slot(v))
            for n, v in enumerate(self.variables)
        }
        program = self.traced()
        chosen = {n: axis for n, v in enumerate(self.variables) if (axis := axis_of(v)) is not None}
        return choose_cuts(program, given, self.size), loop_messages(program, given, chosen, self.size)

    def _name_axis(self, differing: Sequence[_OtherAxis], sent: int, planned: int, gathers: int) -> None:
        # Each step of a loop sends messages of its own.
        worst = max(differing, key=lambda one: (one.in_loops, bytes_of(one.variable)))
        variable = worst.variable
        written = tuple(MODEL_AXIS if i == worst.axis else None for i in range(len(variable.shape)))
        _LOG.warning(
            "A training step sends %.1f MB between the devices of a replica, in %d gathers or exchanges "
            "besides all-reduces; with axes that follow from the program it would send about %.1f MB. "
            "Received: the weight %r of shape %s, cut along its axis %d%s%s. "
            "Write %s for it in `layout_map`%s.",
            sent / 1e6,
            gathers,
            planned / 1e6,
            variable.path,
            tuple(variable.shape),
            axis_of(variable),
            ", which a loop uses in each of its steps" if worst.in_loops else "",
            f", and {len(differing) - 1} more" if len(differing) > 1 else "",
            written,
            ", or leave the map out" if self.of_map else "",
        )

    def _gathered(self, program: str) -> keras.Variable | None:
        """Return the largest weight in parts that a program puts together; None without one."""
        shapes = set(gathered_parameters(program, self.size))
        weights = [v for v in self.variables if axis_of(v) is not None and self._part(v) in shapes]
        return max(weights, key=bytes_of, default=None)

    def _part(self, variable: keras.Variable) -> tuple[int, ...]:
        """Return the shape of a device's part of a variable."""
        cut = axis_of(variable)
        return tuple(n // self.size if i == cut else n for i, n in enumerate(variable.shape))


def _allowed(planned: int) -> int:
    return _TIMES * planned + _BESIDES


def programs_of(device: jax.Device) -> list[Any]:
    """Return the compiled programs that a device's backend holds now."""
    # Not `lower().compile()`, which would compile again where JAX does not find the program.
    programs: list[Any] = device.client.live_executables()
    return programs


def new_program(known: Sequence[object], device: jax.Device) -> str | None:
    """Return XLA's text of the step that was compiled since; None if JAX had it already.

    Args:
        known: programs that were there before.
    """
    before = set(map(id, known))
    texts = [
        module.to_string()
        for program in programs_of(device)
        if id(program) not in before
        for module in program.hlo_modules()[:1]
        if "with_token" in module.name
    ]
    return max(texts, key=len, default=None)
