"""A short run of `benchmarks/standalone_hostile.py`: nothing changes for a client that trains."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import standalone_hostile

FRAMES, SEED = 10_000, 20261122


@pytest.mark.timeout(300)
def test_hostile_requests_change_nothing(monkeypatch):
    # Set here, so that it ends with the test: the benchmark is a program of its own otherwise.
    monkeypatch.setenv("UNISONO_CLUSTER_KEY", standalone_hostile.SECRET)
    print(f"seed {SEED}")
    result = standalone_hostile.run(FRAMES, SEED)
    print(result)
    assert result["wrong"] == []
    assert result["exit code"] == 0
    assert result["steps"] > 0
    assert result["processes"] == 1
    # Frames that are none, and messages that make no sense: half of what is sent by the connection, less what
    # a connection took with it that was closed.
    assert result["rejected"] > 0.4 * FRAMES
    assert result["refused"] > 0.3 * FRAMES
    assert result["growth"] < 32 << 20
