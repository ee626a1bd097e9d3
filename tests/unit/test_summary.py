"""`unisono.summary` outside of compiled code: what TensorBoard reads back, and `tf.summary`'s rules."""

import io
import subprocess
import sys

import keras
import numpy as np
import pytest
from PIL import Image
from tests.event_files import read, scalars

import unisono
from unisono import MissingPackageError, summary
from unisono.callbacks import TensorBoard


@pytest.fixture
def writer(tmp_path):
    writer = summary.create_file_writer(tmp_path)
    yield writer
    writer.close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(unisono.InvalidArgumentError, match=r"can be made and written.*file/logs"):
        summary.create_file_writer(tmp_path / "file" / "logs")


def test_every_kind_is_read_back(tmp_path, writer):
    with writer.as_default(step=3):
        assert summary.scalar("loss", np.float64(0.25))
        assert summary.histogram("weights", np.arange(10.0), buckets=5)
        assert summary.image("grey", np.full((5, 4, 6, 1), 0.5, "f4"), max_outputs=2)
        assert summary.text("notes", "**begun**")
        assert summary.text("table", [["a", "b"], ["c", "d"]])
    values, plugins = read(tmp_path)
    assert plugins == {
        "loss": "scalars", "weights": "histograms", "grey": "images", "notes": "text", "table": "text",
    }  # fmt: skip
    assert all(step == 3 for points in values.values() for step, _ in points)
    assert values["loss"][0][1] == np.float32(0.25)
    assert values["loss"][0][1].dtype == np.float32
    np.testing.assert_allclose(values["weights"][0][1][:, 2], [2, 2, 2, 2, 2])
    np.testing.assert_allclose(values["weights"][0][1][:, 0], [0, 1.8, 3.6, 5.4, 7.2])
    assert values["notes"][0][1].item() == b"**begun**"
    assert values["table"][0][1].tolist() == [[b"a", b"b"], [b"c", b"d"]]
    width, height, *files = values["grey"][0][1].tolist()
    assert (width, height, len(files)) == (b"6", b"4", 2)
    assert (np.asarray(Image.open(io.BytesIO(files[0]))) == 127).all()


def test_tensorboards_directory_loader_reads_what_is_flushed(tmp_path, writer):
    from tensorboard.backend.event_processing.directory_loader import DirectoryLoader
    from tensorboard.backend.event_processing.event_file_loader import TimestampedEventFileLoader

    loader = DirectoryLoader(str(tmp_path), TimestampedEventFileLoader)
    with writer.as_default():
        summary.scalar("a", 1, step=1)
    assert [e.step for e in loader.Load()] == [0, 1]
    with writer.as_default():
        summary.scalar("a", 2, step=2)
    assert [e.step for e in loader.Load()] == [2]


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_keep_their_pixels(tmp_path, writer, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, 5, channels), dtype=np.uint8)
    with writer.as_default():
        summary.image("x", pixels, step=0)
    encoded = read(tmp_path)[0]["x"][0][1][2]
    found = np.asarray(Image.open(io.BytesIO(encoded))).reshape(3, 5, channels)
    np.testing.assert_array_equal(found, pixels[0])


def test_histograms_are_tensorboards():
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb
    from tensorboard.util import tensor_util

    from unisono._summary._event_files import histogram

    normal = np.random.default_rng(1).normal(size=1000)
    for data in (normal, np.full(7, 2.5), np.array([]), np.array([-1.0, 1.0])):
        for buckets in (1, 7, 30):
            expected = tensor_util.make_ndarray(histogram_pb("x", data, buckets).value[0].tensor)
            np.testing.assert_allclose(histogram(data, buckets), expected, rtol=1e-12)


def test_histograms_leave_out_what_is_not_finite():
    from unisono._summary._event_files import histogram

    assert histogram([np.nan, 1.0, np.inf], 2)[:, 2].tolist() == [0.0, 1.0]


def test_without_a_default_writer_nothing_happens(tmp_path, writer):
    assert summary.scalar("loss", "no number", step="no step") is False
    with writer.as_default():
        pass
    assert summary.scalar("loss", 1.0, step=1) is False
    assert read(tmp_path)[0] == {}


def test_default_steps(tmp_path, writer):
    variable = keras.Variable(7, dtype="int32")
    with writer.as_default(step=1):
        summary.scalar("x", 1.0)
        summary.experimental.set_step(5)
        assert summary.experimental.get_step() == 5
        summary.scalar("x", 2.0)
        with writer.as_default(step=variable):
            summary.scalar("x", 3.0)
            variable.assign(8)
            summary.scalar("x", 4.0)
        summary.scalar("x", 5.0, step=np.int64(9))
    assert summary.get_step() is None
    assert scalars(tmp_path, "x") == [(1, 1.0), (5, 2.0), (7, 3.0), (8, 4.0), (9, 5.0)]


