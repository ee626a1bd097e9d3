"""What programs of TensorFlow 1 begin with."""

import subprocess
import sys

import numpy as np

from unisono import tf

PROGRAM = """
import sys
from unisono import tf
flags = tf.app.flags
flags.DEFINE_integer("steps", 3, "How many.")

def main(rest):
    tf.compat.v1.enable_eager_execution()
    tf.logging.info("%d steps", flags.FLAGS.steps)
    tf.logging.debug("not shown")
    return len(rest)

if __name__ == "__main__":
    tf.logging.set_verbosity(tf.logging.INFO)
    tf.app.run(argv=sys.argv) if flags else tf.app.run(main)
"""


def test_flags_and_messages(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), "--steps=5", "x"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    # In absl's format, as TensorFlow's.
    assert done.stderr.splitlines()[-1].endswith("] 5 steps")


def test_strings_and_nests():
    assert (tf.compat.as_bytes("ü"), tf.compat.as_str(b"a"), tf.compat.as_str_any(3)) == (
        b"\xc3\xbc",
        "a",
        "3",
    )
    assert (tf.compat.as_text("a"), tf.compat.as_bytes(b"b"), tf.compat.as_str_any(b"c")) == ("a", b"b", "c")
    nest = {"a": [1, 2], "b": 3}
    assert tf.nest.flatten(nest) == [1, 2, 3]
    assert tf.nest.map_structure(lambda x, y: x + y, nest, nest) == {"a": [2, 4], "b": 6}
    assert tf.nest.pack_sequence_as(nest, [4, 5, 6]) == {"a": [4, 5], "b": 6}


def test_casts():
    assert tf.to_float(np.array([1, 2])).dtype == "float32"
    assert tf.to_int32(1.5) == 1
    assert abs(float(tf.log(1.0))) == 0.0
