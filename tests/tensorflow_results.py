"""What TensorFlow answers for the expressions of tests/unit/tf/operations.txt.

`python tests/tensorflow_results.py`, where TensorFlow is installed, writes the results beside them.
"""

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent / "unit" / "tf"
EXPRESSIONS = (HERE / "operations.txt").read_text().splitlines()
RESULTS = HERE / "tensorflow_results.json"


def values():
    """What the expressions are about, beside `tf`."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(3, 4)).astype("float32")
    return {
        "A": a,
        "B": rng.normal(size=(3, 4)).astype("float32"),
        "P": np.abs(a) + np.float32(0.1),
        "I": np.array([[1, 0], [2, 1]], "int32"),
        "L": np.array([0, 3, 1], "int32"),
        "img": rng.integers(0, 255, size=(1, 4, 6, 3)).astype("float32"),
        "rng0": lambda *shape: np.random.default_rng(1).normal(size=shape).astype("float32"),
        "np": np,
    }


def leaves(value):
    """The arrays of a result, which may be a list."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def evaluate(expression, tf):
    """The arrays of an expression."""
    return [np.asarray(leaf) for leaf in leaves(eval(expression, {**values(), "tf": tf}))]


def main():
    import tensorflow as tf

    results = {
        e: [{"shape": a.shape, "kind": a.dtype.kind, "data": a.ravel().tolist()} for a in evaluate(e, tf)]
        for e in EXPRESSIONS
    }
    lines = [f"{json.dumps(e)}: {_short(r)}" for e, r in results.items()]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _short(result):
    """JSON with seven digits."""
    rounded = [
        {**part, "data": [float(f"{x:.7g}") if part["kind"] == "f" else x for x in part["data"]]}
        for part in result
    ]
    return json.dumps(rounded)


if __name__ == "__main__":
    main()
