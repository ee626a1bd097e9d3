"""Exporters decide when to export, and which exports to keep."""

import types
from pathlib import Path

import numpy as np
import pytest

import unisono
from unisono.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter


class Model:
    """An Estimator that writes empty exports, with growing numbers."""

    def __init__(self, model_dir):
        self.model_dir, self.calls = str(model_dir), []

    def export_saved_model(self, path, receiver_fn, **options):
        self.calls.append((receiver_fn, options))
        directory = Path(path) / str(1_600_000_000 + len(self.calls))
        directory.mkdir(parents=True)
        return str(directory).encode()


@pytest.fixture
def model(tmp_path):
    return Model(tmp_path)


def export(exporter, model, tmp_path, loss=1.0, final=False):
    path = exporter.export(model, str(tmp_path / "export"), "ckpt-1", {"loss": loss}, final)
    return path and int(path[-3:])


def kept(tmp_path):
    return sorted(int(p.name[-3:]) for p in (tmp_path / "export").iterdir())


def receiver():
    return None


def test_final(model, tmp_path):
    exporter = FinalExporter("name", receiver, assets_extra={"a": "b"})
    assert isinstance(exporter, Exporter)
    assert exporter.name == "name"
    assert export(exporter, model, tmp_path) is None
    assert export(exporter, model, tmp_path, final=True) == 1
    assert model.calls == [(receiver, {"checkpoint_path": "ckpt-1", "assets_extra": {"a": "b"}})]


def test_latest_keeps_the_newest(model, tmp_path):
    (tmp_path / "export" / "temporary").mkdir(parents=True)
    (tmp_path / "export" / "temporary").rmdir()
    exporter = LatestExporter("name", receiver, exports_to_keep=2)
    assert [export(exporter, model, tmp_path) for _ in range(4)] == [1, 2, 3, 4]
    assert kept(tmp_path) == [3, 4]
    assert model.calls[0] == (receiver, {"checkpoint_path": "ckpt-1"})


def test_latest_can_keep_all(model, tmp_path):
    exporter = LatestExporter("name", receiver, exports_to_keep=None)
    for _ in range(7):
        export(exporter, model, tmp_path)
    assert len(kept(tmp_path)) == 7


def test_best(model, tmp_path):
    exporter = BestExporter(serving_input_receiver_fn=receiver, exports_to_keep=2)
    losses = [3.0, 4.0, 2.0, 2.0, 1.0]
    assert [export(exporter, model, tmp_path, loss) for loss in losses] == [1, None, 2, None, 3]
    assert kept(tmp_path) == [2, 3]


def test_best_by_another_metric(model, tmp_path):
    def is_better(best_eval_result, current_eval_result):
        return current_eval_result["loss"] > best_eval_result["loss"]

    exporter = BestExporter(serving_input_receiver_fn=receiver, compare_fn=is_better)
    assert [export(exporter, model, tmp_path, loss) for loss in (3.0, 2.0, 4.0)] == [1, None, 2]


def test_best_of_an_earlier_process(model, tmp_path):
    writer = unisono.summary.create_file_writer(str(tmp_path / "eval"))
    for step, loss in ((10, 2.0), (20, 0.5), (30, 1.0)):
        writer.write("scalar", "loss", step, np.float32(loss))
    writer.close()
    seen = []

    def is_better(best_eval_result, current_eval_result):
        seen.append((best_eval_result["loss"], current_eval_result["loss"]))
        return current_eval_result["loss"] < best_eval_result["loss"]

    exporter = BestExporter(serving_input_receiver_fn=receiver, compare_fn=is_better)
    assert (
        export(exporter, model, tmp_path, 0.75) == 1
    )  # the first of a process is exported, as in TensorFlow
    assert export(exporter, model, tmp_path, 0.9) is None
    assert seen == [(2.0, 0.5), (0.5, 1.0), (0.5, 0.75), (0.75, 0.9)]


def test_mistakes(model, tmp_path):
    with pytest.raises(unisono.InvalidArgumentError, match="exports_to_keep"):
        LatestExporter("name", receiver, exports_to_keep=0)
    with pytest.raises(unisono.InvalidArgumentError, match="serving_input_receiver_fn"):
        BestExporter()
    with pytest.raises(unisono.InvalidArgumentError, match="current_eval_result"):
        BestExporter(serving_input_receiver_fn=receiver, compare_fn=lambda best: True)
    with pytest.raises(unisono.InvalidTypeError, match="compare_fn"):
        BestExporter(serving_input_receiver_fn=receiver, compare_fn=True)
    with pytest.raises(unisono.InvalidArgumentError, match="name"):
        FinalExporter("", receiver)
    exporter = BestExporter(serving_input_receiver_fn=receiver)
    exporter.export(model, str(tmp_path), "ckpt-1", {"accuracy": 1.0}, False)
    with pytest.raises(unisono.InvalidArgumentError, match="without a loss"):
        exporter.export(model, str(tmp_path), "ckpt-2", {"accuracy": 1.0}, False)


def test_a_directory_that_cannot_be_removed_is_logged(model, tmp_path, monkeypatch, caplog):
    def fail(path):
        raise OSError("busy")

    monkeypatch.setattr("unisono.estimator.exporters.shutil", types.SimpleNamespace(rmtree=fail))
    exporter = LatestExporter("name", receiver, exports_to_keep=1)
    for _ in range(2):
        export(exporter, model, tmp_path)
    assert "busy" in caplog.text
