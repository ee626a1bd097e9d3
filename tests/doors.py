"""A program that loads each public name with the packages that there are, and runs what needs no extra.

It prints each name that needs an extra, and the extra: `unisono.ParameterServerStrategy cluster`. It imports
nothing but Unisono and what that requires, so that it runs in an environment without the tests' packages.
"""

import functools
import importlib
import os
import re
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp(prefix="unisono-doors-"))

import unisono  # noqa: E402

SRC = Path(unisono.__file__).parent

#: The first lines of programs of each kind.
PROGRAMS = {
    "fit": """
import unisono, keras, numpy
for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy", "CentralStorageStrategy"):
    with getattr(unisono, name)().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
backup = unisono.callbacks.BackupAndRestore("backup")
model.fit(numpy.ones((8, 4)), numpy.ones((8, 2)), verbose=0, callbacks=[backup])
""",
    "estimator": """
from unisono import tf
age = tf.feature_column.numeric_column("age")
job = tf.feature_column.categorical_column_with_vocabulary_list("job", ["cook", "smith"])
columns = [age, tf.feature_column.indicator_column(job)]
classifier = tf.estimator.DNNClassifier([4], columns)
rows = {"age": [20.0, 50.0], "job": ["cook", "smith"]}
classifier.train(lambda: tf.data.Dataset.from_tensor_slices((rows, [0, 1])).repeat().batch(2), steps=2)
""",
    "strings": """
from unisono import preprocessing
assert preprocessing.StringLookup(vocabulary=["a", "b"])(["b", "c"]).tolist() == [2, 0]
""",
    "Hashing": "unisono.preprocessing.Hashing(num_bins=3)",
    "StringLookup": "unisono.preprocessing.StringLookup(num_oov_indices=2)",
    "HashedCrossing": "unisono.preprocessing.HashedCrossing(num_bins=5)((['A'], ['B']))",
    "hash_bucket": "unisono.feature_column.categorical_column_with_hash_bucket('a', 5)",
    "vocabulary": "unisono.feature_column.categorical_column_with_vocabulary_list('a', ['b'], None, -1, 5)",
    "crossed": "unisono.feature_column.crossed_column(['a', 'b'], 5)",
    "to_hash_bucket": "import unisono.tf as tf; tf.strings.to_hash_bucket_fast(['a'], 5)",
    "command": "import unisono.cli._app",
    "saved": """
from unisono import tf
class Twice(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((2,))])
    def __call__(self, x):
        return 2 * x

tf.saved_model.save(Twice(), "twice")
""",
}


def public_modules():
    """The names of all modules that have no private part."""
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        named = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in named):
            yield ".".join(("unisono", *named))


def loads():
    """A name, and what loads it."""
    for module in public_modules():
        yield module, functools.partial(importlib.import_module, module)
        loaded = importlib.import_module(module)
        for name in sorted({*dir(loaded), *getattr(loaded, "__all__", ())}):
            # `dir(tf)` has names whose AttributeError says what to write instead.
            yield f"{module}.{name}", functools.partial(hasattr, loaded, name)
    for name, program in PROGRAMS.items():
        yield name, functools.partial(exec, program, {"unisono": unisono})


def main():
    for name, load in loads():
        try:
            load()
        except unisono.MissingPackageError as error:
            (extra,) = re.findall(r"Write: pip install 'unisono\[(\w+)\]'", str(error))
            print(name, extra)


if __name__ == "__main__":
    main()
