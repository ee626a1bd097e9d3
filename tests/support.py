"""The devices of tests, and what tests count: compilations and reads of device arrays by the host."""

import contextlib
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

#: Seconds for anything that a test waits for and that happens soon, unless the machine is busy.
LIMIT = 240.0

#: On whose devices the contract and the comparisons with one device run. `make gpu` says `gpu`.
PLATFORM = os.environ.get("UNISONO_TEST_PLATFORM", "cpu")


def devices(count):
    """The names of the first devices; skips the test where there are fewer."""
    if PLATFORM != "cpu" and (there := jax.local_device_count(PLATFORM)) < count:
        pytest.skip(f"needs {count} devices of the platform {PLATFORM}. Received: {there}")
    return [f"{PLATFORM}:{i}" for i in range(count)]


_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

#: Methods of a device array that wait for its value.
_READS = (
    "__array__",
    "__bool__",
    "__complex__",
    "__dlpack__",
    "__float__",
    "__format__",
    "__index__",
    "__int__",
    "__repr__",
    "__str__",
    "block_until_ready",
    "item",
    "tobytes",
    "tolist",
)
#: Functions that wait too. NumPy reads arrays in CPU memory through the buffer protocol, of which
#: no method of the array hears, and JAX waits for a pytree in one call.
_FUNCTIONS = ((np, "array"), (np, "asarray"), (jax, "block_until_ready"))


@contextlib.contextmanager
def count_compiles():
    """Yield a list that grows by one entry for each program that XLA compiles."""
    compiled = []

    def listen(event, duration, **_):
        if event == _COMPILE_EVENT:
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def count_host_reads():
    """Yield a list that grows by the name of each call that makes the host wait for a device array.

    Only calls of the thread that opened the counter count, and of a call within a call only the
    outer one. Not seen: NumPy's functions that take a device array as it is (`np.sum(x)`) and
    `memoryview(x)`, which are all C.
    """
    reads = []
    inside = threading.local()
    # Keras reads the logs of a step in a thread of its own, which holds nobody up.
    reader = threading.current_thread()

    def counting(name, original):
        # No functools.wraps: the methods written in C++ have no name to copy.
        def counted(*args, **kwargs):
            outermost = not getattr(inside, "reading", False) and threading.current_thread() is reader
            if outermost and any(isinstance(a, jax.Array) for a in jax.tree.leaves(args)):
                reads.append(name)
            inside.reading = True
            try:
                return original(*args, **kwargs)
            finally:
                inside.reading = not outermost

        return counted

    array_class = type(jnp.zeros(()))
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [*((array_class, name) for name in _READS), *_FUNCTIONS]:
            patch.setattr(owner, name, counting(name, getattr(owner, name)))
        yield reads
