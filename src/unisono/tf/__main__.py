"""`python -m unisono.tf script.py`: run a program that imports TensorFlow, without TensorFlow.

Tests: tests/unit/tf/test_run.py.
"""

import sys

from unisono.tf._run import main

if __name__ == "__main__":
    main(sys.argv[1:])
