"""Summaries of a model_fn, in the form of TensorFlow 1: `tf.summary.scalar(name, tensor)`.

They are written with the number of the step every `RunConfig.save_summary_steps` steps; on several replicas,
numbers are the mean over these, and arrays have the rows of all. Outside of a model_fn, write
`unisono.summary.scalar(name, data, step)`.
Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/summary

Tests: tests/unit/estimator/test_model_summaries.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike
from unisono.estimator._collections import SUMMARIES, RecordedSummary, required_collections
from unisono.estimator._docstrings import Texts
from unisono.estimator._train_op import expose

__all__ = ["histogram", "image", "merge", "merge_all", "scalar", "text"]


def __dir__() -> list[str]:
    return __all__


_TEXTS = Texts(
    {
        "name": "string; the tag in TensorBoard. A second summary of the same name gets a number.",
        "tensor": "one real number, such as `accuracy[1]` of a metric.",
        "values": "array of real numbers of any shape.",
        "max_outputs": "whole number; how many images are written at most.",
        "inputs": "sequence of summaries, or of lists of summaries.",
        "collections": "names of collections; has no effect.",
        "family": "string that is put before the name; None for none.",
        "key": "any value; has no effect.",
        "scope": "any value; has no effect.",
    },
    "The summary, for `SummarySaverHook`.",
    {"ContextError": "the call is outside of a model_fn."},
)


@_TEXTS.with_texts(raises={**_TEXTS.raises, "InvalidArgumentError": "`tensor` is not one number."})
def scalar(
    name: str, tensor: ArrayLike, collections: object = None, family: str | None = None
) -> RecordedSummary:
    """Record a number."""
    value = _array(tensor)
    if value.size != 1:
        raise InvalidArgumentError(
            f"The value of a scalar summary must be one number. Received: shape {value.shape} for {name!r}. "
            "Write `tf.reduce_mean(x)`, or `histogram`."
        )
    return _record("scalar", name, family, value.reshape(()))


@_TEXTS
def histogram(
    name: str, values: ArrayLike, collections: object = None, family: str | None = None
) -> RecordedSummary:
    """Record the distribution of an array's values."""
    return _record("histogram", name, family, _array(values))


@_TEXTS.with_texts(
    tensor="array of shape `(k, height, width, channels)` of uint8, or of floats, which are scaled by their "
    "range, as TensorFlow 1 does.",
    raises={**_TEXTS.raises, "InvalidArgumentError": "`tensor` has another shape."},
)
def image(
    name: str,
    tensor: ArrayLike,
    max_outputs: int = 3,
    collections: object = None,
    family: str | None = None,
) -> RecordedSummary:
    """Record images."""
    value = _array(tensor)
    if value.ndim != 4 or not 1 <= value.shape[-1] <= 4:
        raise InvalidArgumentError(
            "Images must be of shape (k, height, width, channels) with 1 to 4 channels. Received: "
            f"{value.shape} for {name!r}. Reshape them."
        )
    value = value[:max_outputs]
    if value.dtype != jnp.uint8:
        value = jax.vmap(_scaled)(value)
    return _record("image", name, family, value, max_outputs=max_outputs)


def _scaled(pixels: jax.Array) -> jax.Array:
    """Return an image's floats from 0 to 1: by the largest, or around 1/2 where one is negative."""
    low, high = jnp.min(pixels), jnp.max(pixels)
    around = 0.5 + pixels / (2 * jnp.maximum(jnp.abs(low), jnp.abs(high)))
    return jnp.where(low < 0, around, pixels / jnp.where(high == 0, 1, high))


@_TEXTS.with_texts(
    tensor="string, or list of strings.",
    raises={**_TEXTS.raises, "InvalidArgumentError": "`tensor` is no text."},
)
def text(name: str, tensor: object, collections: object = None) -> RecordedSummary:
    """Record text that is part of the program."""
    data = np.asarray(tensor)
    if data.dtype.kind not in "SU":
        raise InvalidArgumentError(
            f"The data of text {name!r} must be strings. Received: {tensor!r}. Write `scalar` for a number."
        )
    gathered = required_collections("summary.text")
    summary = RecordedSummary("text", gathered.unique(name, "summary"), "", text=data)
    gathered.add(SUMMARIES, summary)
    return summary


@_TEXTS.with_texts(
    name="string; has no effect.", returns="A list of summaries, for `SummarySaverHook`.", raises={}
)
def merge(inputs: Sequence[Any], collections: object = None, name: str | None = None) -> list[Any]:
    """Return several summaries, for `SummarySaverHook`."""
    return [summary for part in inputs for summary in (part if isinstance(part, list) else [part])]


@_TEXTS.with_texts(
    name="string; has no effect.", returns="A list of summaries, for `SummarySaverHook`; None for none."
)
def merge_all(key: object = None, scope: object = None, name: str | None = None) -> list[Any] | None:
    """Return all summaries that the model_fn has recorded so far; None for none."""
    return list(required_collections("summary.merge_all").members.get(SUMMARIES, ())) or None


def _array(value: ArrayLike) -> jax.Array:
    array: jax.Array = (
        value.value if isinstance(value, keras.Variable) else keras.ops.convert_to_tensor(value)
    )
    return array


def _record(kind: str, name: str, family: str | None, value: jax.Array, **options: int) -> RecordedSummary:
    collections = required_collections(f"summary.{kind}")
    tag = collections.unique(name if family is None else f"{family}/{name}", "summary")
    key = f"_summary/{tag}"
    expose(key, jax.lax.stop_gradient(value))
    summary = RecordedSummary(kind, tag, key, options=options)
    collections.add(SUMMARIES, summary)
    return summary
