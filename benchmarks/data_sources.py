"""What a batch of each kind of data costs: CPU time until `fit` has it, without a step.

    python benchmarks/data_sources.py    # half a minute

Batches of 64 rows with 784 floats and a label. The lowest of five passes.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import pandas
import pyarrow.parquet

from unisono import tf
from unisono.data import ArrayRecordDataset, Dataset, TFRecordDataset

ROWS, BATCH, PASSES = 6400, 64, 5
X = np.random.default_rng(0).normal(size=(ROWS, 784)).astype("float32")
Y = np.arange(ROWS, dtype="int32") % 10


class Batches(keras.utils.PyDataset):
    """Arrays that are cut into batches."""

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, i):
        return X[i * BATCH : (i + 1) * BATCH], Y[i * BATCH : (i + 1) * BATCH]


def parsed(record):
    numbers = np.frombuffer(record, "float32")
    return numbers[:-1], numbers[-1]


def sources(folder):
    """Each kind of data: its name, and what is iterated."""
    from array_record.python.array_record_module import ArrayRecordWriter

    records = [np.append(x, y).astype("float32").tobytes() for x, y in zip(X, Y, strict=True)]
    tfrecord, array_record = str(folder / "rows.tfrecord"), str(folder / "rows.array_record")
    with tf.io.TFRecordWriter(tfrecord) as writer:
        for record in records:
            writer.write(record)
    writer = ArrayRecordWriter(array_record, "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    pandas.DataFrame(X).rename(columns=str).assign(label=Y).to_parquet(folder / "rows.parquet")

    def parquet(rows):
        for part in pyarrow.parquet.ParquetFile(folder / "rows.parquet").iter_batches(rows):
            table = part.to_pandas()
            x, y = table.drop(columns="label").to_numpy(), table["label"].to_numpy()
            for begin in range(0, len(y), BATCH):
                yield x[begin : begin + BATCH], y[begin : begin + BATCH]

    arrays = Dataset.from_tensor_slices((X, Y))
    return {
        "arrays, in order": arrays.batch(BATCH),
        "arrays, shuffled": arrays.shuffle(ROWS, seed=0).batch(BATCH),
        "arrays, `map` of each row": arrays.map(lambda x, y: (x * 2, y)).batch(BATCH),
        "arrays, `map` of each batch": arrays.batch(BATCH).map(lambda x, y: (x * 2, y)),
        "`PyDataset`": Dataset.from_generator(lambda: iter(Batches())),
        "ArrayRecord, `map` that parses": ArrayRecordDataset(array_record).map(parsed).batch(BATCH),
        "TFRecord, `map` that parses": TFRecordDataset(tfrecord).map(parsed).batch(BATCH),
        "Parquet, 64 rows at a time": Dataset.from_generator(lambda: parquet(BATCH)),
        "Parquet, 3,200 rows at a time": Dataset.from_generator(lambda: parquet(50 * BATCH)),
    }


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name, dataset in sources(Path(folder)).items():
            times = []
            for _ in range(PASSES):
                start = time.process_time()
                count = sum(1 for _ in dataset)
                times.append((time.process_time() - start) / count)
            assert count == ROWS // BATCH, (name, count)
            print(f"| {name} | {min(times) * 1e6:,.0f} µs | {BATCH / min(times):,.0f} |")


if __name__ == "__main__":
    sys.exit(main())
