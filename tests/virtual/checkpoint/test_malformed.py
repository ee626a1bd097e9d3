"""Checkpoints whose hashes are right and whose contents are not: a clear error, or the checkpoint before."""

import hashlib
import json
import logging

import fsspec
import keras
import pytest

import unisono
from unisono import CheckpointError
from unisono.checkpoint import Checkpoint, CheckpointManager, list_variables


class Counter:
    """An object with a state."""

    def __init__(self):
        self.count = 0

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = int(state["count"])


def made(directory):
    """A checkpoint of each kind of contents, and its manager, that has saved 1 and 2."""
    checkpoint = Checkpoint(v=keras.Variable(0.0), counter=Counter(), number=3)
    manager = CheckpointManager(checkpoint, directory, in_one_file=True, asynchronous=False)
    for value in (1, 2):
        checkpoint.v.assign(float(value))
        checkpoint.counter.count = value
        manager.save()
    checkpoint.v.assign(0.0)
    return checkpoint, manager


def signed(manifest):
    """The text of a manifest with its hash of itself."""
    own = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(own, sort_keys=True).encode()
    return json.dumps({**own, "sha256": hashlib.sha256(text).hexdigest()})


def sign(path):
    """Make the manifest of a checkpoint fit its files again."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "MANIFEST.json").write_text(signed(manifest))


ENTRY = {"bytes": 4, "sha256": hashlib.sha256(b"evil").hexdigest()}
MANIFESTS = {
    "a list": lambda m: [],
    "a number": lambda m: 7,
    "no files": lambda m: {"format": 1},
    "files as a list": lambda m: m | {"files": [1]},
    "an entry as a number": lambda m: m | {"files": {"facts.json": 3}},
    "an entry without a hash": lambda m: m | {"files": {"facts.json": {"bytes": 3}}},
    "a negative size": lambda m: m | {"files": {"facts.json": {"bytes": -1, "sha256": ""}}},
    "a format as a text": lambda m: m | {"format": "1"},
    "no format": lambda m: {"files": m["files"]},
    "a folder as a number": lambda m: m | {"folder": 3},
    "a folder elsewhere": lambda m: m | {"folder": "../ckpt-1"},
    "a name of surrogates": lambda m: m | {"files": m["files"] | {"\ud800": ENTRY}},
    "an absolute name": lambda m: m | {"files": m["files"] | {"/etc/passwd": ENTRY}},
    "a name above": lambda m: m | {"files": m["files"] | {"../x": ENTRY}},
    "a file that is a folder": lambda m: m | {"files": m["files"] | {"facts.json/x": ENTRY}},
}
FACTS = {
    "a list": "[]",
    "no states": '{"values": {}}',
    "states as a list": '{"states": [], "values": {}}',
    "an unknown form": '{"states": {"counter": {"__kind__": "code"}}, "values": {}}',
    "a form as a list": '{"states": {"counter": {"__kind__": []}}, "values": {}}',
    "an array that is not there": '{"states": {"counter": {"__kind__": "array", "name": "w"}}, "values": {}}',
    "no base64": '{"states": {}, "values": {"number": {"__kind__": "bytes", "base64": 7}}}',
    "copies as a number": '{"states": {}, "values": {}, "copies": 7}',
    "copies of a scalar": '{"states": {}, "values": {}, "copies": ["v"]}',
    "too deep": '{"states": {"counter": ' + "[" * 900 + "]" * 900 + '}, "values": {}}',
    "no JSON": "{",
}


def check_falls_back(checkpoint, manager, caplog):
    newest = manager.checkpoints[-1]
    with pytest.raises(CheckpointError, match=r"must be.*Received"):
        checkpoint.restore(newest)
    with pytest.raises(CheckpointError):
        list_variables(newest)
    with caplog.at_level(logging.WARNING, logger="unisono"):
        assert manager.restore_or_initialize() == manager.checkpoints[-2]
    assert "Falling back to the one before" in caplog.text
    assert float(checkpoint.v.value) == 1.0 == checkpoint.counter.count


@pytest.mark.parametrize("shape", MANIFESTS)
def test_a_manager_passes_over_a_malformed_manifest(shape, tmp_path, caplog):
    checkpoint, manager = made(tmp_path)
    path = tmp_path / "ckpt-2" / "MANIFEST.json"
    found = MANIFESTS[shape](json.loads(path.read_text()))
    path.write_text(signed(found) if isinstance(found, dict) else json.dumps(found))
    check_falls_back(checkpoint, manager, caplog)


@pytest.mark.parametrize("shape", FACTS)
def test_a_manager_passes_over_malformed_facts(shape, tmp_path, caplog):
    checkpoint, manager = made(tmp_path)
    (tmp_path / "ckpt-2" / "facts.json").write_text(FACTS[shape])
    sign(tmp_path / "ckpt-2")
    check_falls_back(checkpoint, manager, caplog)


@pytest.mark.parametrize(
    "text", ['{"a": [[0], "nonsense"]}', '{"a": [[1000000000], "float32"]}', "[]", '{"a": 3}']
)
def test_a_manager_passes_over_malformed_shapes(text, tmp_path, caplog):
    checkpoint, manager = made(tmp_path)
    (tmp_path / "ckpt-2" / "empty_arrays.json").write_text(text)
    sign(tmp_path / "ckpt-2")
    check_falls_back(checkpoint, manager, caplog)


def test_a_note_of_kept_checkpoints_that_cannot_be_read_is_begun_again(tmp_path):
    checkpoint, manager = made(tmp_path)
    manager.close()
    (tmp_path / ".ckpt.preserved").write_text("[" * 9999)
    with CheckpointManager(checkpoint, tmp_path, 1, keep_checkpoint_every_n_hours=0.0) as manager:
        # The checkpoints are older than the manager.
        manager._began -= 3600.0
        manager.save()
    assert "ckpt-2" in json.loads((tmp_path / ".ckpt.preserved").read_text())


def test_a_state_of_another_class_is_an_error_that_names_it(tmp_path):
    made(tmp_path)
    other = Checkpoint(v=keras.Variable(0.0), counter=Counter(), number=3)
    (tmp_path / "ckpt-1" / "facts.json").write_text(
        '{"states": {"counter": {"x": 1}}, "values": {"number": 3}}'
    )
    sign(tmp_path / "ckpt-1")
    with pytest.raises(CheckpointError, match="state of 'counter' must be one that its `get_state`"):
        other.restore(tmp_path / "ckpt-1")


@pytest.fixture
def store():
    """The objects of a store in this process, by their keys."""
    client = fsspec.filesystem("memory")
    client.store.clear()
    yield client
    client.store.clear()


def put(client, key, content):
    """Write an object under exactly this key."""
    client.pipe_file("/new", content)
    client.store[key] = client.store.pop("/new")


@pytest.mark.parametrize("name", ["{}/escaped", "../../../../escaped", "data/../../../../../escaped"])
def test_a_checkpoint_in_a_store_writes_no_file_elsewhere(name, tmp_path, store, monkeypatch, caplog):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(inner))
    checkpoint, manager = made("memory://bucket/run")
    at, name = "/bucket/run/ckpt-2", name.format(tmp_path)
    manifest = json.loads(store.cat_file(f"{at}/MANIFEST.json"))
    put(store, f"{at}/{name}", b"evil")
    put(
        store, f"{at}/MANIFEST.json", signed(manifest | {"files": manifest["files"] | {name: ENTRY}}).encode()
    )
    check_falls_back(checkpoint, manager, caplog)
    assert not list(tmp_path.rglob("*escaped*"))


def test_a_model_in_a_store_writes_no_file_elsewhere(tmp_path, store, monkeypatch):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(inner))
    put(store, "/bucket/model/manifest.json", b"{}")
    put(store, "/bucket/model/../../../escaped", b"evil")
    with pytest.raises(unisono.InvalidArgumentError, match="must lie below it"):
        unisono.export.load("memory://bucket/model")
    with pytest.raises(unisono.InvalidArgumentError, match="must lie below it"):
        unisono.export.load_from_saved_model("memory://bucket/model")
    assert not list(tmp_path.rglob("*escaped*"))
