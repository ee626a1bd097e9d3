"""Modules whose names stand in a table, as `import` and programs see them."""

import functools
import importlib
import pickle
import subprocess
import sys

import jax.numpy as jnp
import keras
import pytest

from unisono import tf
from unisono.tf._entries import At, Missing, Operator, Value, object_at
from unisono.tf._module import NameFinder, NameTable


def test_names_are_what_the_table_says():
    import unisono

    assert tf.distribute.MirroredStrategy is unisono.MirroredStrategy
    assert tf.distribute.experimental.CentralStorageStrategy is unisono.experimental.CentralStorageStrategy
    assert tf.keras.layers.Dense is keras.layers.Dense
    assert tf.newaxis is None
    assert tf.__version__.startswith("2.")


def test_every_form_of_import_finds_the_same():
    from unisono.tf import keras as by_name
    from unisono.tf.keras import layers
    from unisono.tf.keras.layers import Dense

    module = importlib.import_module("unisono.tf.keras.layers")
    assert by_name.layers.Dense is layers.Dense is Dense is module.Dense is keras.layers.Dense
    assert tf.keras.layers is module
    assert "Dense" in dir(module)
    assert "MirroredStrategy" in dir(tf.distribute)


def test_numpy_of_tensorflow_takes_variables():
    tnp, variable = tf.experimental.numpy, tf.Variable([[1.0, 2.0]])
    assert tnp.matmul(variable, tnp.ones((2, 1))).tolist() == [[3.0]]
    assert tnp.concatenate([variable, variable]).shape == (2, 2)
    assert tnp.float32 is jnp.float32


def test_all_names_of_a_module():
    names = {}
    exec("from unisono.tf.keras.layers import *; from unisono.tf import *", names)
    assert names["Layer"] is keras.Layer
    assert names["Variable"] is tf.Variable
    assert "SparseTensor" not in names


@pytest.mark.parametrize(
    ("find", "said"),
    [
        (lambda: tf.distribute.MirorredStrategy, "Did you mean `tf.distribute.MirroredStrategy`"),
        (lambda: tf.keras.layers.Dens, "Did you mean `tf.keras.layers.Dense`"),
        (lambda: tf.reduce_men, "Did you mean `tf.reduce_mean`"),
        (lambda: tf.xqzw, "`tf.xqzw` is not among the names.*docs/migrating_names.md"),
        (lambda: tf.SparseTensor, "has no counterpart.* Write: dense arrays"),
        (lambda: tf.ragged.constant, "`tf.ragged` has no counterpart"),
    ],
)
def test_a_missing_name_says_what_to_write(find, said):
    with pytest.raises(AttributeError, match=said):
        find()


def test_a_missing_module_is_an_import_error():
    with pytest.raises(ImportError):
        importlib.import_module("unisono.tf.nothing")
    with pytest.raises(ImportError, match="cannot import name 'Dens'"):
        from unisono.tf.keras.layers import Dens  # noqa: F401


def test_operations_take_tensorflow_names_of_arguments():
    import jax.numpy as jnp

    call = Operator("jax.numpy.sum", {"input_tensor": "a", "keep_dims": "keepdims"}).load()
    assert call(input_tensor=jnp.ones((2, 3)), axis=1, keep_dims=True, name="total").shape == (2, 1)
    with_order = Operator("jax.numpy.argmax", order=("a", "axis"), defaults={"axis": 0}).load()
    assert with_order(jnp.eye(2)).tolist() == [0, 1]
    assert with_order(jnp.eye(2), 1).tolist() == [0, 1]


def test_an_object_is_found_by_its_path():
    assert object_at("keras.layers.Dense") is keras.layers.Dense
    assert object_at("math") is importlib.import_module("math")
    with pytest.raises(ModuleNotFoundError):
        object_at("no_such_package.thing")
    with pytest.raises(AttributeError):
        object_at("math.nothing")


def test_a_finder_serves_the_modules_of_its_table_alone():
    table = NameTable({"a.b": Value(1, "1"), "c": At("math.pi"), "d": Missing("is gone", "e")})
    finder = NameFinder("xroot", table, with_root=True)
    assert finder.find_spec("xroot") is not None
    assert finder.find_spec("xroot.a") is not None
    assert finder.find_spec("xroot.c") is None
    assert finder.find_spec("xroot.a.b.c") is None
    assert finder.find_spec("xrooted") is None
    assert NameFinder("xroot", table).find_spec("xroot") is None


def test_importing_starts_no_devices():
    """A program may make its virtual devices after the import."""
    code = (
        "from unisono import tf\n"
        "cpu, = tf.config.list_physical_devices('CPU')\n"
        "tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)\n"
        "assert len(tf.config.list_logical_devices('CPU')) == 3\n"
        "assert tf.distribute.MirroredStrategy().num_replicas_in_sync == 3\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_function_that_uses_tf_reaches_other_processes():
    module, below = pickle.loads(pickle.dumps((tf, tf.keras.layers)))
    assert module is tf
    assert below is tf.keras.layers


def test_versions_have_all_names():
    tf1 = importlib.import_module("unisono.tf.compat.v1")
    assert tf1.distribute.MirroredStrategy is tf.compat.v2.distribute.MirroredStrategy
    assert tf1.distribute.MirroredStrategy is tf.distribute.MirroredStrategy
    assert tf1.keras.layers.Dense is keras.layers.Dense
    assert "distribute" in dir(tf1)
    # After `import tensorflow.compat.v1 as tf` programs say `tf.compat.v1`, too.
    assert tf1.compat.v1.compat.v1.layers.dense is tf1.layers.dense
    assert tf1.compat.v1.data.get_output_shapes is tf1.data.get_output_shapes
    assert tf1.Dimension(3).value == 3
    with pytest.raises(AttributeError, match="belongs to graphs"):
        tf1.compat.v1.placeholder_with_default  # noqa: B018


def test_importing_a_name_without_a_counterpart_says_what_to_write():
    with pytest.raises(
        ImportError, match=r"`tf.experimental.dtensor` has no counterpart. Write: `jax.sharding`"
    ):
        exec("from unisono.tf.experimental import dtensor", {})
    with pytest.raises(ImportError, match=r"`tf.SparseTensor` has no counterpart"):
        exec("from unisono.tf import SparseTensor", {})


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("distirbute", "tf.distribute"),
        ("distribute.experimental.partitioners.MinSizePartitoner", "MinSizePartitioner"),
        ("compat.v1.distribute.MirroredStratgy", "tf.compat.v1.distribute.MirroredStrategy"),
        ("keras.layers.Dens", "tf.keras.layers.Dense"),
        ("data.AutoShardPolicy", "tf.data.experimental.AutoShardPolicy"),
        ("MirroredStrategy", "tf.distribute.MirroredStrategy"),
    ],
)
def test_misspelled_names_at_any_depth(path, meant):
    with pytest.raises(AttributeError, match=f"Did you mean .*{meant}`"):
        functools.reduce(getattr, path.split("."), tf)


def test_a_training_loop_costs_what_it_costs_by_our_own_names():
    """No wrapper is between: the same functions, hence the same traces and programs."""
    import unisono

    ours = {
        "GradientTape": unisono.GradientTape,
        "Variable": unisono.Variable,
        "distribute.MirroredStrategy": unisono.MirroredStrategy,
        "keras.optimizers.Adam": keras.optimizers.Adam,
        "keras.metrics.Mean": keras.metrics.Mean,
    }
    for name, value in ours.items():
        assert functools.reduce(getattr, name.split("."), tf) is value
