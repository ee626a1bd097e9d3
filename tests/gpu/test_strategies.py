"""The contract of all strategies, and `fit` against one device, on the devices of this platform.

They are the tests of `tests/virtual`, collected here, too: see there what is compared, with which tolerance.
"""

from tests.virtual.strategies.test_contract import *  # noqa: F403
from tests.virtual.training.test_exact import *  # noqa: F403
