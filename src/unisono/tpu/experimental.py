"""The names of `tf.tpu.experimental`.

Tests: tests/unit/test_tpu.py.
"""

from unisono import _names

__getattr__, __dir__, __all__ = _names.lazy_names(__name__)
