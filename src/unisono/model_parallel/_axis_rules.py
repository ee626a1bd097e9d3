"""The flow of axes through each of JAX' operations: the rules of `_axis_flow`. Pure.

Tests: tests/unit/model_parallel/test_automatic_cut.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from unisono.model_parallel._axis_flow import AxisPlace, FlowStep, Rule
from unisono.training.rows._row_rules import SIMPLE_ELEMENTWISE


def _elementwise(step: FlowStep) -> None:
    """Any function of the elements at one place; a scalar goes with all."""
    for i, shape in enumerate(step.shapes):
        for axis in range(len(shape) if len(shape) == len(step.out_shapes[0]) else 0):
            step.join(i, axis, axis)


def _several(step: FlowStep) -> None:
    """Each operand passes."""
    for i, (shape, out) in enumerate(zip(step.shapes, step.out_shapes, strict=False)):
        for axis in range(len(shape) if shape == out else 0):
            step.join(i, axis, axis, i)


def _along(*names: str) -> Rule:
    """Return the rule of an operation that relates the elements along some axes."""

    def rule(step: FlowStep) -> None:
        given = next((step.params[n] for n in names if n in step.params), None)
        rank = len(step.out_shapes[0])
        axes = {rank - 1} if given is None else {given} if isinstance(given, int) else set(given)
        axes = {a % rank for a in axes}
        for (i, shape), (j, out) in itertools.product(enumerate(step.shapes), enumerate(step.out_shapes)):
            for axis in range(rank if len(shape) == len(out) else 0):
                (step.derive if axis in axes else step.join)(i, axis, axis, j)

    return rule


def _reduction(step: FlowStep) -> None:
    axes = step.params.get("axes", step.params.get("dimensions", ()))
    for i, shape in enumerate(step.shapes):
        if not shape:
            continue
        kept = [a for a in range(len(shape)) if a not in axes]
        step.reduced.update(AxisPlace(i, a) for a in axes)
        for j in range(len(step.out_shapes)):
            for to, axis in enumerate(kept):
                step.join(i, axis, to, j)


def _broadcast(step: FlowStep) -> None:
    shape, out = step.shapes[0], step.out_shapes[0]
    places = step.params["broadcast_dimensions"]
    for axis, to in enumerate(places):
        if shape[axis] == out[to]:
            step.join(0, axis, to)
        else:
            step.repeated.add(AxisPlace(0, to))
    step.repeated.update(AxisPlace(0, to) for to in range(len(out)) if to not in places)


def _transpose(step: FlowStep) -> None:
    for to, axis in enumerate(step.params["permutation"]):
        step.join(0, axis, to)


def _squeeze(step: FlowStep) -> None:
    gone = {a % len(step.shapes[0]) for a in step.params["dimensions"]}
    for to, axis in enumerate(a for a in range(len(step.shapes[0])) if a not in gone):
        step.join(0, axis, to)


def _reshape(step: FlowStep) -> None:
    """Axes that are merged or split: parts of the outermost one are parts of the merged one."""
    shape, out = step.shapes[0], step.out_shapes[0]
    for before, after in _groups(shape, out):
        if len(before) == len(after) == 1:
            step.join(0, before[0], after[0])
            continue
        if before and after and step.divides(shape[before[0]]) and step.divides(out[after[0]]):
            step.join(0, before[0], after[0])
        elif after and any(step.is_repeated(0, axis) for axis in before):
            # As heads of keys that several heads of queries share.
            step.repeated.add(AxisPlace(0, after[0]))
        for axis, to in itertools.product(before, after):
            step.derive(0, axis, to)


def _groups(shape: Sequence[int], out: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return which axes of two shapes have the same elements, without axes of length 1.

    >>> _groups((2, 12, 5), (2, 3, 4, 5))
    [([0], [0]), ([1], [1, 2]), ([2], [3])]
    """
    groups: list[tuple[list[int], list[int]]] = []
    before = [a for a, n in enumerate(shape) if n != 1]
    after = [a for a, n in enumerate(out) if n != 1]
    while before and after:
        of, to = [before.pop(0)], [after.pop(0)]
        left, right = shape[of[0]], out[to[0]]
        while left != right and (before if left < right else after):
            if left < right:
                of.append(before.pop(0))
                left *= shape[of[-1]]
            else:
                to.append(after.pop(0))
                right *= out[to[-1]]
        groups.append((of, to))
    return groups


