"""What only `tests/gpu` has, on virtual CPU devices; the contract that it collects is tested here anyway."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [f"tests/gpu/test_{name}.py" for name in ("cluster", "devices", "processes")]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_the_suite_of_gpus_passes_on_cpu_devices():
    command = [sys.executable, "-m", "pytest", *FILES, "-k", "not contract", "-p", "no:cacheprovider"]
    env = os.environ | {"UNISONO_TEST_PLATFORM": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
