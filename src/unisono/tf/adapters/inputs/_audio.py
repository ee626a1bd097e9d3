"""`tf.audio`: sounds of WAV files, read by Python's `wave`.

Tests: tests/unit/tf/test_audio.py.
"""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np

from unisono._errors import InvalidArgumentError
from unisono.preprocessing._fingerprints import on_host
from unisono.tf.adapters.inputs._host_tensor import HostTensor


def decode_wav(
    contents: Any, desired_channels: int = -1, desired_samples: int = -1
) -> tuple[HostTensor, HostTensor]:
    """Return the samples of a WAV file of 16 bits, from -1 to 1, and their rate.

    Args:
        contents: the file's bytes.
        desired_channels: how many channels the file must have; -1 for any.
        desired_samples: how many samples are returned, cut or filled with zeros; -1 for all.

    Returns:
        An array of shape (samples, channels), and the number of samples in a second.

    Raises:
        InvalidArgumentError: the file is no WAV file of 16 bits, or has other channels.
    """
    try:
        with wave.open(io.BytesIO(on_host(contents, "tf.audio.decode_wav").item())) as file:
            bits, channels, rate = 8 * file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    # Where a part of the file is longer than the file, `wave` raises RuntimeError without a text.
    except (wave.Error, EOFError, RuntimeError, OverflowError) as error:
        raise InvalidArgumentError(
            f"A sound must be a WAV file. Received: another format ({error or 'it is cut'})."
        ) from None
    if bits != 16 or desired_channels not in (-1, channels):
        wanted = "" if desired_channels == -1 else f" with {desired_channels} channels"
        raise InvalidArgumentError(
            f"A sound must have 16 bits{wanted}. Received: {bits} bits, {channels} channels."
        )
    if len(data) % (2 * channels) or rate > np.iinfo(np.int32).max:
        raise InvalidArgumentError(
            "A WAV file must hold whole samples, and less than 2**31 of them in a second. Received: "
            f"{len(data)} bytes of {channels} channels, {rate} samples in a second."
        )
    samples = (np.frombuffer(data, "<i2").astype(np.float32) / 2**15).reshape(-1, channels)
    if desired_samples >= 0:
        missing = max(desired_samples - len(samples), 0)
        samples = np.pad(samples[:desired_samples], ((0, missing), (0, 0)))
    return samples.view(HostTensor), np.asarray(rate, np.int32).view(HostTensor)