def _window(step: FlowStep) -> None:
    """Windows along some axes, of one element along the others."""
    p = step.params
    rank = len(step.out_shapes[0])
    padding = p.get("padding") or [(0, 0)] * rank
    windows = zip(p["window_dimensions"], p["window_strides"], padding, strict=True)
    plain = [tuple(w) == (1, 1, (0, 0)) for w in ((n, s, tuple(q)) for n, s, q in windows)]
    for i, shape in enumerate(step.shapes):
        for axis in range(rank if len(shape) == rank else 0):
            (step.join if plain[axis] else step.derive)(i, axis, axis)


def _cut(step: FlowStep) -> None:
    """A part of an array: axes that are taken whole pass."""
    for axis, (n, m) in enumerate(zip(step.shapes[0], step.out_shapes[0], strict=True)):
        (step.join if n == m else step.derive)(0, axis, axis)


def _update(step: FlowStep) -> None:
    """A part of an array is replaced: axes along which it is replaced whole pass."""
    for axis, (n, m) in enumerate(zip(step.shapes[0], step.shapes[1], strict=True)):
        for i in range(2):
            (step.join if n == m else step.derive)(i, axis, axis)


def _pad(step: FlowStep) -> None:
    for axis, config in enumerate(step.params["padding_config"]):
        (step.join if tuple(config) == (0, 0, 0) else step.derive)(0, axis, axis)


def _concatenate(step: FlowStep) -> None:
    along = step.params["dimension"]
    for i, shape in enumerate(step.shapes):
        for axis in range(len(shape)):
            (step.derive if axis == along else step.join)(i, axis, axis)


def _split(step: FlowStep) -> None:
    along = step.params["axis"]
    for j, out in enumerate(step.out_shapes):
        for axis in range(len(out)):
            (step.derive if axis == along else step.join)(0, axis, axis, j)


def _stack(step: FlowStep) -> None:
    new = step.params["axis"]
    for i, shape in enumerate(step.shapes):
        for axis in range(len(shape)):
            step.join(i, axis, axis + (axis >= new))


def _unstack(step: FlowStep) -> None:
    gone = step.params["axis"]
    for j, out in enumerate(step.out_shapes):
        for to in range(len(out)):
            step.join(0, to + (to >= gone), to, j)


def _tile(step: FlowStep) -> None:
    for axis, (n, m) in enumerate(zip(step.shapes[0], step.out_shapes[0], strict=True)):
        (step.join if n == m else step.derive)(0, axis, axis)


def _dot(step: FlowStep) -> None:
    (left, right), (left_rows, right_rows) = step.params["dimension_numbers"]
    for a, b in zip(left, right, strict=True):
        step.contract(AxisPlace(0, a), AxisPlace(1, b))
    for to, (a, b) in enumerate(zip(left_rows, right_rows, strict=True)):
        step.join(0, a, to)
        step.join(1, b, to)
    of_both = len(left_rows)
    free = [a for a in range(len(step.shapes[0])) if a not in (*left, *left_rows)]
    others = [b for b in range(len(step.shapes[1])) if b not in (*right, *right_rows)]
    for to, a in enumerate(free, of_both):
        step.join(0, a, to)
    for to, b in enumerate(others, of_both + len(free)):
        step.join(1, b, to)


