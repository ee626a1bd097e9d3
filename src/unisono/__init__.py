"""Unisono: the programming model of `tf.distribute.Strategy` for Keras 3 and JAX.

Create a strategy, build and compile a model in its `scope()`, and call `fit`; or write your own
loop with `strategy.run` and `strategy.reduce`. Names are loaded when they are first used, so
that `import unisono` starts neither JAX nor Keras.
"""

import importlib as _importlib
import sys as _sys

from unisono import _backend, _names
from unisono._system import _program_end

_backend.select_jax()
# A program may compute before it makes a strategy, and JAX' backend starts then.
if _backend.devices_asked_for() > 1 and not (
    "jax" in _sys.modules and _importlib.import_module("unisono._mesh").jax_runs()
):
    _backend.reserve_threads(_backend.devices_asked_for())
_program_end.watch_program()

__version__ = "0.2.0"

#: Names whose use needs the default strategy, so that code outside every scope works.
_NEEDS_DEFAULT = {"get_strategy", "get_replica_context", "function", "value_and_grad", "GradientTape"}

_load, __dir__, __all__ = _names.lazy_names(__name__, ["__version__"])


def __getattr__(name: str) -> object:
    if name in _NEEDS_DEFAULT:
        _importlib.import_module("unisono.strategies._one_device")
    if name in ("function", "GradientTape"):
        # Programs of a function donate what variables hold: from now on an assignment gives a variable its
        # own array. A tape in eager code notes which variables are read.
        _importlib.import_module("unisono.training._bind").wrap_keras()
    return _load(name)
