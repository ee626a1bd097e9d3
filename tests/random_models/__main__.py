"""Checks the plans of a range of seeds: `python -m tests.random_models 0 300`; exits with 1 if one fails.

With `grids` as a third argument on replicas of two devices.
"""

import sys
import warnings

# First: it makes the devices, and compiles quickly.
import conftest  # noqa: F401
from tests.random_models import checks

warnings.simplefilter("ignore")
make = checks.grid_of if sys.argv[3:] == ["grids"] else checks.strategy_of
sys.exit(not checks.check_all(range(*map(int, sys.argv[1:3])), make))
