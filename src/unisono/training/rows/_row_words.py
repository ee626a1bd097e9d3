"""Words for the operations that relate rows, and for errors of a trace, as a user may know them. Pure.

Tests: tests/unit/training/test_row_words.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

#: By JAX' names.
_WORDS = {
    "iota": "`arange` or `eye` over rows",
    "dot_general": "a product of matrices",
    "conv_general_dilated": "a convolution",
    "add": "a sum of two values",
    "add_any": "a sum of two gradients",
    "sub": "a difference",
    "mul": "a product",
    "div": "a quotient",
    "integer_pow": "a power",
    "max": "the larger of two values",
    "min": "the smaller of two values",
    "reduce_sum": "a sum",
    "reduce_prod": "a product over an axis",
    "reduce_max": "a maximum",
    "reduce_min": "a minimum",
    "reduce_and": "`all`",
    "reduce_or": "`any`",
    "cumlogsumexp": "`logsumexp`",
    "gather": "rows that are taken by their numbers",
    "slice": "some of the rows",
    "dynamic_slice": "some of the rows",
    "split": "some of the rows",
    "rev": "`flip`",
    "random_bits": "random numbers",
    "random_gamma": "random numbers",
    "select_n": "`where`",
}

#: Additions of derivatives and compiled functions to the names of layers.
_TRANSFORM = re.compile(r"\b(?:jvp|transpose|vmap|jit|checkpoint|rematted_computation)\(([^()]*)\)")


def in_words(place: str) -> str:
    """Return an operation in words, with its layers.

    Args:
        place: JAX' name of an operation, after the names of its layers.

    >>> in_words("transpose(jvp(functional/dense)): dot_general"), in_words("jvp(): concatenate")
    ('functional/dense: a product of matrices', '`concatenate`')
    """
    layers, separator, name = place.rpartition(": ")
    if not name.replace("_", "").isalnum():
        return place
    before = None
    while layers != before:
        before, layers = layers, _TRANSFORM.sub(r"\1", layers)
    words = _WORDS.get(name) or f"`{name.removeprefix('reduce_').replace('scatter_', 'scatter-')}`"
    return f"{layers.strip('/')}{separator}{words}" if layers.strip("/") else words


def own_text(error: Exception) -> str:
    """Return the line of an error that says what is wrong.

    Keras puts the name of the layer that was called before it, and writes it in bold.
    """
    lines = (x.strip().removeprefix("\x1b[1m").removesuffix("\x1b[0m") for x in str(error).splitlines())
    return next((x for x in lines if x and not x.startswith("Exception encountered when calling")), "")


def unreadable(
    error: Exception, trace: Callable[[int], object], own: int, rows: int
) -> tuple[str, tuple[str, ...]]:
    """Return why a step could not be read for two numbers of rows, and what each replica computes apart.

    Args:
        trace: traces the step for a number of rows.
        own: rows of one replica.
        rows: of all replicas.
    """
    reason = f"it could not be read ({type(error).__name__}: {own_text(error)})"
    if _succeeds(trace, rows) or not _succeeds(trace, own):
        return reason, ()
    # One device could not run it: what the replicas compute apart is all that there is.
    return reason, (f"a step that takes {own} rows and not {rows}",)


def _succeeds(trace: Callable[[int], object], rows: int) -> bool:
    try:
        trace(rows)
    except Exception:  # whatever a user's layer raises
        return False
    return True
