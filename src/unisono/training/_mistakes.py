"""The texts of errors for mistakes that are recognised where they are made; loaded with the first of them.

Tests: tests/virtual/test_mistakes.py.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import keras
import numpy as np

from unisono._errors import (
    BackendError,
    ContextError,
    DeviceError,
    InvalidArgumentError,
    InvalidTypeError,
    UnisonoError,
)
from unisono._reads import DataSet
from unisono._tracebacks import add_advice
from unisono.data._batches import empty, keys_of_dicts
from unisono.step._keras_internals import is_of_no_batch
from unisono.step.variables._outside_variables import created_outside


def mistake(kind: str, *given: object) -> UnisonoError:
    """Return the error for a mistake.

    Args:
        kind: a key of the table below.
        given: what its text is made of.

    >>> str(mistake("scope of a class")).partition(". ")[0]
    'A scope belongs to a strategy, and not to its class'
    """
    return _MISTAKES[kind](*given)


_IN_SCOPE = "Write\n    with strategy.scope():\n        model = ...\n        model.compile(...)"


def _no_brackets() -> ContextError:
    return ContextError(
        f"`scope` is a method. Received: `with strategy.scope:`, without brackets. {_IN_SCOPE}"
    )


def _step_in_jit() -> ContextError:
    return ContextError(
        "`strategy.run` compiles the step itself. Received: a call in a function of `jit`, `grad` or `vmap`. "
        "Write `@unisono.function` in place of `@jax.jit`, or a `unisono.GradientTape` in the step."
    )


def _bare_strategy(name: str) -> ContextError:
    return ContextError(
        f"What a strategy trains is created in its scope. Received: `with` and the {name} itself. {_IN_SCOPE}"
    )


def _scope_of_class() -> ContextError:
    return ContextError(
        "A scope belongs to a strategy, and not to its class. Received: `scope()` of a class. Write\n"
        "    strategy = unisono.MirroredStrategy()\n    with strategy.scope():\n        model = ..."
    )


def _no_gradient(variables: Sequence[keras.Variable]) -> InvalidArgumentError:
    names = ", ".join(repr(v.path) for v in variables[:2]) + (", …" if len(variables) > 2 else "")
    return InvalidArgumentError(
        "An optimizer must get a gradient for at least one variable. Received: None for each of "
        f"{len(variables)}, {names}: what was differentiated does not depend on them, as far as the tape has "
        "seen. Compute predictions and loss inside of the tape, and from these variables:\n"
        "    with unisono.GradientTape() as tape:\n"
        "        predictions = model(x, training=True)\n"
        "        loss = loss_fn(y, predictions)\n"
        "    gradients = tape.gradient(loss, model.trainable_variables)"
    )


def _path(given: object) -> UnisonoError:
    """The error for another object than a path, and for a path of Windows on another system."""
    if not isinstance(given, (str, bytes, os.PathLike)):
        return InvalidTypeError(f'A path must be a text or a `Path`. Received: {given!r}. Write "run".')
    text = str(given)
    name = text.replace("\\", "/").rpartition("/")[2] or "run"
    return InvalidArgumentError(
        f"A path must be one of this system. Received: {text!r}, a path of Windows, which would be one name "
        f"in the working directory here. Write {str(Path.home() / name)!r}, or another path with `/`."
    )


def _devices(devices: object, there: str) -> DeviceError:
    """The error for a list of devices that is none, is empty, or has something else in it."""
    if isinstance(devices, (str, jax.Device)):
        names = devices.replace(" ", "").split(",") if isinstance(devices, str) else [devices]
        if isinstance(devices, str) and devices.isalpha():
            # A platform, as `jax.devices` takes it.
            names = [f"{devices.lower()}:{i}" for i in range(2)]
            return DeviceError(
                f"`devices` must be a list. Received: devices={devices!r}. Write `{names!r}`, or leave it "
                f"out to take all devices. There are: {there}."
            )
        return DeviceError(f"`devices` must be a list. Received: devices={devices!r}. Write `{names!r}`.")
    what = "`devices` must be a list of names or `jax.Device`s, in replica order."
    if not isinstance(devices, Sequence):
        hint = (
            f'For {devices} devices write `devices=["gpu:0", …]` or `num_gpus={devices}`.'
            if isinstance(devices, int) and devices > 0
            else 'Write `devices=["cpu:0", "cpu:1"]`, for example.'
        )
        return DeviceError(f"{what} Received: devices={devices!r}. {hint}")
    for device in devices:
        if not isinstance(device, (str, jax.Device)):
            return DeviceError(
                f'{what} Received: {device!r} in devices={list(devices)!r}. Write `"gpu:0"` for the first '
                f"GPU, for example. There are: {there}."
            )
    return DeviceError(
        f"A strategy needs at least one device. Received: devices={devices!r}. "
        "Leave `devices` out to take all of them."
    )


def _devices_and_number(devices: Sequence[object], number: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Give either `devices` or their number. Received: devices={list(devices)!r} and {number}. "
        "Leave one of them out."
    )


def _device_name(name: str, there: str) -> DeviceError:
    return DeviceError(
        f"A device must be named like '/gpu:0', 'GPU:0' or 'cpu:1'. Received: {name!r}. There are: {there}."
    )


def _number_of_gpus(number: int, there: str) -> DeviceError:
    return DeviceError(
        f"`num_gpus` must be between 1 and the number of devices. Received: num_gpus={number}. "
        f"There are: {there}."
    )


def _device_twice(device: jax.Device, devices: Sequence[object], there: str) -> DeviceError:
    return DeviceError(
        f"Every device must hold at most one replica. Received: {device} twice in {list(devices)!r}. "
        f"There are: {there}."
    )


def _platforms(first: jax.Device, device: jax.Device) -> DeviceError:
    return DeviceError(
        "All replicas must be on devices of one platform, since they run one program. Received: "
        f"{first} ({first.platform}) and {device} ({device.platform}). Name devices of one platform."
    )


def _threads(count: int, threads: int) -> BackendError:
    return BackendError(
        f"XLA's CPU backend must have at least two threads for each of {count} virtual devices, or their "
        f"collectives hang. Received: a pool of {threads} threads, made when JAX started. Create "
        f"the strategy before JAX computes anything, or set PJRT_NPROC={2 * count} in the environment."
    )


def _no_device(kind: str, index: int, there: str) -> DeviceError:
    if kind == "gpu":
        return _no_gpu(f"{kind}:{index}", there)
    hint = (
        "Create the strategy before JAX computes anything, or write "
        f'`jax.config.update("jax_num_cpu_devices", {index + 1})` at the top of the program.'
        if kind == "cpu"
        else "Name one of these, or use virtual CPU devices: ['cpu:0', 'cpu:1']."
    )
    return DeviceError(f"A device must exist. Received: '{kind}:{index}'. There are: {there}. {hint}")


def _no_gpu(name: str, there: str) -> DeviceError:
    plugins = [p for p in _CUDA_PLUGINS if importlib.util.find_spec(p) is not None]
    if plugins:
        write = (
            f"JAX has support for GPUs ({plugins[0]}) and finds fewer: see `nvidia-smi`, `unisono doctor` "
            "and the variables CUDA_VISIBLE_DEVICES and JAX_PLATFORMS."
        )
    else:
        write = (
            "The jaxlib of this Python computes on CPUs alone. On a machine with an NVIDIA GPU write "
            "`pip install -U 'jax[cuda13]'`."
        )
    return DeviceError(
        f"A device must exist. Received: {name!r}. There are: {there}. {write} To try a program "
        "without GPUs, use virtual CPU devices: ['cpu:0', 'cpu:1']."
    )


#: The modules that bring support for NVIDIA's and AMD's GPUs to JAX.
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")


def _items(method: str, data: Sequence[object]) -> InvalidTypeError:
    try:
        first = data[0]
    except Exception:  # a user's code may do anything
        first = None
    name, found, source = type(data).__name__, "", "unisono.data.Dataset.from_source(data)"
    if isinstance(first, Mapping):
        found, chosen = f" that are dicts with the keys {list(first)}", _chosen("row", first)
        source += f".map(lambda row: {chosen})"
    write = f"For items that are rows write `{source}.batch(64)`; for items that are batches derive the class"
    return InvalidTypeError(
        f"`{method}` needs arrays, or batches `(x, y)`. Received: an object of the class {name} with "
        f"{len(data)} items{found}. {write} from `keras.utils.PyDataset`."
    )


def _chosen(name: str, keys: Mapping[str, object]) -> str:
    """Return the code of `(x, y)` of a dict, by its own keys where they tell which they are."""
    y = next((k for k in ("y", "label", "labels", "target", "targets") if k in keys), None)
    others = [k for k in keys if k != y]
    x = others[0] if y is not None and len(others) == 1 else "x"
    return f"({name}[{x!r}], {name}[{y or 'y'!r}])"


def _unusable(name: str, array: np.ndarray, kind: str) -> UnisonoError:
    """Return the error for an array that JAX cannot represent."""
    if kind in "iu":
        narrow = np.iinfo(np.int32 if kind == "i" else np.uint32)
        odd = array.ravel()
        odd = odd[(odd > narrow.max) | (odd < narrow.min)][0]
        return InvalidArgumentError(
            f"Without 64-bit numbers in JAX, integers must lie between {narrow.min} and {narrow.max}. "
            f"Received: {name} of dtype {array.dtype} with {odd}. Hash into fewer buckets "
            "(`ids % 2**31`), or write `jax.config.update('jax_enable_x64', True)` first."
        )
    if kind in "Mm":
        return InvalidTypeError(
            f"A batch must hold numbers. Received: {name} of dtype {array.dtype}. Convert times to numbers "
            "before training, for example to hours as float32."
        )
    return _unusable_objects(name, array)


def _unusable_objects(name: str, array: np.ndarray) -> InvalidTypeError:
    example = array.ravel()[:1].tolist()
    if not example or isinstance(example[0], (str, bytes)):
        return InvalidTypeError(
            f"A batch must hold numbers: devices cannot hold strings. Received: {name} with strings, "
            f"such as {example[:1]}. Turn them into numbers before training, with "
            "`keras.layers.StringLookup` or `TextVectorization` in the data's `map`."
        )
    return InvalidTypeError(
        f"A batch must hold numbers. Received: {name} with Python objects of type "
        f"{type(example[0]).__name__}. Convert them with `np.asarray(values, 'float32')`; where rows differ "
        "in length, pad them."
    )


_MISTAKES: dict[str, Callable[..., UnisonoError]] = {
    "scope without brackets": _no_brackets,
    "step in jit": _step_in_jit,
    "with a strategy": _bare_strategy,
    "scope of a class": _scope_of_class,
    "no gradient": _no_gradient,
    "path": _path,
    "devices": _devices,
    "no device": _no_device,
    "devices and number": _devices_and_number,
    "name of a device": _device_name,
    "number of GPUs": _number_of_gpus,
    "device twice": _device_twice,
    "platforms": _platforms,
    "threads": _threads,
    "items": _items,
    "unusable": _unusable,
    "variable outside of the scope": created_outside,
}


def explain_data(name: str, model: keras.Model, data: object, error: Exception) -> None:
    """Raise a clear error where Keras' `fit` and the like have failed because of their data; else return.

    Args:
        name: of the method.
        data: that it was given.
        error: of Keras.

    Raises:
        InvalidArgumentError: the data were empty, or not batches.
        InvalidTypeError: the batches are dicts.
    """
    if isinstance(error, StopIteration) or (isinstance(error, UnboundLocalError) and is_of_no_batch(error)):
        raise empty(f"data without a batch in `{name}`") from None
    if isinstance(error, AttributeError) and str(error) == "'str' object has no attribute 'shape'":
        raise keys_of_dicts() from None
    if isinstance(error, AttributeError) and str(error) == "'list' object has no attribute 'get'":
        # Keras looks up each class in what it was given.
        error.add_note("`class_weight` is a dict of each class' weight. Write `{0: 1.0, 1: 2.0}`.")
    if not isinstance(error, ValueError):
        return
    # Keras 3 makes a `KerasTensor` of each component of the first batch: these are its texts for a dtype
    # that it does not know.
    if str(error).startswith(("Invalid dtype: str", "Invalid dtype: obj")):
        error.add_note(
            "The data hold strings or Python objects. Turn them into numbers before training, with "
            "`keras.layers.StringLookup` or `TextVectorization` in the data's `map`."
        )
    if str(error).startswith("Unrecognized data type: "):
        raise _unrecognized(name, data) from None
    if str(error).startswith("When passing a Python generator") and "empty generator" not in str(error):
        # Keras' text has all numbers of the batch in it.
        raise InvalidTypeError(
            f"A generator for `{name}` must give tuples, `(x, y)` or `(x,)`. Received: something "
            "else, such as an array alone or a list. Write `yield x, y`, or `yield (x,)` for "
            "inputs alone."
        ) from None
    if "must have the same shape up until the last dimension" in str(error):
        add_advice(
            error,
            "A sparse loss takes whole numbers as targets, without a dimension of classes. For targets "
            'that are one-hot write the loss "categorical_crossentropy", or `y.argmax(-1)`.',
        )
    if (shapes := _UNBATCHED.search(str(error))) is not None and shapes[1] == shapes[2].rstrip(", "):
        raise InvalidArgumentError(
            f"Data must be batches, with one row for each example. Received: elements of ({shapes[2]}), "
            f"where {model.name!r} takes (None, {shapes[1]}). Give batches `(x[i:i+64], y[i:i+64])`; of a "
            "dataset of rows write `dataset.batch(64)`."
        ) from None
    if shapes is not None and re.fullmatch(r"\d+, \d+, " + re.escape(shapes[1]), shapes[2]):
        add_advice(
            error, "Elements have one dimension more than batches: leave out one of two `batch` calls."
        )
    if any(part in str(error) for part in ("structure of `inputs`", "Missing data for input")):
        _check_no_dicts(name, data)
    if isinstance(data, DataSet) and "shape" in str(error):
        _check_has_rows(model, data)


#: Keras' text for an element without rows.
_UNBATCHED = re.compile(r"Expected shape \(None, ([^)]*)\), but input has incompatible shape \(([^)]*)\)")


def _unrecognized(name: str, data: object) -> InvalidTypeError:
    kind = type(data).__name__
    if inspect.isgeneratorfunction(data):
        return InvalidTypeError(
            f"`{name}` needs arrays, or batches `(x, y)`. Received: the function {data.__name__}, which "
            f"makes a generator. Write `{name}({data.__name__}(), …)`; for several epochs "
            f"`unisono.data.Dataset.from_generator({data.__name__})`, which is called for each."
        )
    if isinstance(data, (list, tuple)) and data:
        kind += f" of {len(data)} objects of the class {type(data[0]).__name__}"
    return InvalidTypeError(
        f"`{name}` needs arrays, or batches `(x, y)`. Received: as `x` a {kind}, or as `y` what does not go "
        "with it. Write `np.asarray(x, 'float32')` for lists of numbers, and the same for `y`."
    )


def _check_no_dicts(name: str, data: object) -> None:
    """Raise for batches that are dicts, which Keras takes for the inputs of a model by name."""
    batch = getattr(data, "element_spec", None)
    if isinstance(data, keras.utils.PyDataset):
        batch = data[0]
    if isinstance(batch, Mapping):
        chosen = _chosen("batch", batch)
        if name == "predict":
            chosen = chosen[1:].partition(",")[0]
        raise InvalidTypeError(
            f"`{name}` needs batches `(x, y)`. Received: dicts with the keys {list(batch)}, which Keras "
            f"takes for inputs by name. Write `dataset.map(lambda batch: {chosen})`."
        ) from None


def _check_has_rows(model: keras.Model, data: DataSet) -> None:
    """Raise where elements have the shapes of single examples of a model.

    Called only where Keras has rejected them: to find the shapes may need the first element to be read.
    """
    from unisono.data._dataset import Dataset

    wanted = getattr(model, "inputs", None)
    if not isinstance(data, Dataset):
        return
    spec = data.element_spec
    given = jax.tree_util.tree_leaves_with_path(spec[0] if isinstance(spec, tuple) and spec else spec)
    if not isinstance(wanted, list) or len(wanted) != len(given):
        return
    for (_, leaf), one in zip(given, wanted, strict=True):
        # Keras itself adds a last dimension of one.
        if leaf.shape is None or len(leaf.shape) != len(one.shape) - 1 or one.shape[-1] == 1:
            return
    path, leaf = given[0]
    raise InvalidArgumentError(
        f"Data must be batches, with one row for each example. Received: elements of shape {leaf.shape} at "
        f"x{jax.tree_util.keystr(path)}, where {model.name!r} takes {wanted[0].shape}. "
        "Did you forget `.batch()`? Write `dataset.batch(64)`."
    ) from None


#: Notes on errors of Python that end a program: the kind, the text, and the note.
_NOTES: tuple[tuple[type[Exception], re.Pattern[str], str], ...] = tuple(
    (kind, re.compile(text), note)
    for kind, text, note in (
        (
            TypeError,
            "'(Split|Function)Dataset' object is not (an iterator|subscriptable)",
            "Distributed data are iterated: write `for batch in dataset:`, or `iterator = iter(dataset)` and "
            "`next(iterator)`.",
        ),
        (
            AttributeError,
            "'PerReplica' object has no attribute",
            "It holds one value for each replica. Give it to a step, `strategy.run(step, args=(batch,))`, in "
            "which it is an array; or read the values by `strategy.local_results(value)`.",
        ),
        (
            AttributeError,
            "object has no attribute '(minimize|compute_gradients|get_gradients)'",
            "Optimizers of Keras 3 have `apply_gradients` alone. Write\n"
            "    with unisono.GradientTape() as tape:\n        loss = ...\n"
            "    gradients = tape.gradient(loss, variables)\n"
            "    optimizer.apply_gradients(zip(gradients, variables))",
        ),
        (
            AttributeError,
            "has no attribute '?backward'?",
            "An array of JAX has no graph. Write `with unisono.GradientTape() as tape:` around the forward "
            "pass, and `tape.gradient(loss, variables)`.",
        ),
        (
            AttributeError,
            "Strategy' object has no attribute '(num_replicas|num_devices|world_size)'",
            "Write `strategy.num_replicas_in_sync`.",
        ),
        (
            AttributeError,
            "Strategy' object has no attribute '(all_reduce|allreduce|all_gather|broadcast)'",
            'Write `strategy.reduce("SUM", value, axis=None)` or `strategy.gather(value, axis=0)`; in a step '
            '`unisono.get_replica_context().all_reduce("SUM", x)`.',
        ),
        (
            ModuleNotFoundError,
            "^No module named 'tensorflow'$",
            "Unisono has TensorFlow's names: run the program by `python -m unisono.tf PROGRAM`, or write "
            "`from unisono import tf`; `unisono migrate PROGRAM` says what must change. Where Keras imports "
            "TensorFlow, set KERAS_BACKEND=jax, or import unisono before keras.",
        ),
        (
            TypeError,
            r"Strategy\.reduce\(\) missing 1 required positional argument: 'axis'",
            'Write `strategy.reduce("sum", value, axis=None)` for one value of all replicas; `axis=0` also '
            "sums over the rows.",
        ),
    )
)


def note_on(error: BaseException) -> str | None:
    """Return the note on an error of Python that ends a program; None for an unknown one.

    >>> note_on(AttributeError("'SGD' object has no attribute 'minimize'")).partition(". ")[0]
    'Optimizers of Keras 3 have `apply_gradients` alone'
    """
    known = (note for kind, text, note in _NOTES if isinstance(error, kind) and text.search(str(error)))
    return next(known, None) or _note_on_keyword(str(error))


#: Python's error about an argument that a function does not take; from 3.13 on, it may propose another.
_UNEXPECTED = re.compile(r"(\w+)\.(\w+)\(\) got an unexpected keyword argument '(\w+)'")
#: How alike two names are, of which one is proposed for the other: "size" and "batch_size".
_ALIKE = 0.55


def _note_on_keyword(text: str) -> str | None:
    """Return the note on a misspelt argument of a public class or of its method."""
    match = _UNEXPECTED.fullmatch(text)
    if match is None:
        return None
    owner, method, given = match.groups()
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "unisono"]
    classes = (vars(module).get(owner) for module in loaded)
    ours = next((c for c in classes if isinstance(c, type) and c.__module__.startswith("unisono.")), None)
    function = inspect.getattr_static(ours, method, None)
    if not inspect.isfunction(function):
        return None
    names = list(inspect.signature(function).parameters)[1:]
    called = owner if method == "__init__" else method
    alike = difflib.get_close_matches(given, names, n=1, cutoff=_ALIKE)
    write = f"Write `{alike[0]}=…` in place of `{given}=…`. " if alike else ""
    return f"{write}`{called}` takes {', '.join(names)}."
