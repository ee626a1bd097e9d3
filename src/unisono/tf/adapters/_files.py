"""Files as `tf.io` names them, in the file system of this machine.

Tests: tests/unit/tf/test_files.py.
"""

from __future__ import annotations

import glob as _glob
import io
import os
import shutil
from typing import IO, Any

import numpy as np

from unisono._errors import InvalidArgumentError, MissingPackageError
from unisono._system._json import UNREADABLE
from unisono.tf.adapters.inputs._host_tensor import HostTensor

Path = str | os.PathLike[str]


def makedirs(path: Path) -> None:
    """Make a directory, and those that it lies in, where they are not there."""
    os.makedirs(path, exist_ok=True)


def listdir(path: Path) -> list[str]:
    """Return the names of what a directory holds."""
    return sorted(os.listdir(path))


def glob(pattern: str | list[str]) -> list[str]:
    """Return the paths that a pattern, or one of several, describes."""
    patterns = [pattern] if isinstance(pattern, str) else pattern
    return sorted({path for p in patterns for path in _glob.glob(p)})


def copy(src: Path, dst: Path, overwrite: bool = False) -> None:
    """Copy a file.

    Raises:
        FileExistsError: the other is there, and `overwrite` is False.
    """
    _check_free(dst, overwrite)
    shutil.copyfile(src, dst)


def rename(src: Path, dst: Path, overwrite: bool = False) -> None:
    """Rename a file or directory.

    Raises:
        FileExistsError: the other is there, and `overwrite` is False.
    """
    _check_free(dst, overwrite)
    os.replace(src, dst)


def GFile(name: Path, mode: str = "r") -> IO[Any]:  # noqa: N802 (TensorFlow's name)
    """Return an open file."""
    return open(name, mode, encoding=None if "b" in mode else "utf-8")


def read_file(filename: Path) -> bytes:
    """Return what a file holds; in datasets, and outside of functions."""
    with open(_text(filename), "rb") as file:
        return file.read()


def write_file(filename: Path, contents: bytes | str) -> None:
    """Write a file, and make the directories that it lies in."""
    target = _text(filename)
    os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
    with open(target, "wb") as file:
        file.write(contents.encode() if isinstance(contents, str) else contents)


def decode_image(contents: bytes, channels: int = 0, **kwargs: object) -> np.ndarray:
    """Return the pixels of an image file: an array of shape [height, width, channels], uint8.

    Raises:
        InvalidArgumentError: the file is no image, or is cut; or `channels` is another number than 0 (those
            of the file), 1, 3 and 4.
        MissingPackageError: Pillow is not installed.
    """
    picture = _picture(contents)
    mode = {0: picture.mode, 1: "L", 3: "RGB", 4: "RGBA"}.get(channels)
    if mode is None:
        raise InvalidArgumentError(
            f"channels must be 0 (those of the file), 1, 3 or 4. Received: channels={channels!r}."
        )
    pixels = np.asarray(picture.convert(mode))
    return (pixels[..., None] if pixels.ndim == 2 else pixels).view(HostTensor)


def _picture(contents: bytes) -> Any:
    """Return the image of a file, which has been read to its end."""
    pillow = _pillow()
    try:
        picture = pillow.open(io.BytesIO(contents))
        picture.load()
    # Pillow has no exception of its own for files that are cut or changed.
    except (*UNREADABLE, pillow.DecompressionBombError) as error:
        raise InvalidArgumentError(
            "An image must be a whole file of PNG, JPEG or another format of Pillow. Received: "
            f"{bytes(contents[:12])!r} of {len(contents)} bytes ({error or type(error).__name__})."
        ) from None
    return picture


def encode_png(image: Any, compression: int = -1) -> HostTensor:
    """Return a PNG file of pixels of shape [height, width, channels], as a tensor of bytes.

    Args:
        image: uint8, or uint16 with one channel.
        compression: 0 to 9; -1 for the default.
    """
    return _encoded(image, format="PNG", **({} if compression < 0 else {"compress_level": compression}))


def encode_jpeg(image: Any, format: str = "", quality: int = 95, **kwargs: object) -> HostTensor:  # noqa: A002
    """Return a JPEG file of pixels of shape [height, width, channels], uint8, as a tensor of bytes."""
    return _encoded(image, format="JPEG", quality=quality)


def _encoded(image: Any, **options: Any) -> HostTensor:
    pixels = np.asarray(image)
    file = io.BytesIO()
    _pillow().fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, **options)
    return np.asarray(file.getvalue(), object).view(HostTensor)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise MissingPackageError(
            "Images are read and written by Pillow, which is not installed. Write `pip install pillow`."
        ) from None
    return Image


def _check_free(path: Path, overwrite: bool) -> None:
    if not overwrite and os.path.exists(path):
        raise FileExistsError(f"{os.fspath(path)!r} exists. Write `overwrite=True` to replace it.")


def _text(path: Any) -> str:
    # A dataset of file names gives them as NumPy's strings or bytes.
    value = path.item() if isinstance(path, (np.ndarray, np.generic)) else path
    return os.fsdecode(value)
