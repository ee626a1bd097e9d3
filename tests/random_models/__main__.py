"""Checks the plans of a range of seeds: `python -m tests.random_models 0 300`; exits with 1 if one fails."""

import sys
import warnings

# First: it makes the devices, and compiles quickly.
import conftest  # noqa: F401
from tests.random_models import checks

warnings.simplefilter("ignore")
sys.exit(not checks.check_all(range(*map(int, sys.argv[1:3]))))
