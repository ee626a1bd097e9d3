"""What TensorFlow's feature columns give, for tests/unit/feature_column.

`python tests/tensorflow_columns.py`, where TensorFlow is installed, writes the results. All variables, of
tables and of linear models, hold `sin(0), sin(1), ...`.
"""

import json
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "unit" / "feature_column" / "tensorflow_columns.json"

FEATURES = {
    "age": np.array([[17.0], [18.0], [30.5], [65.0]], "float32"),
    "flat": np.array([1.0, 2.0, 3.0, 4.0], "float32"),
    "pair": np.array([[1, 20], [0, 0], [10, 5], [-3, 7]], "float32"),
    "square": np.arange(16, dtype="float32").reshape(4, 2, 2),
    "color": np.array([["red"], ["green"], ["mauve"], [""]], object),
    "words": np.array([["a", "b", "a"], ["c", "", ""], ["", "", ""], ["zz", "a", "q"]], object),
    "weight": np.array([[1, 2, 0.5], [3, 0, 0], [0, 0, 0], [0.25, 4, 1]], "float32"),
    "weekday": np.array([[0], [6], [-1], [3]], "int64"),
    "late": np.array([[0], [9], [2], [12]], "int64"),
    "number": np.array([[5, -1], [7, 7], [123456789, 0], [9, 5]], "int64"),
}

VOCABULARY = "fc.categorical_column_with_vocabulary_list('color', ['red', 'green', 'blue']{})"
WORDS = "fc.categorical_column_with_hash_bucket('words', 11)"
AGE = "fc.bucketized_column(fc.numeric_column('age'), [18, 40, 65])"
WEEKDAY = "fc.categorical_column_with_identity('weekday', 7)"
WEIGHTED = f"fc.weighted_categorical_column({WORDS}, 'weight')"

#: Categorical columns: how often each category occurs in each row.
CATEGORICAL = [
    VOCABULARY.format(""),
    VOCABULARY.format(", default_value=1"),
    VOCABULARY.format(", num_oov_buckets=4"),
    "fc.categorical_column_with_vocabulary_list('number', [7, 5])",
    "fc.categorical_column_with_vocabulary_list('number', [7, 5], num_oov_buckets=3)",
    "fc.categorical_column_with_vocabulary_list('words', ['a', 'b', 'c', 'd'], num_oov_buckets=2)",
    WORDS,
    "fc.categorical_column_with_hash_bucket('color', 5)",
    "fc.categorical_column_with_hash_bucket('number', 6, INT)",
    WEEKDAY,
    "fc.categorical_column_with_identity('late', 10, default_value=9)",
    AGE,
    "fc.bucketized_column(fc.numeric_column('pair', 2), [0, 6])",
    WEIGHTED,
    "fc.crossed_column(['color', 'words'], 13)",
    "fc.crossed_column(['color', 'weekday'], 1000)",
    "fc.crossed_column(['words', 'number'], 17, hash_key=5)",
    f"fc.crossed_column([{AGE}, 'color'], 50)",
    f"fc.crossed_column([{VOCABULARY.format('')}, {WEEKDAY}], 19)",
    f"fc.crossed_column([fc.crossed_column(['color', 'weekday'], 5), {AGE}], 23)",
]

#: What DenseFeatures reads.
DENSE = [
    "[fc.numeric_column('age')]",
    "[fc.numeric_column('flat')]",
    "[fc.numeric_column('square', (2, 2))]",
    "[fc.numeric_column('pair', 2, normalizer_fn=lambda x: (x - 3.0) / 2.0)]",
    f"[fc.numeric_column('age'), {AGE}, fc.indicator_column({WEEKDAY})]",
    f"[fc.indicator_column({WEIGHTED})]",
    *(
        f"[fc.embedding_column({column}, 3, '{combiner}')]"
        for column in (WORDS, WEIGHTED)
        for combiner in ("mean", "sqrtn", "sum")
    ),
    f"[fc.embedding_column({AGE}, 3)]",
    f"[fc.embedding_column({WORDS}, 2, max_norm=0.75)]",
    f"[fc.embedding_column({WORDS}, 2), fc.numeric_column('age'), fc.embedding_column({WEEKDAY}, 4)]",
    "fc.shared_embeddings([fc.categorical_column_with_hash_bucket('color', 8), "
    "fc.categorical_column_with_hash_bucket('words', 8)], 3)",
]

#: What a linear model reads, and how it combines.
LINEAR = [
    (f"[{WORDS}, {AGE}]", "mean"),
    (f"[{WEIGHTED}]", "sqrtn"),
    (f"[fc.numeric_column('pair', 2), {WEEKDAY}, fc.indicator_column({VOCABULARY.format('')})]", "sum"),
]


def wave(shape):
    """The value of every variable."""
    return np.sin(np.arange(np.prod(shape, dtype=int)), dtype="float64").astype("float32").reshape(shape)


def main():
    import tensorflow as tf

    def run(build):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            output = build({key: tf.constant(value) for key, value in FEATURES.items()})
            session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.tables_initializer()])
            for variable in tf.compat.v1.global_variables():
                variable.load(wave(variable.shape.as_list()), session)
            array = session.run(output)
            return [[float(f"{x:.7g}") for x in row] for row in array.tolist()]

    v1, results = tf.compat.v1.feature_column, {}
    for columns in [*DENSE, *(f"[fc.indicator_column({column})]" for column in CATEGORICAL)]:
        results[columns] = run(
            lambda features, c=columns: v1.input_layer(features, eval(c, {"fc": dense(tf), "INT": tf.int64}))
        )
    for columns, combiner in LINEAR:
        results[f"{columns} {combiner}"] = run(
            lambda features, c=columns, how=combiner: v1.linear_model(
                features, eval(c, {"fc": tf.feature_column, "INT": tf.int64}), units=2, sparse_combiner=how
            )
        )
    lines = [f"{json.dumps(case)}: {json.dumps(rows)}" for case, rows in results.items()]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def dense(tf):
    """`tf.feature_column`, with the shared embeddings that TensorFlow 1's `input_layer` reads."""

    class Columns:
        def __getattr__(self, name):
            return getattr(tf.feature_column, name)

        shared_embeddings = staticmethod(tf.compat.v1.feature_column.shared_embedding_columns)

    return Columns()


if __name__ == "__main__":
    main()
