"""What is reported to Ray Train and Ray Tune, with stand-ins for both."""

import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest

import unisono
from unisono._errors import ContextError, InvalidArgumentError


class Checkpoint:
    """As much of Ray's as the callback uses: the files are there while it is reported."""

    def __init__(self, folder):
        self.files = sorted(path.name for path in Path(folder).iterdir())
        self.folder = folder

    from_directory = classmethod(lambda cls, folder: cls(folder))


class Ray:
    """Ray Train in a worker of some rank, or Ray Tune in a trial, with what was reported."""

    def __init__(self, monkeypatch, rank=None, trial=None, storage=None):
        self.reports = []
        train, tune = types.ModuleType("ray.train"), types.ModuleType("ray.tune")
        train.Checkpoint, train.report, tune.report = Checkpoint, self.report, self.report
        train.get_context = lambda: self._context(rank, storage)
        tune.get_context = lambda: types.SimpleNamespace(get_trial_id=lambda: trial)
        ray = types.ModuleType("ray")
        ray.is_initialized = lambda: True
        for name, module in {"ray": ray, "ray.train": train, "ray.tune": tune}.items():
            monkeypatch.setitem(sys.modules, name, module)

    def _context(self, rank, storage):
        if rank is None:
            raise RuntimeError("not on a worker")
        return types.SimpleNamespace(
            get_world_rank=lambda: rank, get_world_size=lambda: 2, get_storage=lambda: storage
        )

    def report(self, metrics, checkpoint=None):
        if checkpoint is not None:
            assert Path(checkpoint.folder).exists()
        self.reports.append((metrics, checkpoint))


def fitted(*callbacks):
    with unisono.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    x = np.ones((8, 2), "float32")
    return model.fit(x, x[:, :1], epochs=3, verbose=0, callbacks=list(callbacks)).history


@pytest.mark.parametrize(
    ("place", "saves"),
    [({"rank": 0}, True), ({"rank": 1}, False), ({"trial": "t1"}, True)],
    ids=["the first worker", "another worker", "a trial"],
)
def test_metrics_of_all_workers_and_one_model(monkeypatch, place, saves):
    ray = Ray(monkeypatch, **place)
    history = fitted(unisono.ray.ReportCallback(save_every=2))
    assert [metrics["mae"] for metrics, _ in ray.reports] == history["mae"]
    assert all(type(value) is float for metrics, _ in ray.reports for value in metrics.values())
    files = [checkpoint and checkpoint.files for _, checkpoint in ray.reports]
    assert files == [None, ["model.keras"] if saves else None, None]
    assert not any(checkpoint and Path(checkpoint.folder).exists() for _, checkpoint in ray.reports)


def test_chosen_metrics_without_models(monkeypatch):
    ray = Ray(monkeypatch, rank=0)
    fitted(unisono.ray.ReportCallback(save_every=0, metrics=["loss"]))
    assert [(list(metrics), checkpoint) for metrics, checkpoint in ray.reports] == [(["loss"], None)] * 3


def test_what_cannot_be_reported(monkeypatch):
    Ray(monkeypatch, rank=0)
    with pytest.raises(InvalidArgumentError, match="Received: accuracy; the logs have loss, mae"):
        fitted(unisono.ray.ReportCallback(metrics=["accuracy"]))
    with pytest.raises(InvalidArgumentError, match="save_every must be at least 0"):
        unisono.ray.ReportCallback(save_every=-1)
    Ray(monkeypatch)
    with pytest.raises(ContextError, match="a process that is neither"):
        fitted(unisono.ray.ReportCallback())


def test_the_storage_of_a_run(monkeypatch):
    def storage(kind):
        filesystem = types.SimpleNamespace(type_name=kind)
        return types.SimpleNamespace(storage_filesystem=filesystem, experiment_fs_path="/shared/run")

    Ray(monkeypatch, rank=1, storage=storage("local"))
    assert unisono.ray.storage_path("backup") == "/shared/run/backup"
    Ray(monkeypatch, rank=1, storage=storage("s3"))
    with pytest.raises(InvalidArgumentError, match=r"must be a folder .*s3:///shared/run"):
        unisono.ray.storage_path("backup")
