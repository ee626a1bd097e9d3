"""A model trained on replicas leaves the library and predicts the same numbers elsewhere."""

import contextlib
import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training._digits import digits, mirrored
from unisono import export
from unisono.training._binding import strategy_of

L = keras.layers
TWO = ["cpu:0", "cpu:1"]


def mlp():
    return keras.Sequential([keras.Input((64,)), L.Dense(16, activation="relu"), L.Dense(10)])


def normalized():
    """Every kind of state, and compiled fast: for what is repeated for each strategy."""
    return keras.Sequential([keras.Input((64,)), L.BatchNormalization(), L.Dense(10)])


def cnn(pooling=L.MaxPooling2D):
    return keras.Sequential(
        [
            keras.Input((64,)),
            L.Reshape((8, 8, 1)),
            L.Conv2D(8, 3, activation="relu"),
            L.BatchNormalization(),
            pooling(2),
            L.Dropout(0.5),
            L.Flatten(),
            L.Dense(10),
        ]
    )


def two_heads():
    image, extra = keras.Input((64,), name="image"), keras.Input((4,), dtype="int32", name="extra")
    hidden = L.Dense(16, activation="relu")(image)
    hidden = L.Concatenate()([hidden, L.Flatten()(L.Embedding(9, 3)(extra))])
    outputs = {"digit": L.Dense(10)(hidden), "parity": L.Dense(1, activation="sigmoid")(hidden)}
    return keras.Model({"image": image, "extra": extra}, outputs)


def inputs_of(name, rows):
    x = digits()[0][:rows]
    return {"image": x, "extra": np.arange(4 * rows).reshape(rows, 4) % 9} if name == "two_heads" else x


def targets_of(rows):
    return digits()[1][:rows]


MODELS = {"mlp": mlp, "cnn": cnn, "two_heads": two_heads}
#: onnxruntime refuses what jax2onnx 0.17 makes of Keras' `MaxPooling2D`.
MAKERS = MODELS | {"normalized": normalized, "averaged": lambda: cnn(L.AveragePooling2D)}
STRATEGIES = {
    "mirrored": lambda: unisono.MirroredStrategy(TWO),
    "central": lambda: unisono.CentralStorageStrategy(TWO),
    "pinned_host": lambda: unisono.CentralStorageStrategy(TWO, parameter_device="host"),
    "one_device": lambda: unisono.OneDeviceStrategy("cpu:1"),
    "plain": None,
}


def train(name, strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = MAKERS[name]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Momentum: a slot for each weight, and half of Adam's time to compile.
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=loss, metrics=["accuracy"])
    if name != "two_heads":  # which is here for what it takes and gives
        model.fit(inputs_of(name, 200), targets_of(200), batch_size=50, verbose=0)
    return model


@functools.cache
def trained(name, strategy="mirrored"):
    """Shared by all tests: not to be trained on."""
    return train(name, STRATEGIES[strategy] and STRATEGIES[strategy]())


@pytest.fixture(scope="module", params=MODELS)
def served(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "model"
    export.export(trained(request.param), path)
    return request.param, export.load(path), path


def assert_close(found, expected, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), found, expected)


def run_python(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- StableHLO -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 32])
def test_any_batch_size_predicts_the_same(served, rows):
    name, loaded, _ = served
    x = inputs_of(name, rows)
    expected = trained(name).predict(x, verbose=0)
    assert_close(loaded(x), expected)
    assert_close(loaded(jax.tree.map(jax.numpy.asarray, x)), expected)
    assert_close(jax.jit(loaded)(x), expected)


def test_specs(served):
    name, loaded, _ = served
    assert loaded.platforms == ("cpu", "cuda", "tpu", "rocm")
    assert loaded.name == trained(name).name
    assert loaded.versions["keras"] == keras.__version__
    assert loaded.name in repr(loaded)
    if name == "two_heads":
        assert loaded.input_spec == {
            "image": export.ArraySpec(("batch", 64), "float32", "image"),
            "extra": export.ArraySpec(("batch", 4), "int32", "extra"),
        }
        assert {k: v.shape for k, v in loaded.output_spec.items()} == {
            "digit": ("batch", 10),
            "parity": ("batch", 1),
        }
    else:
        assert loaded.input_spec.shape == ("batch", 64)
        assert loaded.output_spec == export.ArraySpec(("batch", 10), "float32")


