"""Elements of datasets as TensorFlow gives them: arrays with `numpy()`.

Tests: tests/unit/tf/test_elements.py.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from unisono.data._dataset import Dataset
from unisono.data._distribute import DistributedDataset
from unisono.data._iterator import DistributedIterator
from unisono.data._pipeline._functions import Arguments
from unisono.data._pipeline._plan import PipelineIterator
from unisono.estimator.session._graph_iterators import IteratorInitializer, make_one_shot_iterator
from unisono.tf.adapters._tensors import shape_of
from unisono.tf.adapters.inputs._host_tensor import HostTensor, as_tensor


class ElementIterator(PipelineIterator):
    """The iterator of a `for` loop over a dataset."""

    def __next__(self) -> Any:
        return jax.tree.map(as_tensor, super().__next__())

    get_next: Any = DistributedIterator.get_next
    get_next_as_optional: Any = DistributedIterator.get_next_as_optional


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
    Dataset.iterator_class = ElementIterator
    Arguments.view = as_tensor
    # TensorFlow 1's, for input functions of Estimators and for loops of sessions.
    for name in ("make_initializable_iterator", "make_one_shot_iterator"):
        setattr(Dataset, name, make_iterator)
        setattr(DistributedDataset, name, make_iterator)
    initializer: Any = property(lambda self: IteratorInitializer(), doc="As that of other iterators.")
    DistributedIterator.initializer = initializer  # type: ignore[attr-defined]


def make_iterator(dataset: Any, shared_name: Any = None) -> Any:
    """Return an iterator of TensorFlow 1, with `get_next` and `initializer`.

    Args:
        dataset: what is read, also a distributed one.
        shared_name: is not used.
    """
    if isinstance(dataset, DistributedDataset):
        return iter(dataset)
    return make_one_shot_iterator(dataset)
