"""JAX's compilation cache on processes that are not the first."""

import jax
import pytest
from jax._src import compilation_cache, compiler

from unisono.cluster._jax_internals import write_on_this_process


@pytest.fixture
def written(monkeypatch):
    """What is put into the cache."""
    entries = []
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)
    monkeypatch.setattr(compilation_cache, "put_executable_and_time", lambda *entry: entries.append(entry))
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1.0)
    yield entries
    jax.config.update(name, before)


@pytest.mark.parametrize(
    ("seconds", "callbacks", "is_written"), [(1.5, [], True), (0.5, [], False), (1.5, ["print"], False)]
)
def test_what_took_long_is_written(written, seconds, callbacks, is_written):
    assert write_on_this_process()
    # As JAX calls it.
    compiler._cache_write("key", seconds, "jit_f", "backend", "executable", callbacks)
    assert written == ([("key", "jit_f", "executable", "backend", 1)] if is_written else [])


def test_newer_versions_of_jax_say_nothing_of_callbacks(written, monkeypatch):
    def newer(cache_key, compile_time_secs, module_name, backend, executable):
        """As in JAX 0.12."""

    monkeypatch.setattr(compiler, "_cache_write", newer)
    assert write_on_this_process()
    compiler._cache_write("key", 2.0, "jit_f", "backend", "executable")
    assert written == [("key", "jit_f", "executable", "backend", 2)]


def test_a_full_disk_is_a_warning(written, monkeypatch):
    def full(*entry):
        raise OSError("No space left on device")

    monkeypatch.setattr(compilation_cache, "put_executable_and_time", full)
    assert write_on_this_process()
    with pytest.warns(UserWarning, match="could not be written for jit_f: No space left"):
        compiler._cache_write("key", 2.0, "jit_f", "backend", "executable", [])


def test_another_jax_is_left_alone(monkeypatch, caplog):
    def other(key, value):
        """Of a later version."""

    monkeypatch.setattr(compiler, "_cache_write", other)
    with caplog.at_level("INFO", "unisono"):
        assert not write_on_this_process()
    assert compiler._cache_write is other
    assert "Only the first process writes the compilation cache" in caplog.text
    monkeypatch.delattr(compiler, "_cache_write")
    assert not write_on_this_process()
