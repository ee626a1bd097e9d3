"""The contract of all strategies, and all features of `fit`, on real clusters of processes over Gloo.

Every worker runs the same tests; plain Keras on one device is computed by each for itself.
"""

import pytest

from tests.cluster._workers import Workers

CONTRACT = [
    "tests/virtual/strategies/test_contract.py",
    "tests/virtual/strategies/test_multi_worker_program.py",
    "tests/virtual/strategies/test_sharded_workers.py",
]
#: Replicas of two devices.
GRIDS = ["tests/virtual/strategies/test_replica_grid_workers.py"]
#: The same, with state in parts on the replicas, too.
SHARDED_GRIDS = ["tests/virtual/strategies/test_sharded_grid_workers.py"]
#: The same replicas, which train apart.
LOCAL_GRIDS = ["tests/virtual/strategies/test_local_grid_workers.py"]
#: Replicas whose devices belong to two processes.
SPANNING = ["tests/virtual/strategies/test_spanning_workers.py"]
#: The same, with state in parts on the replicas, too, or compressed gradients; and Estimators.
SPANNING_SHARDS = ["tests/virtual/strategies/test_spanning_shards.py"]
ESTIMATORS = ["tests/virtual/strategies/test_spanning_estimator.py"]
FEATURES = ["tests/virtual/training/test_exact.py"]
#: Those whose path through a cluster differs from that of the others; of two alike the harder one.
NAMES = "(never and (size or weights)) or (validation and data) or global or accumulation"
#: Further models whose rows never divide; what a worker does with the rows is the same.
MORE = "feature and ((never and not (size or weights)) or mean)"
ALL = f"multi-worker or test_multi_worker_program or test_spread or thin or (feature and ({NAMES}))"
#: One replica has no other to share its state with: that is seen in a few tests.
ONE_REPLICA = "not spanning_shards and not local_grid and not compression or learns"
ONE_REPLICA += " or (training and not inside and not overlap)"
#: What depends on the number of workers and devices: whole programs on three workers, whose shares are never
#: equal, and the contract where a worker has several devices.
PROGRAM = ["tests/virtual/strategies/test_multi_worker_program.py", "-k", "not compiled"]
SOME = "(multi-worker or test_spread) and not compiled"
#: A training and its files in each layout, and what two replicas exchange where weights lie in parts, too.
#: What is resumed is in test_killed_grid.py, and all of it on one replica.
HARDER = "training or (not [sharded] and not resume and not whole_weights and not learns)"


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    ("count", "devices", "tests"),
    [
        pytest.param(2, 1, [*CONTRACT, *FEATURES, *SPANNING, "-k", ALL], id="2 x 1, with features of fit"),
        pytest.param(2, 4, [*GRIDS, "-k", "training"], id="2 x 4"),
        pytest.param(2, 4, [*GRIDS, "-k", "not training"], id="2 x 4, more", marks=pytest.mark.exhaustive),
        pytest.param(2, 4, SHARDED_GRIDS, id="2 x 4, in parts", marks=pytest.mark.exhaustive),
        pytest.param(2, 4, [*LOCAL_GRIDS, "-k", "inside"], id="2 x 4, apart", marks=pytest.mark.exhaustive),
        pytest.param(
            4,
            2,
            [*LOCAL_GRIDS, "-k", "across and overlap"],
            id="2 replicas over 2 x 2 each, apart",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            2,
            1,
            [*SPANNING, *SPANNING_SHARDS, *LOCAL_GRIDS, "-k", f"not thin and ({ONE_REPLICA})"],
            id="1 replica over 2",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(4, 1, SPANNING, id="2 replicas over 2 each", marks=pytest.mark.exhaustive),
        pytest.param(
            4,
            1,
            [*SPANNING_SHARDS, "-k", HARDER],
            id="2 replicas over 2 each, in parts",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(4, 1, ESTIMATORS, id="2 replicas over 2 each, Estimators", marks=pytest.mark.exhaustive),
        pytest.param(2, 1, [*FEATURES, "-k", MORE], id="2 x 1, more", marks=pytest.mark.exhaustive),
        pytest.param(2, 2, [*CONTRACT, "-k", SOME], id="2 x 2", marks=pytest.mark.exhaustive),
        pytest.param(3, 1, PROGRAM, id="3 x 1", marks=pytest.mark.exhaustive),
    ],
)
def test_all_workers_keep_the_contract(tmp_path, count, devices, tests):
    options = ["-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base-{worker}"), "--timeout=500"]
    workers = Workers(tmp_path, ["-m", "pytest", "-q", "-x", *options, *tests], count, devices)
    codes = workers.wait(1200)
    assert codes == [0] * count, workers.text()
