"""Checkpoints, backups, and the small files beside them."""

import hashlib
import json
import tempfile
from pathlib import Path

import fsspec
import keras
import numpy as np
from hypothesis import strategies as st

from tests.fuzzing.changes import BYTE_CHANGES, SAME, TEXT_CHANGES, changed_bytes, changed_text
from unisono.callbacks._backup_series import Backups
from unisono.callbacks._fit_progress import Progress
from unisono.checkpoint import Checkpoint, CheckpointManager, list_variables
from unisono.checkpoint._json_state import encode
from unisono.checkpoint._markers import TrainingEnd, is_watched, mark_finished, read_mark
from unisono.checkpoint._rng_state import RandomState
from unisono.checkpoint._series import write_snapshot
from unisono.checkpoint._snapshot import Snapshot
from unisono.evaluator._evaluation_history import Evaluation, EvaluationHistory, read_record


def signed(text):
    """A manifest with the hash of its contents, where it has contents."""
    try:
        found = json.loads(text)
        found.pop("sha256", None)
        own = json.dumps(found, sort_keys=True).encode()
        return json.dumps({**found, "sha256": hashlib.sha256(own).hexdigest()}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return text


class Stateful:
    """An object with a state that is anything."""

    def __init__(self):
        self.state = {"a": (1, np.arange(3), b"x"), "b": [np.float32(2)]}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def _objects():
    return {"v": keras.Variable(1.0), "empty": keras.Variable(np.zeros((0, 3))), "s": Stateful(), "n": 3}


class SavedCheckpoints:
    """Two checkpoints: a change of the second one's file is never more than a step back."""

    #: The files of which one is changed.
    names = ("MANIFEST.json", "facts.json", "empty_arrays.json", "arrays.safetensors")
    cases = st.tuples(st.sampled_from(names), st.booleans(), TEXT_CHANGES, BYTE_CHANGES)
    unchanged = ("facts.json", True, SAME, [])

    def __init__(self, folder):
        self.checkpoint = Checkpoint(**_objects())
        self.manager = CheckpointManager(self.checkpoint, folder, in_one_file=True, asynchronous=False)
        for _ in range(2):
            self.manager.save()
        self.path = folder / "ckpt-2"
        self.files = {name: (self.path / name).read_bytes() for name in self.names}

    def changed(self, case):
        """The files of the checkpoint, with a manifest that fits, where it is to be signed."""
        name, is_signed, in_text, in_bytes = case
        before = self.files[name]
        files = dict(self.files)
        if name != "arrays.safetensors":
            files[name] = changed_text(before, in_text)
        elif is_signed:
            size = int.from_bytes(before[:8], "little")
            header = changed_text(before[8 : 8 + size], in_text)
            files[name] = len(header).to_bytes(8, "little") + header + before[8 + size :]
        else:
            files[name] = changed_bytes(before, in_bytes)
        if name == "MANIFEST.json":
            files[name] = signed(files[name]) if is_signed else files[name]
        elif is_signed:
            manifest = json.loads(self.files["MANIFEST.json"])
            manifest["files"][name] = {
                "bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()
            }  # fmt: skip
            files["MANIFEST.json"] = signed(json.dumps(manifest))
        return files

    def run(self, case):
        for name, content in self.changed(case).items():
            (self.path / name).write_bytes(content)
        restored = self.manager.restore_or_initialize()
        assert restored in self.manager.checkpoints
        self.checkpoint.restore(self.path)


class CheckpointsInStores(SavedCheckpoints):
    """The same, in an object store, from where files are copied."""

    names = ("MANIFEST.json",)
    cases = st.tuples(st.just("MANIFEST.json"), st.just(True), TEXT_CHANGES, BYTE_CHANGES)
    unchanged = ("MANIFEST.json", True, SAME, [])

    def __init__(self, folder):
        super().__init__(folder / "local")
        self.folder, self.client = folder / "a" / "b" / "c", fsspec.filesystem("memory")
        self.folder.mkdir(parents=True)
        names = ["MANIFEST.json", *json.loads(self.files["MANIFEST.json"])["files"]]
        self.files = {name: (self.path / name).read_bytes() for name in names}

    def run(self, case):
        before, tempfile.tempdir = tempfile.tempdir, str(self.folder)
        try:
            self.client.store.clear()
            found = self.changed(case)
            # Under each name that the manifest has, there is something to copy.
            for name, content in {
                **dict.fromkeys(_names_in(found["MANIFEST.json"]), b"evil"),
                **found,
            }.items():
                self.client.pipe_file("/new", content)
                self.client.store[f"/bucket/run/ckpt-2/{name}"] = self.client.store.pop("/new")
            list_variables("memory://bucket/run")
        finally:
            tempfile.tempdir = before
            self.client.store.clear()


def _names_in(text):
    """The names of files in a manifest, as far as it is one."""
    try:
        files = json.loads(text)["files"]
    except (ValueError, RecursionError, KeyError, TypeError):
        files = {}
    return list(files) if isinstance(files, dict) else []


class SavedBackups:
    """The newest backup of a `fit`, of which the facts are changed."""

    cases = TEXT_CHANGES
    unchanged = SAME

    def __init__(self, folder):
        random = RandomState().get_state()
        state = {"attributes": {"best": 1.0}, "functions": {"monitor_op": ("numpy", "less")}, "initial": {}}
        progress = Progress(
            epoch_random=random, random=random, callbacks=[state], callback_names=["keras.EarlyStopping"]
        )
        arrays = {"model/weights/kernel": np.ones(3)}
        facts = {"states": {}, "values": {}, "progress": encode(vars(progress), arrays, "progress")}
        for number in (1, 2):
            write_snapshot(folder, f"backup-{number}", Snapshot(arrays, facts), in_one_file=True)
        self.backups = Backups(folder, 2, asynchronous=False, read_only=True)
        self.path = folder / "backup-2"
        self.facts = (self.path / "facts.json").read_bytes()
        self.manifest = json.loads((self.path / "MANIFEST.json").read_text())

    def run(self, case):
        content = changed_text(self.facts, case)
        (self.path / "facts.json").write_bytes(content)
        self.manifest["files"]["facts.json"] = {
            "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()
        }  # fmt: skip
        (self.path / "MANIFEST.json").write_bytes(signed(json.dumps(self.manifest)))
        assert self.backups.begin() is not None


class Markers:
    """The mark of the end, the record of an evaluator, and the note of checkpoints that stay."""

    cases = st.tuples(st.integers(0, 2), TEXT_CHANGES)
    unchanged = (1, SAME)

    def __init__(self, folder):
        self.folder, self.other = folder, Path(tempfile.mkdtemp(dir=folder))
        mark_finished(folder)
        record = EvaluationHistory([Evaluation(3, {"loss": 0.5}, "ckpt-1", "99")], {"ckpt-1": "1-2"})
        (folder / "evaluations-eval.json").write_text(record.to_json())
        checkpoint = Checkpoint(v=keras.Variable(0.0))
        self.manager = CheckpointManager(
            checkpoint, folder / "kept", 1, keep_checkpoint_every_n_hours=1.0, asynchronous=False
        )
        self.manager.save()
        (folder / "kept" / ".ckpt.preserved").write_text(json.dumps({"ckpt-1": 1.0}))
        self.paths = [folder / "FINISHED", folder / "evaluations-eval.json", folder / "kept/.ckpt.preserved"]
        self.contents = [path.read_bytes() for path in self.paths]

    def run(self, case):
        which, change = case
        self.paths[which].write_bytes(changed_text(self.contents[which], change))
        read_mark(self.folder)
        is_watched(self.folder)
        TrainingEnd(self.folder).is_reached()
        record = read_record(self.folder / "evaluations-eval.json")
        record.forget(["ckpt-1"])
        record.to_json()
        assert not record.has(9, "x")
        self.manager._is_preserved(self.folder / "kept" / "ckpt-1")
