"""How many images and tokens a second input pipelines deliver to one device, and the cores that takes.

    python benchmarks/input.py            # two minutes on two cores
    python benchmarks/input.py --quick    # a quarter of a minute

Images are JPEGs of 500 x 375 pixels with random content; each is decoded, cropped at random, scaled to
224 x 224 and flipped at random, in batches of 64. Tokens are rows of 1,024 in batches of 16. Each batch is
put onto the device, and no step runs. The best of some passes counts. tf.data and torch's DataLoader are
measured beside where they are installed. The last column is how many such cores would keep an H200 busy,
which takes 6,150 images a second for ResNet-50 and 385,000 tokens for GPT-2 (benchmarks/gpu.py).
"""

import argparse
import contextlib
import datetime
import importlib.util
import io
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np

BATCH, SIDE = 64, 224
ROWS, LENGTH = 16, 1024
#: What an H200 takes in a second, in one run of 2026-11-27: ResNet-50 and GPT-2 in bfloat16.
WANTED = {"images": 6_150, "tokens": 385_000}
CORES = len(os.sched_getaffinity(0))
#: JPEGs that differ; files repeat them.
DIFFERENT = 64


def jpegs(count):
    """JPEGs of smooth random content with some noise: about as many bytes as photographs."""
    from PIL import Image

    rng = np.random.default_rng(0)
    made = []
    for _ in range(min(count, DIFFERENT)):
        small = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        large = np.asarray(small.resize((500, 375), Image.Resampling.BICUBIC), "float32")
        noisy = np.clip(large + rng.normal(0, 10, large.shape), 0, 255).astype("uint8")
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return [made[i % len(made)] for i in range(count)]


def image_of(record):
    """Decode a JPEG, and cut a part of random size and place from it, flipped or not."""
    from PIL import Image

    image = Image.open(io.BytesIO(record)).convert("RGB")
    side = random.uniform(0.4, 1.0) * min(image.size)
    left, top = (random.uniform(0, length - side) for length in image.size)
    box = (left, top, left + side, top + side)
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def flipped(images):
    return images[:, :, ::-1] if random.random() < 0.5 else images


def write(folder, records):
    """Write the records as TFRecord and as ArrayRecord; return the paths."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from tensorboard.summary.writer.record_writer import RecordWriter

    paths = str(folder / "images.tfrecord"), str(folder / "images.array_record")
    writer = ArrayRecordWriter(paths[1], "group_size:1")
    with open(paths[0], "wb") as file:
        rows = RecordWriter(file)
        for record in records:
            rows.write(record)
            writer.write(record)
    writer.close()
    return paths


def image_sources(folder, records):
    """Give the name of each pipeline of images, and a function that makes it."""
    from unisono.data import ArrayRecordDataset, Dataset, TFRecordDataset

    tfrecord, array_record = write(folder, records)
    images = np.random.default_rng(0).integers(0, 256, (len(records), SIDE, SIDE, 3), dtype=np.uint8)
    arrays, threads = Dataset.from_tensor_slices(images).batch(BATCH), f"{CORES} threads"

    def parsed(dataset, calls=None):
        return dataset.map(image_of, num_parallel_calls=calls).batch(BATCH)

    yield "unisono, arrays", lambda: arrays
    yield "unisono, arrays, flipped", lambda: arrays.map(flipped)
    yield "unisono, TFRecord", lambda: parsed(TFRecordDataset(tfrecord))
    yield f"unisono, TFRecord, {threads}", lambda: parsed(TFRecordDataset(tfrecord), CORES)
    yield f"unisono, ArrayRecord, {threads}", lambda: parsed(ArrayRecordDataset(array_record), CORES)
    yield f"Grain, ArrayRecord, {CORES} workers", lambda: grain_workers(array_record)
    if importlib.util.find_spec("torch"):
        yield f"torch, JPEGs in memory, {CORES} workers", lambda: torch_loader(records)
    if importlib.util.find_spec("tensorflow"):
        yield f"tf.data, TFRecord, {threads}", lambda: tensorflow_data(tfrecord)


def grain_workers(path):
    import grain
    from absl import flags

    # Grain's workers read flags of the command line, which is not absl's here.
    flags.FLAGS.mark_as_parsed()
    rows = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(path)).map(image_of).to_iter_dataset()
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=CORES)
    return rows.batch(BATCH).mp_prefetch(options)


def torch_loader(records):
    import torch

    rows = Mapped(records)
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, num_workers=CORES, collate_fn=np.stack)


class Mapped:
    """Records as torch's `DataLoader` takes them."""

    def __init__(self, records):
        self._records = records

    def __len__(self):
        return len(self._records)

    def __getitem__(self, i):
        return image_of(self._records[i])