def _convolution(step: FlowStep) -> None:
    p = step.params
    given, kernel, out = (tuple(spec) for spec in p["dimension_numbers"])
    groups, row_groups = p["feature_group_count"], p["batch_group_count"]
    (step.join if row_groups == 1 else step.derive)(0, given[0], out[0])
    step.join(1, kernel[0], out[1])
    if groups == 1:
        step.contract(AxisPlace(0, given[1]), AxisPlace(1, kernel[1]))
    elif step.divides(groups):
        # Each part of the channels is a convolution of its own.
        step.join(0, given[1], out[1])
    else:
        step.derive(0, given[1], out[1])
    strides, padding = p["window_strides"], p["padding"]
    for i, (axis, of_kernel, to) in enumerate(zip(given[2:], kernel[2:], out[2:], strict=True)):
        is_plain = step.shapes[1][of_kernel] == 1 and strides[i] == 1 and tuple(padding[i]) == (0, 0)
        (step.join if is_plain else step.derive)(0, axis, to)


def _gather(step: FlowStep) -> None:
    """Rows of a table, or elements: an axis from which indices choose is like a contracted axis."""
    numbers, sizes = step.params["dimension_numbers"], step.params["slice_sizes"]
    shape, out = step.shapes[0], step.out_shapes[0]
    of_indices = [a for a in range(len(out)) if a not in numbers.offset_dims]
    for axis, to in enumerate(of_indices):
        step.join(1, axis, to)
    for axis, of_index in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        step.join(0, axis, of_indices[of_index])
    chosen = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = [a for a in range(len(shape)) if a not in chosen]
    for axis, to in zip(windows, numbers.offset_dims, strict=True):
        (step.join if sizes[axis] == shape[axis] else step.derive)(0, axis, to)
    step.reduced.update(AxisPlace(0, axis) for axis in numbers.collapsed_slice_dims)


def _scatter(step: FlowStep) -> None:
    """Additions to chosen elements: each device adds to its part."""
    numbers = step.params["dimension_numbers"]
    for axis in range(len(step.shapes[0])):
        step.join(0, axis, axis)
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [a for a in range(len(step.shapes[0])) if a not in inserted]
    for axis, to in zip(numbers.update_window_dims, windows, strict=True):
        if step.shapes[2][axis] == step.shapes[0][to]:
            step.join(2, axis, to)
    for i in (1, 2):
        window = numbers.update_window_dims if i == 2 else ()
        step.reduced.update(AxisPlace(i, a) for a in range(len(step.shapes[i])) if a not in window)


def _attention(step: FlowStep) -> None:
    """CuDNN's attention, of arrays of rows, steps, heads and channels: rows and heads are apart."""
    out = step.out_shapes[0]
    for i, shape in enumerate(step.shapes[:3]):
        for axis in (0, 2) if len(shape) == len(out) == 4 else ():
            if shape[axis] == out[axis]:
                step.join(i, axis, axis)
    step.derive(0, 1, 1)
    step.derive(2, 3, 3)


def _made(step: FlowStep) -> None:
    """Made of nothing, or of a key."""


_ELEMENTWISE = f"{SIMPLE_ELEMENTWISE} add sub add_any mul div neg copy copy_p real imag conj complex"
_ELEMENTWISE += " stop_gradient sharding_constraint convert_element_type select_n pow random_gamma"
_REDUCTIONS = (
    "reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
)
_SCATTERS = "scatter scatter-add scatter_add scatter-mul scatter_mul scatter_min scatter_max"

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    **dict.fromkeys(_SCATTERS.split(), _scatter),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _along("axis")),
    **dict.fromkeys(["reduce_window_max", "reduce_window_min", "reduce_window_sum"], _window),
    **dict.fromkeys(["psum", "psum2", "pmax", "pmin", "optimization_barrier"], _several),
    **dict.fromkeys(["slice", "dynamic_slice"], _cut),
    **dict.fromkeys(["iota", "random_bits", "random_seed", "random_wrap", "random_unwrap"], _made),
    **dict.fromkeys(["threefry2x32", "axis_index", "random_fold_in", "random_split"], _made),
    **dict.fromkeys(["dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"], _attention),
    "sort": _along("dimension"),
    "top_k": _along("axis", "operand_axis"),
    "rev": _along("dimensions"),
    "select_and_scatter_add": _window,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dynamic_update_slice": _update,
    "pad": _pad,
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
}
