"""Train on the servers of a cluster from a program outside of it: server and client.

Tests: tests/cluster/test_standalone.py.
"""

from unisono import _names

__getattr__, __dir__, __all__ = _names.lazy_names(__name__)
