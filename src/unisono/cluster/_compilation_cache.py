"""JAX's compilation cache on every process of a cluster.

JAX writes it on the first process alone, since on TPUs and GPUs all processes have the same
entries. On CPUs each has its own: without them a process that is started again, or its
replacement, compiles everything anew, and all others wait for it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from typing import Any

import jax

_LOG = logging.getLogger("unisono")

#: What `jax._src.compiler._cache_write` takes, the last until JAX 0.10. There is no public name for it.
_ARGUMENTS = ["cache_key", "compile_time_secs", "module_name", "backend", "executable", "host_callbacks"]
#: Seconds of compilation below which nothing is written.
_SHORTEST = "jax_persistent_cache_min_compile_time_secs"


def write_on_this_process() -> bool:
    """Let this process write what it compiles into JAX's compilation cache, where one is configured.

    Call it once JAX is distributed. It changes a private function of JAX, or nothing where that is
    not the one that it knows: then the process compiles more often, and nothing else.

    Returns:
        Whether it will.
    """
    try:
        compiler: Any = importlib.import_module("jax._src.compiler")
        put: Any = importlib.import_module("jax._src.compilation_cache").put_executable_and_time
        known = list(inspect.signature(compiler._cache_write).parameters) in (_ARGUMENTS, _ARGUMENTS[:-1])
    except (ImportError, AttributeError):
        known = False
    if not known:
        _LOG.info("JAX %s writes its compilation cache in a way of its own.", jax.__version__)
        return False

    def write(
        cache_key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Any = ()
    ) -> None:
        # As the original decides: a callback is a pointer into this process.
        shortest: float = getattr(jax.config, _SHORTEST)
        if callbacks or seconds < shortest:
            return
        try:
            put(cache_key, name, executable, backend, int(seconds))
        except Exception as error:
            # Such as a full disk. A program that was compiled is worth more than its entry.
            warnings.warn(f"JAX's compilation cache could not be written for {name}: {error}", stacklevel=2)

    compiler._cache_write = write
    return True
