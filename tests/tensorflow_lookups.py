"""What Keras' lookup and hashing layers answer with TensorFlow, for tests/unit/preprocessing.

`python tests/tensorflow_lookups.py`, where TensorFlow is installed, writes the results.
"""

import json
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "unit" / "preprocessing" / "tensorflow_lookups.json"

WORDS = ["a", "bb", "wolf", "ü", "", "a longer text of 32 bytes or more", "x" * 70, "y" * 300, "bb"]
ROWS = [["a", "zz"], ["bb", "a"], ["", "q"]]
NUMBERS = [0, 1, -1, 7, 123456789, 2**40]
VOCABULARY = ["a", "bb", "wolf"]

#: `layers` and the names above.
CALLS = [
    "layers.Hashing(1000)(WORDS)",
    "layers.Hashing(7)(ROWS)",
    "layers.Hashing(10, mask_value='')(ROWS)",
    "layers.Hashing(10)(np.array(NUMBERS))",
    "layers.Hashing(10)(np.array([[1.5, -2.5]], 'float32'))",
    "layers.Hashing(5, output_mode='one_hot')(ROWS)",
    "layers.Hashing(5, output_mode='one_hot')(np.array([[1], [2]]))",
    "layers.Hashing(5, output_mode='multi_hot')(ROWS)",
    "layers.Hashing(5, output_mode='count')(ROWS)",
    "layers.HashedCrossing(1000)((np.array(WORDS), np.arange(9)))",
    "layers.HashedCrossing(1000)((np.array(WORDS)[:, None], np.array(WORDS)[::-1, None]))",
    "layers.HashedCrossing(7, output_mode='one_hot')((np.arange(3), np.arange(3)))",
    "layers.HashedCrossing(50)((np.array(['a', 'b']), np.array([1, 2]), np.array(['c', 'd'])))",
    "layers.StringLookup(vocabulary=VOCABULARY)(ROWS)",
    "layers.StringLookup(vocabulary=VOCABULARY)('bb')",
    "layers.StringLookup(vocabulary=VOCABULARY, mask_token='')(ROWS)",
    "layers.StringLookup(vocabulary=VOCABULARY, num_oov_indices=3)(ROWS)",
    "layers.StringLookup(vocabulary=VOCABULARY, num_oov_indices=3, mask_token='')(WORDS)",
    "layers.StringLookup(vocabulary=VOCABULARY, num_oov_indices=0)(VOCABULARY)",
    "layers.StringLookup(vocabulary=VOCABULARY, output_mode='one_hot')(VOCABULARY)",
    "layers.StringLookup(vocabulary=VOCABULARY, output_mode='multi_hot')(ROWS)",
    "layers.StringLookup(vocabulary=VOCABULARY, output_mode='multi_hot', mask_token='')(ROWS)",
    "layers.StringLookup(vocabulary=VOCABULARY, output_mode='count')(ROWS)",
    "layers.StringLookup(6, vocabulary=VOCABULARY, output_mode='count', pad_to_max_tokens=True)(ROWS)",
    "layers.StringLookup(vocabulary=['[UNK]', *VOCABULARY])(ROWS)",
    "layers.IntegerLookup(vocabulary=[12, 36, 7])(np.array([[36, 7], [1, 12]]))",
    "layers.IntegerLookup(vocabulary=[12, 36, 7], num_oov_indices=2)(np.array([36, -5, 4]))",
    "layers.IntegerLookup(vocabulary=[12, 36], mask_token=0)(np.array([36, 0, 4]))",
    "adapted(layers.StringLookup(), ROWS)(ROWS)",
    "adapted(layers.StringLookup(max_tokens=3), WORDS)(WORDS)",
    "adapted(layers.StringLookup(mask_token=''), WORDS)(WORDS)",
    "adapted(layers.IntegerLookup(), np.array([3, 3, 5, 4, 4, 9]))(np.array([3, 4, 5, 9, 1]))",
]


def adapted(layer, data):
    layer.adapt(data)
    return layer


def evaluate(call, layers):
    """The array of a call."""
    return np.asarray(eval(call, {**globals(), "layers": layers}))


def main():
    import keras

    results = {}
    for call in CALLS:
        array = evaluate(call, keras.layers)
        results[call] = {"shape": array.shape, "kind": array.dtype.kind, "data": array.ravel().tolist()}
    lines = [f"{json.dumps(call)}: {json.dumps(result)}" for call, result in results.items()]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
