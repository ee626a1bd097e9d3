"""`python -m unisono.tf` runs programs that import TensorFlow."""

import subprocess
import sys

from tests import forked

PROGRAM = """
import sys
import tensorflow as tf
import tensorflow.keras.backend as K
from tensorflow import keras
from tensorflow.keras.layers import Dense
import helper

if __name__ == "__main__":
    print(sys.argv[1:], helper.VALUE, __file__.endswith("program.py"))
    print(tf.reduce_sum([1.0, 2.0]).numpy(), Dense is keras.layers.Dense, K.get_value(2.0))
    # Keras and TensorBoard see no TensorFlow: they would use it.
    tf.random.set_seed(1)
    model = keras.Sequential([keras.Input((2,)), Dense(1)])
    model.compile("sgd", "mse")
    # The first name of Unisono's own, without a strategy.
    model.fit(
        tf.ones((4, 2)), tf.ones(4), steps_per_epoch=2, verbose=0,
        callbacks=[tf.keras.callbacks.BackupAndRestore("backup")],
    )
    model.save("model.keras")
    from tensorboard.compat import tf as stub
    print(keras.models.load_model("model.keras").input_shape, stub.__version__)
"""


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "unisono.tf", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def test_a_program_runs_as_python_runs_it(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("import tensorflow\nVALUE = tensorflow.constant(4).numpy()\n")
    ways = (
        run(str(tmp_path / "program.py"), "--epochs", "3", cwd=tmp_path),
        forked.run(["-m", "unisono.tf", "-m", "program", "--epochs", "3"], tmp_path),
    )
    for done in ways:
        assert done.returncode == 0, done.stderr
        assert done.stdout == "['--epochs', '3'] 4 True\n3.0 True 2.0\n(None, 2) stub\n"


def test_the_exit_code_is_the_programs_and_a_missing_file_is_named(tmp_path):
    (tmp_path / "program.py").write_text("import sys, tensorflow\nsys.exit(7)\n")
    code = (
        "import sys, subprocess\n"
        "from unisono.tf._run import main\n"
        "for arguments in (['program.py'], ['none.py'], []):\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit as end:\n"
        "        print('exit', end.code)\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
        "    sys.modules.pop('tensorflow', None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "exit 7", done.stderr
    assert lines[1].startswith("InvalidArgumentError")
    assert "none.py" in lines[1]
    assert lines[-1] == "exit 2"
