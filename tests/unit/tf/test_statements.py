"""Lines that fail for what an object is, and statements that TensorFlow's functions may have."""

import pytest

from unisono.tf._migrate import findings

HEAD = "import tensorflow as tf\n"
SIGNATURE = "@tf.function(input_signature=[tf.TensorSpec([{}], tf.uint8)])\ndef f(x):\n  return x\nm.f = f\n"
SAVE = "tf.saved_model.save(m, 'x')\n"

#: Programs, and the lines with an error.
PROGRAMS = {
    SIGNATURE.format("None, None, None") + SAVE: [6],
    SIGNATURE.format("None, 28, None") + SAVE: [],
    SIGNATURE.format("None, None, None"): [],
    "try:\n  tape.gradient(y, x)\nexcept LookupError:\n  pass\n": [4],
    "import tensorflow.experimental.numpy as tnp\nx[:, (True, False)]\nx[1, 2]\n": [3],
    "x[:, (True, False)]\n": [],
    "s = tf.compat.v1.train.Scaffold(saver=c)\nc.restore(p)\n": [3],
    "s = tf.compat.v1.train.Scaffold()\nc.restore(p)\n": [],
    "a = tf.train.Checkpoint(x=v)\nb = tf.train.Checkpoint(a=a)\nb.restore(p)\na.restore(p)\n": [4],
    "try:\n  table[3]\nexcept LookupError:\n  pass\n": [],
    "PS(resolver, variable_partitioner=p)\nlen(layer.weights)\nlen(names)\n": [3],
    "len(layer.weights)\n": [],
    "f.get_concrete_function(x=tf.TensorSpec((), dtype=tf.string))\n": [2],
    "f.get_concrete_function(tf.TensorSpec((), tf.float32))\n": [],
    "print(x.shape.as_list(), x.get_shape().as_list())\n": [2],
    "def f(x):\n  if tf.reduce_sum(x) > 0:\n    return x\ng = tf.function(f)\n": [],
    "def f(x):\n  if tf.reduce_sum(x) > 0:\n    return x\n": [],
}


@pytest.mark.parametrize(("program", "lines"), PROGRAMS.items())
def test_lines_with_errors(program, lines):
    assert [f.line for f in findings(HEAD + program) if f.is_error] == lines


#: Programs, and the remark on control flow: its line, its name, whether it is an error.
FLOW = {
    "from jax.experimental import jax2tf": (2, "jax.experimental.jax2tf", True),
    "@tf.function\ndef f(x):\n  if tf.reduce_sum(x) > 0:\n    pass": (4, "if", False),
    "@tf.function\ndef f(x):\n  y = 1 if tf.equal(x, 0) else 2": (4, "if", False),
    "@tf.function()\ndef f(x):\n  while tf.reduce_sum(x) > 1:\n    x = x / 2": (4, "while", False),
    "@tf.function\ndef f(n):\n  for i in tf.range(n):\n    pass": (4, "for … in tf.range", False),
    "@tf.function\ndef f(n):\n  for i in tf.range(3):\n    pass": None,
    "@tf.function\ndef f(x):\n  if tf.executing_eagerly():\n    pass": None,
    "@tf.function\ndef f(x, training):\n  if training:\n    pass": None,
    "def f(x):\n  if tf.reduce_sum(x) > 0:\n    pass": None,
}


@pytest.mark.parametrize(("program", "expected"), FLOW.items())
def test_control_flow_over_tensors(program, expected):
    found = [(f.line, f.name, f.is_error) for f in findings(f"{HEAD}{program}\n")[1:]]
    assert found == ([] if expected is None else [expected])
