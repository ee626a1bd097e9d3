"""`tf.io` on this machine's files."""

import numpy as np
import pytest

import unisono
from unisono import tf


def test_files(tmp_path):
    gfile = tf.io.gfile
    below = tmp_path / "a" / "b"
    gfile.makedirs(below)
    gfile.makedirs(below)
    with gfile.GFile(below / "x.txt", "w") as file:
        file.write("hé")
    assert gfile.exists(below / "x.txt")
    assert gfile.isdir(below)
    assert gfile.listdir(tmp_path) == ["a"]
    assert gfile.glob(str(tmp_path / "*" / "*" / "*.txt")) == [str(below / "x.txt")]
    assert tf.io.read_file(str(below / "x.txt")) == "hé".encode()
    gfile.copy(below / "x.txt", below / "y.txt")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        gfile.copy(below / "x.txt", below / "y.txt")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        gfile.rename(below / "x.txt", below / "y.txt")
    gfile.rename(below / "x.txt", below / "y.txt", overwrite=True)
    assert [files for *_, files in gfile.walk(below)] == [["y.txt"]]
    tf.io.write_file(str(tmp_path / "new" / "z.bin"), b"12")
    assert tf.io.read_file(np.bytes_(str(tmp_path / "new" / "z.bin").encode())) == b"12"
    gfile.rmtree(tmp_path / "a")
    assert not gfile.exists(below)


def test_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(4 * 5 * 3, dtype="uint8").reshape(4, 5, 3)
    image.fromarray(pixels).save(tmp_path / "x.png")
    contents = tf.io.read_file(str(tmp_path / "x.png"))
    assert (tf.io.decode_png(contents, channels=3) == pixels).all()
    assert tf.io.decode_image(contents, channels=1).shape == (4, 5, 1)
    with pytest.raises(unisono.InvalidArgumentError, match="channels must be"):
        tf.io.decode_image(contents, channels=2)
    for encoded in (tf.io.encode_png(pixels), tf.image.encode_png(pixels, compression=9)):
        assert (tf.io.decode_image(encoded.numpy()) == pixels).all()
    grey = np.arange(16, dtype="uint16").reshape(4, 4, 1) * 4000
    assert tf.io.decode_png(tf.io.encode_png(grey).numpy()).dtype != "uint8"
    flat = tf.io.decode_jpeg(tf.io.encode_jpeg(np.full((8, 8, 3), 90, "uint8"), quality=100).numpy())
    assert abs(flat.astype(int) - 90).max() <= 1
