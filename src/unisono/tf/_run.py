"""Runs a program with `tensorflow` provided by `unisono.tf`."""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Sequence

import keras
import numpy as np

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono.tf._module import NameFinder, add_finder
from unisono.tf._table import TABLE
from unisono.tf.packages._finder import PackageFinder

_USAGE = "usage: python -m unisono.tf [-m module | script.py] [arguments of the program]"


def provide_tensorflow() -> None:
    """Let `import tensorflow` find `unisono.tf` in this process."""
    if "tensorflow" in sys.modules:
        raise UnsupportedError(
            "`unisono.tf` provides the module `tensorflow`. Received: a process that has imported it "
            "already. Remove the import of TensorFlow from what runs before, such as `sitecustomize`."
        )
    _hide_from_libraries()
    add_finder(NameFinder("tensorflow", TABLE, with_root=True))
    sys.meta_path.insert(0, PackageFinder(has_tensorflow=False))


def _hide_from_libraries() -> None:
    """Let Keras and TensorBoard find no TensorFlow, which they use where it is installed.

    Without this, `model.save` asks whether objects are `tf.TensorShape`, and `keras.utils.set_random_seed`
    calls `tf.random.set_seed`, which is itself.
    """
    # None makes an import fail. Keras looks for TensorFlow when it first needs it, and keeps the answer.
    sys.modules["tensorflow"] = None  # type: ignore[assignment]
    try:
        keras.saving.serialize_keras_object(np.float32(0))
    finally:
        del sys.modules["tensorflow"]
    # TensorBoard's own sign that it is to use its stub.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))


def main(arguments: Sequence[str]) -> None:
    """Run a program as `__main__`.

    Raises:
        InvalidArgumentError: there is no such script.
        SystemExit: no script was named.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if arguments else 2)
    provide_tensorflow()
    if arguments[0] == "-m":
        if len(arguments) == 1:
            raise SystemExit(_USAGE)
        sys.argv = list(arguments[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = arguments[0]
    if not os.path.isfile(script):
        raise InvalidArgumentError(f"The first argument is a script. Received: {script!r}, which is no file.")
    sys.argv = list(arguments)
    # As `python script.py` does.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