def tensorflow_data(path):
    import tensorflow

    def image_in(record):
        image = tensorflow.io.decode_jpeg(record, channels=3)
        image = tensorflow.image.random_crop(image, (300, 300, 3))
        image = tensorflow.image.resize(tensorflow.image.random_flip_left_right(image), (SIDE, SIDE))
        return tensorflow.cast(image, "uint8")

    rows = tensorflow.data.TFRecordDataset(path).map(image_in, num_parallel_calls=CORES)
    return rows.batch(BATCH).as_numpy_iterator()


def token_sources(folder, count):
    """Give the name of each pipeline of tokens, and a function that makes it."""
    from unisono.data import Dataset

    path = folder / "tokens.bin"
    np.random.default_rng(0).integers(0, 50_257, count * LENGTH, dtype=np.uint16).tofile(path)
    tokens = np.fromfile(path, np.uint16).reshape(-1, LENGTH)

    def pairs(rows):
        rows = rows.astype("int32")
        return rows, np.roll(rows, -1, axis=1)

    def pieces():
        mapped = np.memmap(path, np.uint16, "r").reshape(-1, LENGTH)
        for begin in range(0, count, ROWS):
            yield pairs(mapped[begin : begin + ROWS])

    yield "unisono, arrays", lambda: Dataset.from_tensor_slices(tokens).batch(ROWS).map(pairs)
    yield (
        "unisono, shuffled",
        lambda: Dataset.from_tensor_slices(tokens).shuffle(count).batch(ROWS).map(pairs),
    )
    yield "unisono, a mapped file", lambda: Dataset.from_generator(pieces)


def seconds_of(pid):
    """The CPU time of a process and of all below it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # Its own, and that of the children that have ended.
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread, or a process, may have ended since it was listed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            own += sum(map(seconds_of, path.read_text().split()))
    return own


def measured(make):
    """Put the batches of a pipeline onto a device; return how many rows, the seconds, and those of CPUs."""
    import jax

    device, rows, iterator = jax.devices()[0], 0, iter(make())
    began, before = time.perf_counter(), seconds_of(os.getpid())
    for batch in iterator:
        placed = jax.device_put(batch, device)
        rows += jax.tree.leaves(batch)[0].shape[0]
    jax.block_until_ready(placed)
    wall = time.perf_counter() - began
    return rows, wall, seconds_of(os.getpid()) - before


def report(kind, sources, per_row, passes):
    print(f"\n| {kind} from | {kind} a second | cores busy | cores for an H200 |\n|---|---|---|---|")
    for name, make in sources:
        rows, wall, cpu = min((measured(make) for _ in range(passes)), key=lambda found: found[1])
        each = rows * per_row
        print(
            f"| {name} | {each / wall:,.0f} | {cpu / wall:.1f} | {WANTED[kind] * cpu / each:,.1f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer images, and one pass")
    options = parser.parse_args()
    images, passes = (256, 1) if options.quick else (512, 3)
    missing = [name for name in ("torch", "tensorflow") if not importlib.util.find_spec(name)]
    print(f"{datetime.date.today()}, {CORES} cores, Python {platform.python_version()}", end="; ")
    print("not installed: " + ", ".join(missing) if missing else "all peers")
    records = jpegs(images)
    print(f"{images} JPEGs of {np.mean([len(record) for record in records]) / 1e3:.0f} kB on average")
    with tempfile.TemporaryDirectory() as folder:
        report("images", image_sources(Path(folder), records), 1, passes)
        report("tokens", token_sources(Path(folder), 4 * images), LENGTH, passes)


if __name__ == "__main__":
    sys.exit(main())
