"""Which devices may be a replica."""

from types import SimpleNamespace

import pytest

import unisono
from unisono.model_parallel._replica_grid import ReplicaGrid


def devices(*processes):
    """A device of each of these processes."""
    return tuple(SimpleNamespace(process_index=p, id=i) for i, p in enumerate(processes))


@pytest.mark.parametrize(
    ("processes", "size", "span"),
    [((0, 0, 1, 1), 2, 1), ((0, 1, 2, 3), 2, 2), ((0, 0, 1, 1), 4, 2), ((0, 0, 0, 0), 4, 1)],
)
def test_a_replica_has_devices_of_one_process_or_all_of_several(processes, size, span):
    assert ReplicaGrid(devices(*processes), size).processes_per_replica == span


@pytest.mark.parametrize(
    ("processes", "size", "message"),
    [
        # One device of each of two processes that have others, too.
        ((0, 0, 0, 1, 1, 1), 2, r"devices_per_replica=2.*replica 1 .*processes \[0, 1\], which have 3, 3\."),
        # The second replica would have another number of processes.
        ((0, 1, 2, 2), 2, r"replica 1 devices of the processes \[2\], which have 2\."),
        ((0, 0, 1, 2), 2, r"replica 1 devices of the processes \[1, 2\], which have 1, 1\."),
    ],
)
def test_other_devices_are_an_error(processes, size, message):
    with pytest.raises(unisono.InvalidArgumentError, match=message):
        ReplicaGrid(devices(*processes), size)
