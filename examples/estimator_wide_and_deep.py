"""The wide-and-deep model of census incomes: a canned estimator that reads strings.

python examples/estimator_wide_and_deep.py
python examples/estimator_wide_and_deep.py --model-dir /tmp/census --steps 3000    # run it twice: it goes on

A table with the columns of the census is made on the spot, with incomes that depend on them. `input_fn`
returns its strings as they are: the estimator looks them up, hashes and crosses them before each step. Two
virtual devices train, each on its own batches.

Needs nothing beyond Unisono.
"""

import argparse
import os

os.environ.setdefault("PJRT_NPROC", "2")  # before JAX starts: two virtual devices on a machine without any

import unisono  # before Keras, so that it runs on JAX
import keras
import numpy as np
from unisono import estimator, feature_column

parser = argparse.ArgumentParser()
parser.add_argument("--model-dir", help="of checkpoints; a temporary one by default")
parser.add_argument("--steps", type=int, default=600)
options = parser.parse_args()

EDUCATION = ["HS-grad", "Some-college", "Bachelors", "Masters", "Doctorate"]
RELATIONSHIP = ["Husband", "Not-in-family", "Own-child", "Unmarried", "Wife"]
OCCUPATION = ["Sales", "Exec-managerial", "Craft-repair", "Prof-specialty", "Other-service", "Adm-clerical"]


def census(rows, seed):
    """Return features by name, and incomes as strings."""
    rng = np.random.default_rng(seed)
    education, relationship = rng.integers(0, 5, rows), rng.integers(0, 5, rows)
    occupation = rng.integers(0, 6, rows)
    age, hours = rng.integers(17, 80, rows), rng.integers(10, 70, rows)
    score = 0.9 * education - 0.0025 * (age - 50.0) ** 2 + 0.05 * hours - 2.5
    # What no column says alone: managers of high education, and some families.
    score += 2.0 * ((occupation == 1) & (education > 2)) + 1.5 * np.isin(relationship, (0, 4))
    income = np.where(rng.logistic(size=rows) < score - 1.0, ">50K", "<=50K")
    features = {
        "age": age.astype("float32"),
        "hours_per_week": hours.astype("float32"),
        "education": np.array(EDUCATION)[education],
        "relationship": np.array(RELATIONSHIP)[relationship],
        "occupation": np.array(OCCUPATION)[occupation],
    }
    return features, income


def columns():
    """Return the wide columns and the deep ones."""
    age = feature_column.numeric_column("age")
    buckets = feature_column.bucketized_column(age, [18, 25, 30, 35, 40, 45, 50, 55, 60, 65])
    education = feature_column.categorical_column_with_vocabulary_list("education", EDUCATION)
    relationship = feature_column.categorical_column_with_vocabulary_list("relationship", RELATIONSHIP)
    occupation = feature_column.categorical_column_with_hash_bucket("occupation", 1000)
    crossed = [
        feature_column.crossed_column(["education", "occupation"], 1000),
        feature_column.crossed_column([buckets, "education", "occupation"], 1000),
    ]
    wide = [education, relationship, occupation, buckets, *crossed]
    deep = [
        feature_column.numeric_column("age", normalizer_fn=lambda x: (x - 48) / 18),
        feature_column.numeric_column("hours_per_week", normalizer_fn=lambda x: (x - 40) / 17),
        feature_column.indicator_column(education),
        feature_column.indicator_column(relationship),
        feature_column.embedding_column(occupation, dimension=8),
    ]
    return wide, deep


def input_fn(seed, rows, batch, epochs):
    """Return a dataset of batches, with strings."""
    data = unisono.data.Dataset.from_tensor_slices(census(rows, seed))
    return data.shuffle(rows, seed=seed).repeat(epochs).batch(batch)


strategy = unisono.MirroredStrategy()
wide, deep = columns()
model = estimator.DNNLinearCombinedClassifier(
    model_dir=options.model_dir,
    linear_feature_columns=wide,
    linear_optimizer="Ftrl",
    dnn_feature_columns=deep,
    dnn_hidden_units=[100, 75, 50, 25],
    dnn_optimizer=keras.optimizers.Adagrad(0.05),
    label_vocabulary=["<=50K", ">50K"],
    config=estimator.RunConfig(train_distribute=strategy, tf_random_seed=0),
)
model.train(lambda: input_fn(1, 8000, 20, None), steps=options.steps)
results = model.evaluate(lambda: input_fn(2, 2000, 200, 1))
for name in sorted(results):
    print(f"{name}: {results[name]:.4g}")

for row, person in zip(range(3), model.predict(lambda: input_fn(2, 2000, 200, 1)), strict=False):
    income, likely = person["classes"][0].decode(), person["probabilities"].max()
    print(f"Person {row} earns {income}, with probability {likely:.2f}")
print("Weights of relationships:", model.get_variable_value("linear/linear_model/relationship/weights")[:, 0])
