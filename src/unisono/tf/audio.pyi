"""Names of `tf.audio`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any

def decode_wav(contents: _Any, desired_channels: _b.int = ..., desired_samples: _b.int = ..., name: _b.str | None = ...) -> _Any:
    """Return the samples of a WAV file of 16 bits, from -1 to 1, and their rate."""