def test_record_if(tmp_path, writer):
    with writer.as_default():
        for step in range(6):
            with summary.record_if(lambda step=step: step % 2 == 0):
                assert summary.scalar("x", 1.0, step=step) is (step % 2 == 0)
        with summary.record_if(False):
            assert not summary.scalar("x", 1.0)
            with summary.record_if(True):
                assert summary.scalar("x", 1.0, step=7)
    assert [s for s, _ in scalars(tmp_path, "x")] == [0, 2, 4, 7]


def test_writers_nest_and_come_back_after_an_error(tmp_path):
    outer, inner = summary.create_file_writer(tmp_path / "a"), summary.create_file_writer(tmp_path / "b")

    def fails():
        with outer.as_default(step=1):
            with inner.as_default():
                summary.scalar("x", 1.0)
            summary.scalar("x", 2.0)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not summary.scalar("x", 3.0, step=1)
    inner.close()
    outer.close()
    outer.close()
    assert scalars(tmp_path / "a", "x") == [(1, 2.0)]
    assert scalars(tmp_path / "b", "x") == [(1, 1.0)]


def test_a_full_queue_is_written(tmp_path):
    writer = summary.create_file_writer(tmp_path, max_queue=2)
    for step in range(5):
        writer.write("scalar", "x", step, 1.0)
    assert [s for s, _ in scalars(tmp_path, "x")] == [0, 1, 2, 3]
    writer.close()
    assert [s for s, _ in scalars(tmp_path, "x")] == [0, 1, 2, 3, 4]


def test_a_program_that_ends_without_close_loses_nothing(tmp_path):
    code = (
        "import sys; from unisono import summary\n"
        f"w = summary.create_file_writer({str(tmp_path)!r})\n"
        "w.write('scalar', 'x', 1, 2.0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert scalars(tmp_path, "x") == [(1, 2.0)]


ERRORS = {
    "no step": (lambda: summary.scalar("x", 1.0), "must have a step. Received: step=None for 'x'"),
    "float step": (lambda: summary.scalar("x", 1.0, step=0.5), "must be an integer. Received: step=0.5"),
    "bool step": (lambda: summary.scalar("x", 1.0, step=True), "must be an integer"),
    "vector": (lambda: summary.scalar("x", [1.0, 2.0], step=1), r"one real number. Received: shape \(2,\)"),
    "complex": (lambda: summary.histogram("x", [1j], step=1), "complex128"),
    "rank": (lambda: summary.image("x", np.zeros((4, 4, 1)), step=1), r"\(k, height, width, channels\)"),
    "channels": (lambda: summary.image("x", np.zeros((1, 4, 4, 5)), step=1), "1 to 4 channels"),
    "pixels": (lambda: summary.image("x", np.zeros((1, 4, 4, 1), "i4"), step=1), "uint8 or floats"),
    "no text": (lambda: summary.text("x", 3, step=1), "must be strings. Received: 3"),
    "buckets": (lambda: summary.histogram("x", [1.0], step=1, buckets=0), "buckets=0"),
    "per replica": (lambda: summary.scalar("x", unisono.PerReplica((1.0, 2.0)), step=1), "strategy.reduce"),
    "condition": (lambda: summary.record_if([True, False]).__enter__(), "must be a bool or a function"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_write(name, writer):
    call, message = ERRORS[name]
    with writer.as_default(), pytest.raises(unisono.UnisonoError, match=message):
        call()


def test_a_closed_writer_says_so(tmp_path):
    writer = summary.create_file_writer(tmp_path)
    writer.close()
    with writer.as_default(), pytest.raises(unisono.ContextError, match="must be open"):
        summary.scalar("x", 1.0, step=1)


@pytest.mark.parametrize("arguments", [{"max_queue": 0}, {"flush_millis": -1}])
def test_a_writer_checks_its_arguments(tmp_path, arguments):
    with pytest.raises(unisono.InvalidArgumentError, match="at least 1"):
        summary.create_file_writer(tmp_path, **arguments)


def test_tensorflow_is_not_imported_even_where_it_is_installed(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('tensorflow was imported')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from unisono._summary import _event_files as _events; import numpy as np\n"
        f"f = _events.EventFile({str(tmp_path / 'logs')!r}, 10, 1.0)\n"
        "f.add('scalar', 'x', 1, 2.0); f.add('image', 'i', 1, np.zeros((1, 2, 2, 1)))\n"
        "f.add('histogram', 'h', 1, [1.0]); f.add('text', 't', 1, 'x'); f.close()\n"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
    assert set(read(tmp_path / "logs")[0]) == {"x", "i", "h", "t"}


def test_a_missing_package_is_named(tmp_path):
    code = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "from unisono import summary\n"
        f"summary.create_file_writer({str(tmp_path)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("unisono.MissingPackageError"))
    assert "pip install unisono[tensorboard]" in error


@pytest.mark.parametrize("package", ["tensorboard", "PIL"])
def test_a_missing_package_is_noticed_when_the_callback_is_made(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"`{package}`.*pip install 'unisono\[tensorboard\]'"):
        TensorBoard("logs")
