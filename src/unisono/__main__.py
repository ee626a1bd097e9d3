"""Run the command `unisono` as `python -m unisono`.

Tests: tests/cluster/test_launch.py.
"""

from unisono.cli._app import main

if __name__ == "__main__":
    main()
