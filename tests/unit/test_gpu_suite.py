"""`tests/gpu` without a GPU: it is collected and skipped with a reason; `make gpu` installs what it needs."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What the tests of the folder run or import, besides what is in it.
NEEDED = [
    "conftest.py",
    "tests/conftest.py",
    "tests/ps_cluster.py",
    "tests/support.py",
    "tests/cluster/_workers.py",
    "tests/cluster/launch_support.py",
    "tests/cluster/programs/parameter_server.py",
    "tests/cluster/test_parameter_server.py",
    "tests/virtual/strategies/test_contract.py",
    "tests/virtual/strategies/test_multi_worker_program.py",
    "tests/virtual/strategies/test_fully_sharded_state.py",
    "tests/virtual/strategies/test_sharded_state.py",
    "tests/virtual/strategies/test_sharded_workers.py",
    "tests/virtual/training/_digits.py",
    "tests/virtual/training/test_exact.py",
]


@pytest.fixture(scope="module")
def skipped():
    """What pytest says where nothing names a platform."""
    env = {k: v for k, v in os.environ.items() if k != "UNISONO_TEST_PLATFORM"}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-rs", "-p", "no:cacheprovider"]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_everything_is_collected_and_skipped_with_a_reason(skipped):
    assert skipped.returncode == 0, skipped.stdout + skipped.stderr
    reasons = re.findall(r"SKIPPED \[(\d+)\].*run `make gpu`", skipped.stdout)
    assert sum(map(int, reasons)) > 200
    assert not re.search(r"\d+ (passed|failed|error)", skipped.stdout)


def test_the_group_has_what_the_suite_imports():
    """Packages that tests/gpu and the tests that it collects import, also in functions."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = pyproject["project"]["optional-dependencies"]["cluster"]
    packages = [*pyproject["project"]["dependencies"], *extra, *pyproject["dependency-groups"]["gpu"]]
    words = {re.split(r"[\[>=;-]", package.replace("scikit-learn", "sklearn"))[0] for package in packages}
    known = words | set(sys.stdlib_module_names) | {"tests", "unisono"}
    files = [*(ROOT / "tests/gpu").rglob("*.py"), *(ROOT / name for name in NEEDED)]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.partition(".")[0] in known, f"{path} imports {name}"
