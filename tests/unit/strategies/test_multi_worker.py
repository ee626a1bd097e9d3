import pytest

import unisono
from unisono.cluster import _distributed
from unisono.cluster_resolver import SimpleClusterResolver, Timeouts
from unisono.cluster_resolver._base import START_UP_VARIABLE

SPEC = unisono.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"]})


class Joined(Exception):
    pass


@pytest.mark.parametrize(
    ("variable", "timeouts", "seconds"),
    [(None, None, 60), ("600", None, 600), ("600", Timeouts(start_up=5), 5)],
)
def test_how_long_workers_wait_for_each_other(monkeypatch, variable, timeouts, seconds):
    def join(resolver, timeouts, *_):
        raise Joined(timeouts.start_up)

    monkeypatch.setattr(_distributed, "join", join)
    monkeypatch.delenv(START_UP_VARIABLE, raising=False)
    if variable:
        monkeypatch.setenv(START_UP_VARIABLE, variable)
    resolver = SimpleClusterResolver(SPEC, task_type="worker", task_id=0)
    with pytest.raises(Joined, match=f"^{seconds}"):
        unisono.MultiWorkerMirroredStrategy(resolver, timeouts=timeouts)
