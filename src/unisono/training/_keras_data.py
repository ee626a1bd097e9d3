"""The data that `fit`, `evaluate` and `predict` are given, in the form that Keras takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import TYPE_CHECKING, TypeAlias

import jax
import keras
import numpy as np

from unisono._checks import checked_whole
from unisono._errors import InvalidArgumentError, InvalidTypeError, MixedStrategyError
from unisono._features import load
from unisono._reads import DataSet
from unisono._types import UserValue
from unisono.data._batches import check_no_rows, check_values, empty, is_of_class, owned
from unisono.data._sharding import DatasetCreator
from unisono.step._keras_internals import all_layers
from unisono.training.replica._losses import check_labels

if TYPE_CHECKING:
    from unisono.strategies._base import Strategy

#: The arguments of `fit`, `evaluate` and `predict` that may be arrays.
_ARRAYS = ("x", "y", "validation_data")

#: Those of a call, by name.
Arguments: TypeAlias = dict[str, UserValue]

#: Packages whose data Keras takes: arrays, tables and loaders.
_KNOWN_TO_KERAS = frozenset({"grain", "jax", "keras", "numpy", "pandas", "scipy", "tensorflow", "torch"})

#: Arguments that are numbers of rows.
_SIZES = ("batch_size", "validation_batch_size")


def begins_on_host(model: keras.Model) -> bool:
    """Return whether a model has layers of strings, which `_host_layers` runs before each step."""
    return any(
        getattr(layer, "computes_on_host", False) or getattr(layer, "_encodes_on_host", False)
        for layer in all_layers(model, include_self=False)
    )


def keras_arguments(strategy: Strategy, model: keras.Model, name: str, arguments: Arguments) -> Arguments:
    """Return the arguments, with Unisono's datasets replaced by a `PyDataset` or a Grain dataset.

    Args:
        name: `fit`, `evaluate` or `predict`.
        arguments: that were given, by name.

    Raises:
        InvalidArgumentError: for a batch size below 1, or a dataset with further arguments of data.
        InvalidTypeError: for a batch size that is not a whole number.
        MixedStrategyError: for distributed data of another strategy.
    """
    x, arguments = arguments.get("x"), dict(arguments)
    if x is None:
        raise InvalidTypeError(f"`{name}` needs data. Received: x=None. Pass arrays or a dataset of batches.")
    if not strategy._workers_make_data:
        is_alone = name == "predict" or arguments.get("y") is None
        arguments["x"] = _batches_given(name, model, _made_here(strategy, x), is_alone)
        if name == "fit" and "validation_data" in arguments:
            given = _batches_given(name, model, arguments["validation_data"], True)
            arguments["validation_data"] = _made_here(strategy, given)
    arguments = _with_adapters(name, arguments, lambda data: _keras_input(strategy, data))
    # `evaluate` of a model that is built would return the loss of no batch.
    x = arguments["x"]
    if isinstance(x, keras.utils.PyDataset) and x.num_batches == 0:
        raise empty(f"data without a batch in `{name}`")
    # Arrays are checked here, once and whole; batches of datasets one by one.
    for key in _ARRAYS:
        _check_arrays(arguments.get(key), key)
    if name == "fit":
        if is_of_class(x, "torch.utils.data.dataloader.DataLoader"):
            # The loader shuffles if the user wants that; Keras would warn of its own default, True.
            arguments.setdefault("shuffle", False)
        check_labels(model, arguments.get("y"), arguments.get("sample_weight"))
    for key in _SIZES:
        if arguments.get(key) is not None:
            checked_whole(arguments[key], "batch_size", 1, "Write `batch_size=64`, or leave it out for 32.")
    if "epochs" in arguments:
        checked_whole(arguments["epochs"], "epochs", 0, "Write `epochs=5`.")
    return arguments


def plain_arguments(name: str, arguments: Arguments) -> Arguments:
    """Return the arguments for a model of no strategy, with Unisono's datasets replaced as above.

    Keras takes a dataset for one of Grain, whose number of batches it does not ask for: it would warn at the
    end of each epoch.

    Raises:
        InvalidArgumentError: for a dataset with further arguments of data.
    """

    def adapt(data: DataSet) -> object:
        from unisono.data._dataset import Dataset
        from unisono.data._keras_input import as_keras_input

        return as_keras_input(data) if isinstance(data, Dataset) else data

    return _with_adapters(name, arguments, adapt)


def _with_adapters(name: str, arguments: Arguments, adapt: Callable[[DataSet], object]) -> Arguments:
    x = arguments.get("x")
    if isinstance(x, DataSet):
        _check_alone(name, arguments)
        _check_ends(f"`{name}`", x, "steps_per_epoch" if name == "fit" else "steps", arguments)
        arguments = {**arguments, "x": adapt(x)}
        # Keras would speak of Grain, of which users of a dataset need not know.
        if arguments.get("class_weight") is not None and not isinstance(
            arguments["x"], keras.utils.PyDataset
        ):
            raise InvalidArgumentError(
                "`class_weight` needs a dataset whose number of batches is known. Received: one of unknown "
                "size. Write `dataset.assert_cardinality(n)`, or give each batch a third part with weights."
            )
        if name == "fit":
            # The pipeline shuffles if the user wants that; Keras' default, True, would warn that it does not.
            arguments["shuffle"] = False
    validation = arguments.get("validation_data")
    if isinstance(validation, DataSet):
        _check_ends("The validation of `fit`", validation, "validation_steps", arguments)
        arguments = {**arguments, "validation_data": adapt(validation)}
    return arguments


def _check_alone(name: str, arguments: Arguments) -> None:
    """Raise where a call gives targets, weights, or the size of batches or of a split beside a dataset."""
    if arguments.get("batch_size") is not None:
        raise InvalidArgumentError(
            "A dataset gives batches itself, of the size for all replicas together. Received: "
            f"`{name}` with a dataset and batch_size={arguments['batch_size']!r}. Write "
            f"`{name}(dataset.batch({arguments['batch_size']}))` for a dataset of rows, and no `batch_size`."
        )
    if arguments.get("validation_split"):
        raise InvalidArgumentError(
            "`validation_split` is for arrays. Received: a dataset. Write "
            "`fit(dataset.skip(n), validation_data=dataset.take(n))`."
        )
    for key in ("y", "sample_weight"):
        if arguments.get(key) is not None:
            raise InvalidArgumentError(
                f"A dataset holds targets and weights itself. Received: `{name}` with a dataset and `{key}`. "
                f"Give elements `(x, y, weights)`, and pass options by name: `{name}(dataset, epochs=2)`."
            )


def _check_ends(what: str, data: DataSet, steps: str, arguments: Arguments) -> None:
    """Raise for data without end where a call does not say how many batches it takes."""
    size: object = getattr(data, "cardinality", None)
    from unisono.data._pipeline._cardinality import INFINITE

    if arguments.get(steps) is None and (size() if callable(size) else size) == INFINITE:
        raise InvalidArgumentError(
            f"{what} must know how many batches to take of data without end. Received: such data, as "
            f"`repeat()` makes them, and no `{steps}`. Write `{steps}=n`, or `dataset.take(n)`."
        )


def _made_here(strategy: Strategy, data: object) -> object:
    """Return the input that a `DatasetCreator` makes; any other as it is."""
    if not isinstance(data, DatasetCreator):
        return data
    return strategy.distribute_datasets_from_function(data.dataset_fn, data.input_options)


def _batches_given(name: str, model: keras.Model, data: UserValue, alone: bool) -> UserValue:
    """Return batches that Keras does not take for data as a `Dataset` or a generator; anything else as it is.

    Args:
        alone: whether the call gives no targets beside the data.

    Raises:
        InvalidTypeError: for rows, of which only the user knows what is input and what is target.
    """
    if isinstance(data, list):
        if not alone or not data or _takes_nested_lists(model):
            return data
        if all(isinstance(b, dict) for b in data):
            raise InvalidTypeError(
                f"`{name}` needs arrays, or batches `(x, y)`. Received: a list of dicts with the keys "
                f"{list(data[0])}. Write `[(batch['x'], batch['y']) for batch in data]`."
            )
        return _dataset_of(data) if all(map(_is_batch, data)) else data
    if isinstance(data, GeneratorType):
        # It may write into its last batch, and batches are read after later ones were taken.
        return (_owned(batch) for batch in data)
    check_no_rows(f"`{name}`", data)
    if isinstance(data, (DataSet, tuple, dict, str, bytes)):
        return data
    if any(c.__module__.partition(".")[0] in _KNOWN_TO_KERAS for c in type(data).__mro__):
        return data
    if not hasattr(data, "__iter__"):
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            raise load("mistake")("items", name, data)
        return data
    return (_owned(batch) for batch in data) if isinstance(data, Iterator) else _dataset_of(data)


def _owned(batch: UserValue) -> UserValue:
    """Return a batch with copies of its NumPy arrays."""
    if type(batch) is tuple and {*map(type, batch)} == {np.ndarray}:
        return tuple([owned(x) for x in batch])  # in half the time
    return jax.tree.map(owned, batch)


def _takes_nested_lists(model: keras.Model) -> bool:
    """Return whether a model's input is a list of lists or tuples, as a list of batches is."""
    try:
        return isinstance(model.input, list) and any(isinstance(part, (list, tuple)) for part in model.input)
    except (AttributeError, ValueError):
        # A model without inputs of its own, or one that is not built.
        return False