def test_loads_and_predicts_without_keras(served):
    name, _, path = served
    x = inputs_of(name, 5)
    np.savez(path.parent / "in.npz", **(x if isinstance(x, dict) else {"x": x}))
    code = """
import sys, numpy as np
import unisono
folder = sys.argv[1]
served = unisono.export.load(folder + '/model')
x = dict(np.load(folder + '/in.npz'))
y = served(x.get('x', x))
np.savez(folder + '/out.npz', **(y if isinstance(y, dict) else {'y': y}))
assert not {m for m in sys.modules if m.split('.')[0] in ('keras', 'tensorflow', 'torch')}
"""
    run_python(code, path.parent)
    expected = trained(name).predict(x, verbose=0)
    with np.load(path.parent / "out.npz") as out:
        assert_close(dict(out), expected if isinstance(expected, dict) else {"y": expected})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("inside", [False, True])
def test_every_strategy(tmp_path, strategy, inside):
    model = trained("normalized", strategy)
    made = strategy_of(model)
    with made.scope() if made is not None and inside else contextlib.nullcontext():
        export.export(model, tmp_path / "model.stablehlo")
    x = inputs_of("normalized", 9)
    assert_close(export.load(tmp_path / "model.stablehlo")(x), model.predict(x, verbose=0))


def test_an_export_changes_nothing(tmp_path):
    model = trained("normalized")
    before = [np.array(v.value) for v in model.variables]
    shardings = [v.value.sharding for v in model.variables]
    export.export(model, tmp_path / "model")
    for variable, value, sharding in zip(model.variables, before, shardings, strict=True):
        np.testing.assert_array_equal(variable.value, value)
        assert variable.value.sharding == sharding


