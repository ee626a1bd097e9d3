"""The table of names below `tf`, as one.

Tests: tests/unit/tf/test_names.py.
"""

from unisono.tf._module import NameTable
from unisono.tf.names._backend import BACKEND
from unisono.tf.names._core import CORE
from unisono.tf.names._distribution import DISTRIBUTION
from unisono.tf.names._estimator import ESTIMATOR
from unisono.tf.names._programs import PROGRAMS
from unisono.tf.names._version_1 import VERSION_1

#: All names.
TABLE = NameTable({**BACKEND, **VERSION_1, **CORE, **DISTRIBUTION, **PROGRAMS, **ESTIMATOR})
