"""What `unisono migrate` says of programs."""

import json

import keras
import numpy as np
import pytest

from unisono import UnisonoError
from unisono.tf._gone import ARGUMENTS
from unisono.tf._migrate import as_json, as_text, examine, findings


def report(programs):
    found = examine(programs)
    return as_text(found), not any(program.errors for program in found)


def said(source):
    return [(f.line, f.name, f.is_error) for f in findings(source)]


def test_the_import_is_the_only_line_of_a_good_program():
    source = "import tensorflow as tf\ns = tf.distribute.MirroredStrategy()\nx = tf.keras.layers.Dense(1)\n"
    assert said(source) == [(1, "import tensorflow as tf", False)]
    assert "Write: from unisono import tf." in findings(source)[0].text


@pytest.mark.parametrize(
    ("line", "write"),
    [
        ("import tensorflow as tf", "from unisono import tf."),
        ("import tensorflow as T", "from unisono import tf as T."),
        ("import tensorflow.keras as k", "import unisono.tf.keras as k."),
        ("from tensorflow import keras", "from unisono.tf import keras."),
        (
            "from tensorflow.keras.layers import Dense as D, Conv2D",
            "from unisono.tf.keras.layers import Dense as D, Conv2D.",
        ),
    ],
)
def test_imports(line, write):
    (finding,) = findings(line)
    assert f"Write: {write}" in finding.text


@pytest.mark.parametrize(
    ("source", "name", "text"),
    [
        ("import tensorflow as t\nt.SparseTensor", "tf.SparseTensor", "dense arrays"),
        ("from tensorflow import keras\nkeras.layers.Dens(1)", "tf.keras.layers.Dens", "Did you mean"),
        ("from tensorflow.keras import layers as L\nL.Dens(1)", "tf.keras.layers.Dens", "Did you mean"),
        ("from tensorflow.keras.layers import Dens\n", "tf.keras.layers.Dens", "Did you mean"),
        ("import tensorflow.keras\ntensorflow.ragged.stack", "tf.ragged.stack", "padded_batch"),
        ("import tensorflow_hub as hub", "tensorflow_hub", "keras_hub"),
        (
            "def f():\n  import tensorflow as tf\n  return tf.sparse.add",
            "tf.sparse.add",
            "dense arrays",
        ),
    ],
)
def test_what_cannot_run_is_an_error(source, name, text):
    (error,) = [f for f in findings(source) if f.is_error]
    assert error.name == name
    assert text in error.text


def test_names_of_names_and_of_changed_programs():
    source = "import tensorflow as tf\nL = tf.keras.layers\nM = L.experimental\nL.Dens(1)\nM.nothing\n"
    errors = [(f.line, f.name) for f in findings(source) if f.is_error]
    assert errors == [(4, "tf.keras.layers.Dens"), (5, "tf.keras.layers.experimental.nothing")]
    assert said("from unisono import tf\ntf.SparseTensor\n") == [(2, "tf.SparseTensor", True)]
    assert said("from unisono.tf import keras as k\nk.Modle\n") == [(2, "tf.keras.Modle", True)]


def test_methods_and_libraries_that_are_gone():
    source = "import horovod.tensorflow as hvd\nmodel.fit_generator(data)\nmodel.fit(data)\n"
    assert said(source) == [(1, "horovod", True), (2, ".fit_generator", True)]


def test_tapes_run_in_eager_code():
    assert said("import tensorflow as tf\nwith tf.GradientTape() as t:\n  pass\n")[1:] == []


def test_names_of_other_modules_are_nothing():
    assert said("import numpy as np\nnp.SparseTensor\ntf.SparseTensor\nself.tf.ragged\n") == []


def test_names_of_plain_keras_are_those_of_keras_3():
    source = """
import keras
from keras.layers import Dense, CuDNNLSTM
from keras.wrappers.scikit_learn import KerasClassifier
keras.layers.Dens(1)
keras.preprocessing.image.ImageDataGenerator
keras.ops.add
"""
    assert [(f.line, f.name) for f in findings(source) if f.is_error] == [
        (3, "keras.layers.CuDNNLSTM"),
        (4, "keras.wrappers.scikit_learn.KerasClassifier"),
        (5, "keras.layers.Dens"),
        (6, "keras.preprocessing.image.ImageDataGenerator"),
    ]


