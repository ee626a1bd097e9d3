"""Elements of datasets as TensorFlow gives them: arrays with `numpy()`.

Tests: tests/unit/tf/test_elements.py.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from unisono.data._tensorflow import show_elements
from unisono.estimator.session._graph import add_iterators
from unisono.tf.adapters._tensors import shape_of
from unisono.tf.adapters.inputs._host_tensor import HostTensor, as_tensor


def cardinality(dataset: Any) -> HostTensor:
    """Return the number of elements; -1 for a dataset without end, -2 where it is not known."""
    return np.asarray(dataset.cardinality(), np.int64).view(HostTensor)


def get_output_shapes(dataset: Any) -> Any:
    """Return the shapes of a data set's elements, or an iterator's, in their structure."""
    return jax.tree.map(lambda spec: shape_of(spec.shape), dataset.element_spec)


def get_output_types(dataset: Any) -> Any:
    """Return the dtypes of a data set's elements, or an iterator's, in their structure."""
    return jax.tree.map(lambda spec: spec.dtype, dataset.element_spec)


def get_output_classes(dataset: Any) -> Any:
    """Return `tf.Tensor` for each component of a data set's elements, or an iterator's."""
    return jax.tree.map(lambda _: jax.Array, dataset.element_spec)


def add_methods() -> None:
    """Let loops over datasets give elements with `numpy()`, and datasets make TensorFlow 1's iterators."""
    show_elements(as_tensor)
    add_iterators()
