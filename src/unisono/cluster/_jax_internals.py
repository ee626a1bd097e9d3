"""What the library uses of JAX's clusters that is not public: each such name occurs here alone.

Checked where they are first needed. `register_backend_factory` is public, in `jax.extend.backend`.

Tests: tests/cluster/test_two_hosts.py, tests/unit/cluster/test_jax_internals.py,
tests/unit/cluster/test_compilation_cache.py.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.backend import register_backend_factory

from unisono._errors import BackendError

_LOG = logging.getLogger("unisono")

#: The parameters of `jax._src.compiler._cache_write`; the last one until JAX 0.10. It has no public name.
_ARGUMENTS = ["cache_key", "compile_time_secs", "module_name", "backend", "executable", "host_callbacks"]
#: Seconds of compilation below which nothing is written.
_SHORTEST = "jax_persistent_cache_min_compile_time_secs"


class Board:
    """Texts that the processes of a cluster post and read, at JAX's coordination service.

    Raises:
        BackendError: when this version of JAX keeps its client elsewhere.
    """

    def __init__(self) -> None:
        try:
            self._client: Any = importlib.import_module("jax._src.distributed").global_state.client
        except (ImportError, AttributeError):
            self._client = None
        needed = ("key_value_set", "blocking_key_value_get")
        if missing := [name for name in needed if not hasattr(self._client, name)]:
            raise BackendError(
                "JAX must have a client of its coordination service, where processes find each other. "
                f"Received: JAX {jax.__version__} without {' and '.join(missing)} in "
                "jax._src.distributed.global_state.client. Install jax==0.10.2."
            )

    def post(self, key: str, text: str, seconds: float) -> None:
        """Post a text, once; return when the service has confirmed it, or after some seconds.

        JAX waits for the confirmation without a limit. It is never sent where process 0 ends meanwhile, of
        which the proxy tells JAX nothing; what is read afterwards shows that.
        """
        errors: list[Exception] = []

        def send() -> None:
            try:
                self._client.key_value_set(key, text)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=send, name="unisono-post", daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise errors[0]

    def read(self, key: str, seconds: float) -> str | None:
        """Return a text when it has been posted, None when it is not within some seconds."""
        try:
            return str(self._client.blocking_key_value_get(key, max(1, round(1000 * seconds))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None


def own_place() -> tuple[int, int]:
    """Return this process' number and their count, where `jax.distributed` has been started already."""
    state: Any = importlib.import_module("jax._src.distributed").global_state
    return state.process_id, state.num_processes


def let_gloo_listen_at(ip: str) -> bool:
    """Let Gloo, which connects CPUs of several processes, listen at an address and publish it.

    JAX leaves the choice to Gloo, which takes what the host's own name resolves to: 127.0.1.1 on Debian and
    Ubuntu. Call it after `jax.distributed.initialize` and before a backend starts.
    """
    try:
        make_client: Any = importlib.import_module("jax._src.xla_bridge").make_cpu_client
        make_gloo: Any = importlib.import_module("jax._src.lib")._jax.make_gloo_tcp_collectives
        state: Any = importlib.import_module("jax._src.distributed").global_state
        known = "collectives" in inspect.signature(make_client).parameters and "hostname" in make_gloo.__doc__
    except (ImportError, AttributeError, TypeError):
        known = False
    if not known:
        _LOG.warning(
            "JAX %s does not allow to choose the address at which Gloo listens: it takes what this host's "
            "own name resolves to. Map that name to %s in /etc/hosts, or install jax==0.10.2.",
            jax.__version__, ip,
        )  # fmt: skip
        return False

    def make() -> Any:
        return make_client(make_gloo(distributed_client=state.client, hostname=ip))

    # As JAX registers its own.
    register_backend_factory("cpu", make, priority=0, fail_quietly=False)
    return True


def write_on_this_process() -> bool:
    """Let this process write its programs to JAX's compilation cache, where one is configured.

    JAX writes it on the first process alone, since on TPUs and GPUs all processes have the same entries. On
    CPUs each process has its own: without them a restarted process, or its replacement, compiles everything
    again while all others wait for it.

    Call it after `jax.distributed.initialize`. It replaces a private function of JAX. In a version of JAX
    where that function has other parameters it does nothing: the process then compiles more often.
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