def test_the_same_model_gives_the_same_files(tmp_path):
    for folder in ("a", "b"):
        export.export(trained("normalized"), tmp_path / folder)
    for file in ("serve.stablehlo", "weights.npz", "manifest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_an_artefact_is_replaced(tmp_path):
    export.export(trained("mlp"), tmp_path / "model")
    export.export(trained("cnn"), tmp_path / "model")
    x = inputs_of("cnn", 3)
    assert_close(export.load(tmp_path / "model")(x), trained("cnn").predict(x, verbose=0))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_in_a_callback(tmp_path):
    """While `fit` runs, the state is the training loop's: its newest values are written."""
    paths = []

    def write(epoch, logs):
        paths.append(export.export(model, tmp_path / f"epoch{epoch}"))

    model = train("mlp", mirrored(2))
    callback = keras.callbacks.LambdaCallback(on_epoch_end=write)
    x, y = inputs_of("mlp", 100), targets_of(100)
    model.fit(x, y, batch_size=50, epochs=2, verbose=0, callbacks=[callback])
    first, second = (export.load(path)(x) for path in paths)
    assert np.abs(first - second).max() > 1e-4
    assert_close(second, model.predict(x, verbose=0))


def test_half_precision(tmp_path):
    """NumPy's files know bfloat16 as bytes alone."""
    keras.utils.set_random_seed(0)
    with mirrored(2).scope():
        model = keras.Sequential(
            [keras.Input((64,)), L.Dense(8, dtype="bfloat16"), L.Dense(3, dtype="mixed_bfloat16")]
        )
    export.export(model, tmp_path / "model")
    loaded = export.load(tmp_path / "model")
    x = inputs_of("mlp", 6)
    assert loaded.output_spec.dtype == "bfloat16"
    np.testing.assert_array_equal(np.float32(loaded(x)), np.float32(model(x)))


def test_lists_of_outputs_and_open_lengths(tmp_path):
    tokens, mask = keras.Input((None,), dtype="int32"), keras.Input((None, 1))
    hidden = L.Embedding(20, 4)(tokens)
    model = keras.Model([tokens, mask], [L.GlobalAveragePooling1D()(hidden), L.Dense(2)(mask)])
    export.export(model, tmp_path / "model")
    loaded = export.load(tmp_path / "model")
    assert [s.shape for s in loaded.input_spec] == [("batch", "size0_1"), ("batch", "size1_1", 1)]
    x = [np.arange(15).reshape(3, 5), np.ones((3, 2, 1))]
    assert_close(list(loaded(x)), list(model(x)))


def test_sizes_that_are_equal_have_one_name(tmp_path):
    tokens, mask = keras.Input((None,)), keras.Input((None,))
    model = keras.Model((tokens, mask), tokens * mask)
    spec = export.ArraySpec((None, "length"), "float32")
    export.export(model, tmp_path / "model", input_spec=(spec, spec))
    loaded = export.load(tmp_path / "model")
    x = np.ones((2, 3), "float32")
    assert_close(loaded((x, x)), model((x, x)))
    with pytest.raises(unisono.InvalidArgumentError, match=r"'length': 3.*Received: shape=\(2, 4\)"):
        loaded((x, np.ones((2, 4))))


class Rows(keras.Model):
    """A model that needs to know the number of rows, and has no `training` argument."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(3)

    def call(self, inputs):
        return self.dense(keras.ops.stack([inputs[i] for i in range(inputs.shape[0])]))


def test_a_layer_that_needs_the_batch_size(tmp_path):
    with mirrored(2).scope():
        model = Rows()
    x = inputs_of("mlp", 4)
    model(x)
    with pytest.raises(unisono.InvalidArgumentError, match="batch_size=32"):
        export.export(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    export.export(model, tmp_path / "model", batch_size=4)
    loaded = export.load(tmp_path / "model")
    assert_close(loaded(x), model(x))
    with pytest.raises(unisono.InvalidArgumentError, match=r"\(4, 64\).*Received: shape=\(5, 64\)"):
        loaded(inputs_of("mlp", 5))


class Broken(keras.Model):
    def call(self, inputs):
        raise ZeroDivisionError("the model's own")


def test_a_models_own_error_stays_its_own(tmp_path):
    model = Broken()
    model.built = True
    spec = export.ArraySpec((None, 3), "float32")
    with pytest.raises(ZeroDivisionError, match="the model's own"):
        export.export(model, tmp_path / "model", input_spec=spec)
    with pytest.raises(unisono.InvalidArgumentError, match="must define the shape of its argument"):
        export.export(model, tmp_path / "model")
    with pytest.raises(unisono.InvalidTypeError, match=r"Received: 3\. Write `unisono.export.ArraySpec"):
        export.export(model, tmp_path / "model", input_spec=3)


class OnlyOnCpu(keras.layers.Layer):
    def call(self, inputs):
        return jax.lax.platform_dependent(inputs, cpu=lambda x: x + 1)


def test_a_platform_that_a_layer_does_not_know(tmp_path):
    model = keras.Sequential([keras.Input((2,)), OnlyOnCpu()])
    with pytest.raises(unisono.InvalidArgumentError, match=r"Write `export\(\.\.\., platforms=\('cpu',\)\)`"):
        export.export(model, tmp_path / "model", platforms=("cpu", "tpu"))
    export.export(model, tmp_path / "model", platforms=("cpu",))
    loaded = export.load(tmp_path / "model")
    assert loaded.platforms == ("cpu",)
    assert_close(loaded(np.zeros((3, 2))), np.ones((3, 2), "float32"))


def test_an_artefact_of_another_platform_says_so(tmp_path):
    export.export(trained("mlp"), tmp_path / "model", platforms=("tpu",))
    with pytest.raises(ValueError, match="tpu"):
        export.load(tmp_path / "model")(inputs_of("mlp", 2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"image": np.zeros((2, 64))}, r"must be a dict with the keys \['extra', 'image'\]"),
        (
            {"image": np.zeros((2, 63)), "extra": np.zeros((2, 4), int)},
            r"`inputs\['image'\]` must have the shape",
        ),
        ({"image": np.zeros((2, 64)), "extra": np.zeros((3, 4), int)}, "'batch': "),
        (
            {"image": np.zeros((2, 64)), "extra": np.zeros((2, 4))},
            r"`inputs\['extra'\]` must be of type int32",
        ),
        ({"image": np.full((2, 64), "a"), "extra": np.zeros((2, 4), int)}, "Received: dtype=<U1"),
    ],
)
def test_inputs_that_do_not_fit(tmp_path, value, message):
    export.export(trained("two_heads"), tmp_path / "model")
    with pytest.raises(unisono.InvalidArgumentError, match=message):
        export.load(tmp_path / "model")(value)


@pytest.mark.parametrize("file", ["serve.stablehlo", "weights.npz", "manifest.json"])
def test_damage_is_found_in_each_file(tmp_path, file):
    export.export(trained("mlp"), tmp_path / "model")
    place = tmp_path / "model" / file
    original = place.read_bytes()
    middle = len(original) // 2
    flipped = original[:middle] + bytes([original[middle] ^ 64]) + original[middle + 1 :]
    for content in (flipped, original[:-1] if file != "manifest.json" else original[:middle], None):
        place.unlink() if content is None else place.write_bytes(content)
        with pytest.raises(unisono.InvalidArgumentError, match=file):
            export.load(tmp_path / "model")


def test_a_file_that_this_jax_cannot_read(tmp_path):
    """Whole by its checksum, and yet of no format that JAX knows."""
    from unisono._export._files import describe_files, seal
    from unisono._export._loaded import FUNCTION, KIND, WEIGHTS

    export.export(trained("mlp"), tmp_path / "model")
    folder = tmp_path / "model"
    (folder / FUNCTION).write_bytes(b"of the future")
    body = json.loads((folder / "manifest.json").read_text())["body"]
    body["files"] = describe_files(folder, [FUNCTION, WEIGHTS])
    (folder / "manifest.json").write_text(seal(KIND, 1, body))
    with pytest.raises(
        unisono.InvalidArgumentError, match=f"JAX must be able to read.*Received: jax {jax.__version__}"
    ):
        export.load(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"platforms": ("gpu",)}, r"`platforms` must be a subset of .*Received: platforms=\('gpu',\)"),
        ({"platforms": ()}, "`platforms` must be a subset of"),
        ({"batch_size": 0}, "Received: batch_size=0"),
        ({"input_spec": export.ArraySpec(("a b", 64), "float32")}, "Received: 'a b'"),
        ({"format": "keras", "batch_size": 3}, r"must end in '\.keras'"),
    ],
)
def test_arguments(tmp_path, arguments, message):
    with pytest.raises(unisono.InvalidArgumentError, match=message):
        export.export(trained("mlp"), tmp_path / "model", **arguments)
    assert not list(tmp_path.iterdir())


def test_what_is_no_model_or_not_built(tmp_path):
    with pytest.raises(unisono.InvalidTypeError, match=r"must be a `keras.Model`"):
        export.export(L.Dense(3), tmp_path / "model")
    with pytest.raises(unisono.InvalidArgumentError, match="must be built"):
        export.export(keras.Sequential([L.Dense(3)]), tmp_path / "model")
    with pytest.raises(unisono.InvalidArgumentError, match="`batch_size` belongs to the format 'stablehlo'"):
        export.export(trained("mlp"), tmp_path / "model.keras", batch_size=3)


# --- .keras ----------------------------------------------------------------------------------


def test_keras_files_in_a_fresh_process(tmp_path):
    models = {"mirrored": trained("cnn"), "pinned_host": trained("normalized", "pinned_host")}
    x, y = inputs_of("cnn", 64), targets_of(64)
    for name, model in models.items():
        export.export(model, tmp_path / f"{name}.keras")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    code = """
import os, sys; os.environ['KERAS_BACKEND'] = 'jax'
import json, keras, numpy as np
folder, names = sys.argv[1], sys.argv[2:]
data = np.load(folder + '/data.npz')
for name in names:
    model = keras.saving.load_model(f'{folder}/{name}.keras')
    np.save(f'{folder}/{name}.npy', model.predict(data['x'], verbose=0))
    print(json.dumps(model.evaluate(data['x'], data['y'], verbose=0)))
assert 'unisono' not in sys.modules
"""
    printed = run_python(code, tmp_path, *models).splitlines()
    for (name, model), line in zip(models.items(), printed, strict=True):
        assert_close(np.load(tmp_path / f"{name}.npy"), model.predict(x, verbose=0))
        assert_close(json.loads(line), model.evaluate(x, y, verbose=0))


@pytest.mark.parametrize(
    ("first", "second"), [*(("mirrored", second) for second in STRATEGIES), ("plain", "mirrored")]
)
def test_keras_file_under_another_strategy(tmp_path, first, second):
    """It predicts, evaluates and trains on as in the first place."""
    model = trained("normalized", first)
    x, y = inputs_of("normalized", 80), targets_of(80)
    export.export(model, tmp_path / "model.keras")
    other = STRATEGIES[second] and STRATEGIES[second]()
    with other.scope() if other is not None else contextlib.nullcontext():
        again = keras.saving.load_model(tmp_path / "model.keras")
    # One size of batches: one program.
    found, expected = (m.evaluate(x, y, batch_size=40, verbose=0) for m in (again, model))
    assert_close(found, expected)
    assert_close(again.predict(x, batch_size=40, verbose=0), model.predict(x, batch_size=40, verbose=0))
    assert int(again.optimizer.iterations) == int(model.optimizer.iterations) == 4
    again.fit(x, y, batch_size=40, verbose=0)
    assert int(again.optimizer.iterations) == 6


# --- the names of TensorFlow 2.0's tutorial -----------------------------------------------------


@pytest.mark.parametrize("name", ["export_saved_model", "load_from_saved_model"])
def test_both_homes_of_the_old_names(name):
    assert getattr(unisono.experimental, name) is getattr(export, name)


def test_the_tutorial(tmp_path):
    """https://www.tensorflow.org/tutorials/distribute/keras, the version of TensorFlow 2.0."""
    model = trained("cnn")
    x, y = inputs_of("cnn", 96), targets_of(96)
    eval_loss, eval_acc = model.evaluate(x, y, verbose=0)
    path = str(tmp_path / "saved_model") + "/"

    export.export_saved_model(model, path)
    options = {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "optimizer": "sgd",
        "metrics": ["accuracy"],
    }
    unreplicated_model = export.load_from_saved_model(path)
    assert_close(unreplicated_model.evaluate(x, y, verbose=0), [eval_loss, eval_acc])
    unreplicated_model.compile(**options)
    assert_close(unreplicated_model.evaluate(x, y, verbose=0), [eval_loss, eval_acc])
    with unisono.MirroredStrategy(["cpu:2", "cpu:3", "cpu:4"]).scope():
        replicated_model = export.load_from_saved_model(path)
        replicated_model.compile(**options)
        assert_close(replicated_model.evaluate(x, y, verbose=0), [eval_loss, eval_acc])
    assert_close(replicated_model.predict(x, verbose=0), model.predict(x, verbose=0))


def test_a_loss_of_the_users_own_is_not_needed(tmp_path, caplog):
    def own_loss(y_true, y_pred):
        return keras.ops.mean(y_pred, axis=-1)

    model = mlp()
    model.compile("sgd", loss=own_loss)
    export.export_saved_model(model, tmp_path / "model")
    again = export.load_from_saved_model(tmp_path / "model")
    assert not again.compiled
    assert "without its `compile`" in caplog.text
    x = inputs_of("mlp", 3)
    assert_close(again.predict(x, verbose=0), model.predict(x, verbose=0))
    found = export.load_from_saved_model(tmp_path / "model", custom_objects={"own_loss": own_loss})
    assert found.compiled


@pytest.mark.parametrize("file", ["model.keras", "manifest.json"])
def test_a_damaged_saved_model(tmp_path, file):
    export.export_saved_model(trained("mlp"), tmp_path / "model")
    place = tmp_path / "model" / file
    place.write_bytes(place.read_bytes()[:-20])
    with pytest.raises(unisono.InvalidArgumentError, match=file):
        export.load_from_saved_model(tmp_path / "model")


def test_each_reader_names_the_other(tmp_path):
    export.export_saved_model(trained("mlp"), tmp_path / "old")
    with pytest.raises(unisono.InvalidArgumentError, match="load_from_saved_model` those"):
        export.load(tmp_path / "old")
    export.export(trained("mlp"), tmp_path / "model.keras")
    with pytest.raises(unisono.InvalidArgumentError, match=r"keras\.saving\.load_model"):
        export.load(tmp_path / "model.keras")


# --- formats that need other packages -----------------------------------------------------------


def needs(extra, *packages):
    absent = [p for p in packages if importlib.util.find_spec(p) is None]
    return pytest.mark.skipif(bool(absent), reason=f"needs {absent}: pip install 'unisono[{extra}]'")


@pytest.mark.parametrize(
    ("kind", "extra", "package"),
    [
        ("saved_model", "saved-model", "tensorflow"),
        ("onnx", "onnx", "jax2onnx"),
        ("stablehlo", "export", "flatbuffers"),
    ],
)
def test_a_missing_package(tmp_path, monkeypatch, kind, extra, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    line = rf"`{package}`.*pip install 'unisono\[{extra}\]'"
    with pytest.raises(export.MissingPackageError, match=line):
        export.export(trained("mlp"), tmp_path / "model", kind)
    assert not list(tmp_path.iterdir())


@needs("saved-model", "tensorflow")
@pytest.mark.parametrize("strategy", ["mirrored", "pinned_host", "plain"])
def test_saved_model(tmp_path, strategy):
    """In a process of its own: TensorFlow changes the environment that it is imported in."""
    code = """
import sys; from pathlib import Path
import unisono, tensorflow as tf
from tests.virtual.test_export import assert_close, export, inputs_of, trained
path, model = sys.argv[1] + '/model', trained('cnn', sys.argv[2])
export.export(model, path, 'saved_model')
loaded = tf.saved_model.load(path)
for rows in (1, 7):
    x = inputs_of('cnn', rows)
    assert_close(loaded.serve(x).numpy(), model.predict(x, verbose=0), rtol=1e-4)
assert [p.name for p in Path(path).parent.iterdir()] == ['model']
"""
    run_python(code, tmp_path, strategy)


@needs("onnx", "jax2onnx", "onnx", "onnxruntime")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["mirrored", "pinned_host", "plain"])
@pytest.mark.parametrize("name", ["averaged", "two_heads"])
def test_onnx(tmp_path, strategy, name):
    import onnxruntime

    model = trained(name, strategy)
    export.export(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    for rows in (1, 7):
        x = inputs_of(name, rows)
        fed = zip(session.get_inputs(), jax.tree.leaves(x), strict=True)
        found = session.run(None, {i.name: a.astype("i4") if a.dtype == "i8" else a for i, a in fed})
        assert_close(found, jax.tree.leaves(model.predict(x, verbose=0)), rtol=1e-4)


@needs("onnx", "jax2onnx", "onnx", "onnxruntime")
@pytest.mark.filterwarnings("ignore")
def test_onnx_of_a_model_that_was_never_called(tmp_path):
    export.export(keras.Sequential([keras.Input((3,)), L.Dense(2)]), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").is_file()


@needs("onnx", "jax2onnx", "onnx", "onnxruntime")
def test_an_onnx_file_that_does_not_run(tmp_path):
    from unisono._export._through_keras import try_onnx

    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(
        unisono.InvalidArgumentError, match=r"must run in onnxruntime. Received: a file for 'net'"
    ):
        try_onnx(tmp_path / "model.onnx", [np.zeros((2, 3))], "net")
