"""Training without a model: its state is which batches were trained, and it goes on from what it restores.

Tests: tests/unit/test_simulated_files.py.
"""

import hashlib

import numpy as np

from unisono.checkpoint._snapshot import Snapshot


def weights_after(batches):
    """The weights of the undisturbed run after some batches: other ones for each number."""
    digest = hashlib.sha256(f"batches {batches}".encode()).digest()
    return np.frombuffer(digest, np.uint8)


def snapshot_after(batches):
    """A checkpoint of the undisturbed run."""
    return Snapshot({"weights": weights_after(batches)}, {"states": {}, "values": {"batches": batches}})


def batches_in(world, snapshot):
    """Return after how many batches a checkpoint was made; it must be one of the undisturbed run."""
    batches = snapshot.facts["values"]["batches"]
    weights = np.asarray(snapshot.arrays["weights"])
    world.check(
        np.array_equal(weights, weights_after(batches)),
        lambda: f"A checkpoint after {batches} batches has weights of another state.",
    )
    return batches
