"""The data sets of `tf.data`: `unisono.data.Dataset` with elements that have `numpy()`.

Tests: tests/unit/tf/test_elements.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from unisono.data._dataset import Dataset
from unisono.data._tensorflow import TextLineDataset as LinesOfFiles
from unisono.data._tensorflow import TFRecordDataset as RecordsOfFiles
from unisono.data._tensorflow import ViewIterator
from unisono.estimator.session._graph import add_iterators
from unisono.tf.adapters._tensors import shape_of
from unisono.tf.adapters.inputs._host_tensor import HostTensor, as_tensor


class TensorIterator(ViewIterator):
    """The iterator of a loop over a `TensorDataset`."""

    view = staticmethod(as_tensor)


if TYPE_CHECKING:
    # Programs pass either where a data set is taken.
    TensorDataset = Dataset
else:

    class _AnyDataset(type(Dataset)):
        def __instancecheck__(cls, instance: object) -> bool:
            # For programs that ask whether they have a data set: one of `unisono.data` is one, too.
            return type.__instancecheck__(Dataset if cls is TensorDataset else cls, instance)

    class TensorDataset(Dataset, metaclass=_AnyDataset):
        """A data set that gives loops, and users' functions, tensors in place of arrays: `tf.data.Dataset`.

        >>> (element,) = TensorDataset.from_tensors([1, 2]).map(lambda x: x.numpy() + 1)
        >>> element.numpy()
        array([2, 3], dtype=int32)
        """

        _iterator_class = TensorIterator
        _view = staticmethod(as_tensor)


def TextLineDataset(filenames: Any, num_parallel_reads: int | None = None) -> TensorDataset:  # noqa: N802
    """Return a data set of the lines of text files; see `unisono.data.TextLineDataset`."""
    return TensorDataset._of(LinesOfFiles(filenames, num_parallel_reads))


def TFRecordDataset(filenames: Any, num_parallel_reads: int | None = None) -> TensorDataset:  # noqa: N802
    """Return a data set of the records of TFRecord files; see `unisono.data.TFRecordDataset`."""
    return TensorDataset._of(RecordsOfFiles(filenames, num_parallel_reads))


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
    """Let data sets make the iterators of TensorFlow 1."""
    add_iterators()
