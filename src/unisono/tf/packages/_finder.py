"""Packages beside TensorFlow: some are adapted when they are imported, others need TensorFlow."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

import jax

from unisono._system._program_end import EXPLAINERS
from unisono._tracebacks import add_advice
from unisono.tf._module import NameModule

#: Packages that compute with TensorFlow, and what to use.
NEED_TENSORFLOW = {
    "tensorflow_hub": "Use `keras.applications`, `keras_hub`, or `tf.saved_model.load` of a saved model.",
    "tensorflow_text": "Make numbers of strings in the dataset, by `map` with plain Python.",
    "tensorflow_probability": "Use `tensorflow_probability.substrates.jax`.",
    "tensorflow_compression": "Write the coder in plain Python, around a Keras model.",
    "tensorflow_decision_forests": "Use `ydf`, which is its successor.",
    "tensorflow_recommenders": "Use `keras_rs`.",
    "tf_slim": "Write layers of `tf.keras`.",
    "official": "It is TensorFlow's model garden: use `keras_hub`, or layers of `tf.keras`.",
    "tensorflow_addons": "Use Keras 3's own layers and optimizers.",
    "tf_keras": "Write `import keras`.",
    "tensorflow_estimator": "Write `from unisono.tf import estimator`.",
    "tensorflow_io": "Read the data in plain Python, by `Dataset.from_generator`.",
    "spark_tensorflow_distributor": "Start the processes by `unisono launch`.",
    "jax.experimental.jax2tf": "Write `unisono.export.export(model, path)`, or `jax.export` for functions.",
    "horovod": 'docs/migrating.md shows what stands for each of its functions, in "From Horovod".',
}

#: For packages with such a name that are not listed.
_OTHERS = "Use a package of Keras 3 or JAX, or plain Python in the dataset's `map`."

_HUB = "tensorflow_hub"
_DATASETS = "tensorflow_datasets"
_EINOPS = "einops"


class PackageFinder(importlib.abc.MetaPathFinder):
    """Finds `tensorflow_datasets` and `einops`, to adapt them, and says of `tensorflow_hub` what to use.

    Args:
        has_tensorflow: whether `tensorflow` may be TensorFlow itself, which TensorFlow Hub then finds.
    """

    def __init__(self, has_tensorflow: bool) -> None:
        self._has_tensorflow = has_tensorflow

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of a module, or None; see `importlib`."""
        if fullname not in (_HUB, _DATASETS, _EINOPS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if fullname == _EINOPS:
            if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                spec.loader = _EinopsLoader(fullname, spec.loader.path)
            return spec
        if fullname == _HUB:
            if spec is None or not self._has_tensorflow:
                raise ModuleNotFoundError(
                    f"`{_HUB}` needs TensorFlow. {NEED_TENSORFLOW[_HUB]}", name=fullname
                )
            return None
        if spec is None:
            raise ModuleNotFoundError(
                f"`{_DATASETS}` is not installed. Write `pip install 'unisono[datasets]'`.", name=fullname
            )
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _AdaptingLoader(fullname, spec.loader.path)
        return spec


class _AdaptingLoader(importlib.machinery.SourceFileLoader):
    """Loads `tensorflow_datasets`, and adapts it."""

    def exec_module(self, module: types.ModuleType) -> None:
        _hide_names()
        super().exec_module(module)
        _adapt(module)


class _EinopsLoader(importlib.machinery.SourceFileLoader):
    """Loads `einops`, and lets it find out first that JAX's arrays are JAX's, not TensorFlow's."""

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        names = {name: sys.modules.pop(name) for name in ("tensorflow",) if name in sys.modules}
        try:
            jax.eval_shape(lambda x: module.rearrange(x, "a -> a"), jax.ShapeDtypeStruct((1,), "float32"))
        finally:
            sys.modules.update(names)


def _hide_names() -> None:
    """Let the package not take Unisono's names for TensorFlow, where a program has imported them before."""
    lazy = type(importlib.import_module("etils.enp").lazy)
    lazy.has_tf = property(
        lambda self: not isinstance(sys.modules.get("tensorflow"), (NameModule, type(None)))
    )


def adapt_packages() -> None:
    """Let `tensorflow_datasets` use `unisono.tf`, whether it has been imported before or not."""
    sys.meta_path.insert(0, PackageFinder(has_tensorflow=True))
    imported = sys.modules.get(_DATASETS)
    if imported is not None and hasattr(imported, "__path__"):
        _adapt(imported)


def explain_missing_package(error: BaseException) -> None:
    """Say what to use where a package that computes with TensorFlow is not installed.

    Not when it is looked for: programs and other packages ask whether they have it.

    >>> error = ModuleNotFoundError("No module named 'tf_slim'", name="tf_slim")
    >>> explain_missing_package(error)
    >>> error.__notes__
    ['`tf_slim` computes with TensorFlow, which `unisono.tf` is not. Write layers of `tf.keras`.']
    """
    if not isinstance(error, ModuleNotFoundError) or error.name in (None, _HUB, _DATASETS):
        return
    name = str(error.name).partition(".")[0]
    if name in NEED_TENSORFLOW or name.startswith("tensorflow_"):
        advice = NEED_TENSORFLOW.get(name, _OTHERS)
        add_advice(error, f"`{name}` computes with TensorFlow, which `unisono.tf` is not. {advice}")


EXPLAINERS.append(explain_missing_package)


def _adapt(module: types.ModuleType) -> None:
    from unisono.tf.packages import _datasets

    _datasets.adapt(module)
