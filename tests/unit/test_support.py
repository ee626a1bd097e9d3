import operator
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import count_compiles, count_host_reads

# The lambdas look names up when called, as programs do: the counter replaces these functions.
READS = [
    bool,
    complex,
    float,
    int,
    operator.index,
    repr,
    str,
    format,
    jax.device_get,
    np.from_dlpack,
    operator.methodcaller("block_until_ready"),
    operator.methodcaller("item"),
    operator.methodcaller("tolist"),
    operator.methodcaller("tobytes"),
    lambda x: np.asarray(x),
    lambda x: np.array(x),
    lambda x: jax.block_until_ready(x),
    lambda x: jax.block_until_ready({"a": x}),
]


def test_each_program_is_counted_once():
    @jax.jit
    def double(x):
        return 2 * x

    vector, matrix = jnp.ones(3), jnp.ones((3, 3))
    with count_compiles() as compiled:
        double(vector)
        double(vector)
        assert len(compiled) == 1
        double(matrix)
        assert len(compiled) == 2
    with count_compiles() as later:
        pass
    double(jnp.ones(5))
    assert (len(compiled), len(later)) == (2, 0)


@pytest.mark.parametrize("read", READS)
def test_each_read_is_counted_once(read):
    x = jnp.asarray(3) + 1
    with count_host_reads() as reads:
        read(x)
    assert len(reads) == 1
    read(x)
    assert len(reads) == 1


def test_work_on_the_device_is_not_a_read():
    x = jnp.arange(4.0)
    with count_host_reads() as reads:
        jax.jit(lambda x: (x + 1) @ x)(x)
        jnp.sum(x[1:])
        np.asarray([1.0, 2.0])
        pickle.dumps(np.ones(3))
    assert reads == []


def test_a_failed_read_leaves_nothing_behind():
    with pytest.raises(TypeError), count_host_reads() as reads:
        float(jnp.ones(3))
    assert reads == ["__float__"]
    with count_host_reads() as reads:
        float(jnp.ones(()))
    assert reads == ["__float__"]


def test_reads_of_other_threads_hold_nobody_up():
    x = jnp.ones(())
    with count_host_reads() as reads:
        other = threading.Thread(target=float, args=(x,))
        other.start()
        other.join()
        assert reads == []
        float(x)
    assert reads == ["__float__"]


def test_a_run_without_paths_passes_over_programs_for_type_checkers(request):
    ignored = request.config.hook.pytest_ignore_collect
    root = request.config.rootpath
    assert ignored(collection_path=root / "tests" / "typing", config=request.config)
    assert not ignored(collection_path=root / "tests" / "unit", config=request.config)
