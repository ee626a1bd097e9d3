"""What tests count: compilations and reads of device arrays by the host."""

import contextlib
import functools

import jax
import jax.numpy as jnp

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


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
def count_host_reads(monkeypatch):
    """Yield a list that grows by one entry for each conversion of a device array to host values."""
    reads = []
    array_class = type(jnp.zeros(()))
    for name in ("__array__", "__float__", "__int__", "__bool__", "item", "tolist", "block_until_ready"):
        original = getattr(array_class, name)

        @functools.wraps(original)
        def counted(self, *args, _original=original, _name=name, **kwargs):
            reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(array_class, name, counted)
    yield reads
    monkeypatch.undo()