def test_arguments_of_fit_that_are_gone_are_errors_here_and_there():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for name in ARGUMENTS:
        (found,) = findings(f"model.fit(x, y, {name}=1)")
        assert (found.name, found.is_error) == (f".fit({name}=)", True)
        with pytest.raises(TypeError, match=name):
            model.fit(np.ones((2, 2)), np.ones(2), **{name: 1})


def test_a_notebook_is_not_taken_for_a_program(tmp_path):
    notebook = tmp_path / "train.ipynb"
    notebook.write_text('{"cells": []}')
    with pytest.raises(UnisonoError, match="a notebook"):
        examine([notebook])


def test_a_program_without_tensorflow_is_not_said_to_run(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("import torch\n")
    assert report([program]) == (f"{program}: does not import TensorFlow; nothing was found to change.", True)


def test_a_report(tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("import tensorflow as tf\ntf.constant(1)\n")
    bad.write_text("import tensorflow as tf\ntf.SparseTensor(1)\ntf.ragged\n")
    text, can_run = report([good])
    assert can_run
    assert f"runs by `python -m unisono.tf {good}`" in text
    text, can_run = report([bad])
    assert not can_run
    assert f"{bad}:2: error: `tf.SparseTensor`" in text
    assert text.endswith("2 lines need a change. 0 of 2 names of TensorFlow and Keras run as they are.")
    good.write_text(
        "from tensorflow import keras\nimport tensorflow as tf\ntf.constant(1)\ntf.constant(2)\n"
        "keras.layers.Dense(1)\ntf.ragged\n"
    )
    text, _ = report([good])
    assert text.endswith("1 line needs a change. 3 of 4 names of TensorFlow and Keras run as they are.")


def test_programs_that_cannot_be_read(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import tensorflow as tf\nprint 'x'\n")
    with pytest.raises(UnisonoError, match=r"broken.py, line 2"):
        report([broken])
    with pytest.raises(UnisonoError, match="text file"):
        report([tmp_path / "none.py"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnisonoError, match=r"must hold programs. Received: .*empty"):
        report([tmp_path / "empty"])


def test_folders_of_programs_end_with_a_count(tmp_path):
    programs = {
        "one.py": "import tensorflow as tf\ntf.constant(1)\n",
        "below/two.py": "import tensorflow as tf\ntf.SparseTensor(1)\ntf.ragged\n",
        "below/old.py": "print 'x'\n",
        ".venv/hidden.py": "tf",
        "site-packages/installed.py": "tf",
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    text, can_run = report([tmp_path / "one.py", tmp_path / "below"])
    assert not can_run
    lines = text.splitlines()
    assert lines[-1] == (
        "3 programs: 1 run as far as their names tell, 2 need a change, in 3 lines. "
        "1 of 3 names of TensorFlow and Keras run as they are."
    )
    assert any("old.py: error: A program must be Python." in line for line in lines)
    text, can_run = report([tmp_path])
    assert text.splitlines()[-1] == lines[-1]
    text, can_run = report([tmp_path / "one.py"] * 2)
    assert can_run
    assert text.endswith(
        "2 programs: 2 run as far as their names tell, 0 need a change, in 0 lines. "
        "1 of 1 name of TensorFlow and Keras run as they are."
    )


def test_json_has_an_object_for_each_program(tmp_path):
    bad, old = tmp_path / "bad.py", tmp_path / "old.py"
    bad.write_text("import tensorflow as tf\ntf.SparseTensor(1)\n")
    old.write_text("print 'x'\n")
    first, second = json.loads(as_json(examine([tmp_path])))
    assert (first["file"], first["needs_change"], first["unreadable"]) == (str(bad), True, None)
    assert [(r["line"], r["name"], r["is_error"]) for r in first["remarks"]] == [
        (1, "import tensorflow as tf", False),
        (2, "tf.SparseTensor", True),
    ]
    assert (first["names"], first["names_that_run"]) == (1, 0)
    assert second["needs_change"]
    assert "line 1" in second["unreadable"]