def _is_batch(value: UserValue) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) in (2, 3)
        and all(getattr(leaf, "ndim", 0) for leaf in jax.tree.leaves(value))
    )


def _dataset_of(batches: UserValue) -> DataSet:
    from unisono.data._distribute import dataset_of

    return dataset_of(batches)


def _keras_input(strategy: Strategy, data: DataSet) -> object:
    # Imported with the first data set alone: Grain and Orbax take 0.4 s.
    from unisono.data._dataset import Dataset
    from unisono.data._distribute import DistributedDataset
    from unisono.data._keras_input import as_keras_input

    if not isinstance(data, DistributedDataset):
        return as_keras_input(strategy._shared_pipeline(data))
    own = strategy._replicated
    if own is None or data._mesh.devices != own.mesh.devices:
        raise MixedStrategyError(
            "Distributed data must be made by the strategy of the model. Received: data for "
            f"{len(data._mesh.devices)} replicas on {', '.join(map(str, data._mesh.devices))}, and a model "
            f"of {strategy!r}. Distribute it with the model's strategy, or pass the dataset itself."
        )
    batches = data._host_batches
    return as_keras_input(batches) if isinstance(batches, Dataset) else batches


def _check_arrays(value: object, name: str) -> None:
    for part in value if isinstance(value, tuple) else (value,):
        check_no_rows(f"`{name}`", part)
    if isinstance(value, np.ndarray) or (isinstance(value, (list, tuple, dict)) and name != "sample_weight"):
        check_values(value, name)
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if isinstance(leaf, np.ndarray) and leaf.ndim and not len(leaf):
                raise empty(f"{name}{jax.tree_util.keystr(path)} of shape {leaf.shape}")


@contextlib.contextmanager
def data_needed(name: str, model: keras.Model, data: object) -> Iterator[None]:
    """Turn what Keras raises in `fit` and the like, where data have no batch, into a clear error.

    Raises:
        InvalidArgumentError: the data were empty, or not batches.
    """
    try:
        yield
    except (StopIteration, ValueError, AttributeError, UnboundLocalError) as error:
        load("explanation of an error of data")(name, model, data, error)
        raise
