"""The contract of all strategies, and all features of `fit`, on real clusters of processes over Gloo.

Every worker runs the same tests; plain Keras on one device is computed by each for itself.
"""

import pytest

from tests.cluster._workers import Workers

CONTRACT = [
    "tests/virtual/strategies/test_contract.py",
    "tests/virtual/training/test_spread.py",
    "-k",
    "multi-worker or test_spread",
]
#: Those whose path through a cluster differs from that of the others; of two alike the harder one.
NAMES = "never or mean or (validation and data) or global or accumulation"
FEATURES = ["tests/virtual/training/test_exact.py", "-k", f"feature and ({NAMES})"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("count", "devices", "tests"),
    [(2, 1, CONTRACT), (2, 2, CONTRACT), (3, 1, CONTRACT), (2, 1, FEATURES)],
    ids=["2 x 1", "2 x 2", "3 x 1", "2 x 1, features of fit"],
)
def test_all_workers_keep_the_contract(tmp_path, count, devices, tests):
    options = ["-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base-{worker}"), "--timeout=120"]
    workers = Workers(tmp_path, ["-m", "pytest", "-q", "-x", *options, *tests], count, devices)
    codes = workers.wait(380)
    assert codes == [0] * count, workers.text()
