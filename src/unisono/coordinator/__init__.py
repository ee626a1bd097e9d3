"""Schedule functions on the workers of a `ParameterServerStrategy`, as `tf.distribute.coordinator` does.

Tests: tests/virtual/test_coordinator.py.
"""

from unisono import _names

__getattr__, __dir__, __all__ = _names.lazy_names(__name__)
