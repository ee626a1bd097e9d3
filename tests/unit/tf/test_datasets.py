"""`tensorflow_datasets` under `unisono.tf`: a small data set, prepared on the spot."""

from pathlib import Path

import numpy as np
import pytest
from tests import forked

import unisono
from unisono import tf

tfds = pytest.importorskip("tensorflow_datasets")
tfds.disable_progress_bar()

FOLDER = Path(__file__).parent

PROGRAM = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import tensorflow as tf
import tensorflow_datasets as tfds
import small_digits

data, info = tfds.load("small_digits", data_dir=sys.argv[1], with_info=True, as_supervised=True)
strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
scale = lambda image, label: (tf.cast(image[0], tf.float32) / 255, label)
train = data["train"].map(scale).cache().shuffle(10000).batch(8)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(3)])
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(train, epochs=2, verbose=0)
print(info.splits["train"].num_examples, len(history.history["loss"]))
try:
    import tensorflow_hub
except ImportError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By format the folder of a data set of 30 rows; that of TFRecord has five files."""
    import small_digits  # noqa: F401

    made = {name: tmp_path_factory.mktemp(name) for name in ("array_record", "tfrecord", "parquet")}
    for name, folder in made.items():
        config = tfds.download.DownloadConfig(num_shards=5 if name == "tfrecord" else 1)
        given = {} if name == "array_record" else {"file_format": name}
        builder = tfds.builder("small_digits", data_dir=folder, **given)
        builder.download_and_prepare(download_config=config)
        assert builder.info.file_format.value == name
    return made


def load(folder, **options):
    return tfds.load("small_digits", data_dir=str(folder), **options)


def numbers(dataset):
    """Which rows: the first pixel says it."""
    return [int(x["image"][0, 0, 0]) for x in tfds.as_numpy(dataset)]


@pytest.mark.parametrize("form", ["array_record", "tfrecord"])
def test_load_gives_a_dataset_of_the_features(folders, form):
    data, info = load(folders[form], with_info=True, shuffle_files=False, try_gcs=False)
    assert sorted(data) == ["test", "train"]
    train = data["train"]
    assert isinstance(train, unisono.data.Dataset)
    assert (len(train), info.splits["train"].num_examples, info.features["label"].num_classes) == (30, 30, 3)
    spec = train.element_spec
    assert {key: (part.shape, part.dtype) for key, part in spec.items()} == {
        "ids": ((None,), np.int32), "image": ((None, 2, 3), np.uint8), "label": ((), np.int64),
        "text": ((), object), "x": ((2,), np.float32),
    }  # fmt: skip
    for row in train.concatenate(data["test"]):
        i = int(row["image"][0, 0, 0])
        assert row["image"].shape == (1 + i % 2, 2, 3)
        assert (row["label"].numpy(), row["text"].numpy()) == (i % 3, f"row {i}".encode())
        assert row["ids"].tolist() == list(range(i % 4))
        assert row["x"].tolist() == [i, -i]
        assert info.features["label"].int2str(int(row["label"])) == ["zero", "one", "two"][i % 3]
    assert sorted(numbers(train)) == list(range(30))


def test_splits_batches_and_supervision(folders):
    folder = folders["array_record"]
    order = numbers(load(folder, split="train"))
    first, rest = load(folder, split=["train[:80%]", "train[80%:]"])
    assert numbers(first) + numbers(rest) == order
    parts = load(folder, split={"a": "train[5:9]", "b": tfds.Split.TEST})
    assert (numbers(parts["a"]), len(parts["b"])) == (order[5:9], 10)
    both = load(folder, split="train+test[:3]")
    assert len(both) == 33
    assert [len(part) for part in load(folder, split=tfds.even_splits("train", n=4))] == [8, 8, 7, 7]
    images, labels = next(iter(load(folder, split="train", as_supervised=True, batch_size=4)))
    # Features without a fixed shape are padded, as TensorFlow does.
    assert (images.shape, labels.dtype) == ((4, 2, 2, 3), np.int64)
    whole = tfds.as_numpy(load(folder, split="test", batch_size=-1))
    assert type(whole["ids"]) is np.ndarray
    assert (whole["ids"].shape, whole["x"].shape) == ((10, 3), (10, 2))


def test_as_numpy_gives_plain_arrays_again_and_again(folders):
    plain = tfds.as_numpy((load(folders["array_record"], split="test"), np.float32(2)))
    assert plain[1] == 2
    assert len(plain[0]) == 10
    for _ in range(2):
        rows = list(plain[0])
        assert len(rows) == 10
        assert type(rows[0]["image"]) is np.ndarray


def test_files_are_read_in_the_order_of_tf_data(folders):
    builder = tfds.builder("small_digits", data_dir=folders["tfrecord"])
    names = builder.info.splits["train"].filepaths
    assert len(names) == 5
    config = tfds.ReadConfig(interleave_cycle_length=2, interleave_block_length=3)
    expected = unisono.data.Dataset.from_tensor_slices([str(name) for name in names]).interleave(
        unisono.data.TFRecordDataset, cycle_length=2, block_length=3
    )
    decode = builder.info.features.deserialize_example_np
    expected = [int(decode(record)["x"][0]) for record in expected.as_numpy_iterator()]
    assert numbers(builder.as_dataset(split="train", read_config=config)) == expected
    # A part leaves out what lies before it in its files.
    config = tfds.ReadConfig(interleave_cycle_length=1)
    in_files = numbers(builder.as_dataset(split="train", read_config=config))
    assert numbers(builder.as_dataset(split="train[7:25]", read_config=config)) == in_files[7:25]


def test_shuffle_files_and_other_options(folders):
    in_order = numbers(load(folders["tfrecord"], split="train"))
    config = tfds.ReadConfig(shuffle_seed=3, try_autocache=False)
    shuffled = load(folders["tfrecord"], split="train", shuffle_files=True, read_config=config)
    first, second = numbers(shuffled), numbers(shuffled)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != in_order
    # One file has one order, as in TensorFlow.
    one_file = load(folders["array_record"], split="train", shuffle_files=True)
    assert numbers(one_file) == numbers(load(folders["array_record"], split="train"))
    context = unisono.InputContext(num_input_pipelines=3, input_pipeline_id=1)
    config = tfds.ReadConfig(input_context=context)
    assert numbers(load(folders["tfrecord"], split="train", read_config=config)) == in_order[1::3]
    skipped = load(folders["array_record"], split="train", decoders={"image": tfds.decode.SkipDecoding()})
    assert next(iter(skipped))["image"].numpy()[1:4] == b"PNG"


def test_a_grey_image_gets_the_channels_of_its_feature():
    file = tf.io.encode_png(np.full((3, 3, 1), 7, "uint8")).numpy()
    feature = tfds.features.Image(shape=(None, None, 3))
    assert feature.decode_example_np(file).tolist() == np.full((3, 3, 3), 7).tolist()


def test_errors_name_the_folder_and_what_to_write(folders, tmp_path, monkeypatch):
    with pytest.raises(
        unisono.InvalidArgumentError, match=r"must have examples. Received: split='train\[:0%\]'"
    ):
        load(folders["array_record"], split="train[:0%]")
    with pytest.raises(unisono.UnsupportedError, match=r"format parquet in .*tfds.data_source"):
        load(folders["parquet"], split="train")
    with pytest.raises(unisono.UnsupportedError, match=r"dataset.enumerate"):
        load(folders["array_record"], split="train", read_config=tfds.ReadConfig(add_tfds_id=True))
    with pytest.raises(unisono.UnsupportedError, match=r"dataset.map\(lambda"):
        load(folders["array_record"], split="train", decoders=tfds.decode.PartialDecoding({"x": True}))
    builder = tfds.builder("small_digits", data_dir=folders["array_record"])
    ragged = tfds.features.Sequence(tfds.features.Sequence(np.int32))
    monkeypatch.setattr(builder.info, "_features", tfds.features.FeaturesDict({"a": {"b": ragged}}))
    with pytest.raises(unisono.UnsupportedError, match="'a/b', which is ragged"):
        builder.as_dataset(split="train")

    def fail(*args):
        raise ConnectionError("no network")

    builder = tfds.builder("small_digits", data_dir=tmp_path)
    monkeypatch.setattr(type(builder), "_split_generators", fail)
    with pytest.raises(ConnectionError) as caught:
        builder.download_and_prepare()
    assert f"`tfds build small_digits --data_dir={tmp_path}`" in caught.value.__notes__[0]
    assert f"'small_digits/1.0.0' must be in '{tmp_path}/small_digits/1.0.0'" in caught.value.__notes__[0]


def test_a_program_without_an_edit(folders, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["-m", "unisono.tf", str(tmp_path / "program.py"), str(folders["array_record"])]
    done = forked.run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "30 2",
        "`tensorflow_hub` needs TensorFlow. Use `keras.applications`, `keras_hub`, or `tf.saved_model.load` "
        "of a saved model.",
    ]
