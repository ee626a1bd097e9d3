"""JAX's compilation cache on every process of a cluster.

JAX writes it on the first process alone, since on TPUs and GPUs all processes have the same
entries. On CPUs each process has its own: without them a restarted process, or its replacement,
compiles everything again while all others wait for it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import jax

_LOG = logging.getLogger("unisono")

#: The parameters of `jax._src.compiler._cache_write`; the last one until JAX 0.10. It has no public name.
_ARGUMENTS = ["cache_key", "compile_time_secs", "module_name", "backend", "executable", "host_callbacks"]
#: Seconds of compilation below which nothing is written.
_SHORTEST = "jax_persistent_cache_min_compile_time_secs"


def write_on_this_process() -> bool:
    """Let this process write its programs to JAX's compilation cache, where one is configured.

    Call it after `jax.distributed.initialize`. It replaces a private function of JAX. In a version of JAX
    where that function has other parameters it does nothing: the process then compiles more often.

    Returns:
        Whether the function was replaced.
    """
    try:
        compiler: Any = importlib.import_module("jax._src.compiler")
        put: Any = importlib.import_module("jax._src.compilation_cache").put_executable_and_time
        known = list(inspect.signature(compiler._cache_write).parameters) in (_ARGUMENTS, _ARGUMENTS[:-1])
    except (ImportError, AttributeError):
        known = False
    if not known:
        _LOG.info(
            "Only the first process writes the compilation cache: JAX %s has no function `_cache_write` that "
            "can be replaced.",
            jax.__version__,
        )
        return False

    def write(
        cache_key: str,
        seconds: float,
        name: str,
        backend: object,
        executable: object,
        callbacks: Sequence[object] = (),
    ) -> None:
        # As JAX's own function: a host callback is a pointer into this process, useless in another.
        shortest: float = getattr(jax.config, _SHORTEST)
        if callbacks or seconds < shortest:
            return
        try:
            put(cache_key, name, executable, backend, int(seconds))
        except Exception as error:
            # Such as a full disk. The program is compiled and can run: a missing entry must not end it.
            warnings.warn(f"JAX's compilation cache could not be written for {name}: {error}", stacklevel=2)

    compiler._cache_write = write
    return True
