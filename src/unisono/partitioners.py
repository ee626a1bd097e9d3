"""How `ParameterServerStrategy` cuts large variables into shards: TensorFlow's partitioners.

Tests: tests/unit/parameter_server/test_partition.py.
"""

from unisono import _names

__getattr__, __dir__, __all__ = _names.lazy_names(__name__)
