"""Directories of models and modules, caches and saved data, and files of records."""

import hashlib
import json

import keras
import numpy as np
from hypothesis import strategies as st

import unisono
from tests.fuzzing.changes import BYTE_CHANGES, SAME, TEXT_CHANGES, changed_bytes, changed_text
from unisono import tf
from unisono._export._files import MANIFEST, seal
from unisono._saved._directory import load as load_module
from unisono.data import Dataset, TFRecordDataset
from unisono.data._methods import SAVED
from unisono.data._pipeline import _store
from unisono.evaluator._restoring import Restorer


class Folders:
    """A directory with a manifest, whose body and files are changed and sealed again."""

    cases = st.tuples(st.sampled_from(["manifest", "body", "weights"]), TEXT_CHANGES, BYTE_CHANGES)
    unchanged = ("body", SAME, [])
    weights = "weights.npz"

    def __init__(self, folder):
        self.path = folder / "saved"
        self.save()
        self.text = (self.path / MANIFEST).read_bytes()
        self.record = json.loads(self.text)
        self.data = (self.path / self.weights).read_bytes()

    def run(self, case):
        kind, in_text, in_bytes = case
        text, data, record = self.text, self.data, self.record
        if kind == "manifest":
            text = changed_text(text, in_text)
        else:
            body = json.loads(json.dumps(record["body"]))
            if kind == "body":
                body = _parsed(changed_text(json.dumps(body), in_text))
            else:
                data = changed_bytes(data, in_bytes)
                body["files"][self.weights] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            text = seal(record["format"], record["version"], body).encode(errors="surrogatepass")
        (self.path / MANIFEST).write_bytes(text)
        (self.path / self.weights).write_bytes(data)
        self.load()


def _parsed(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


class ExportedModels(Folders):
    """What `unisono.export.load` reads."""

    def save(self):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        unisono.export.export(model, self.path)

    def load(self):
        loaded = unisono.export.load(self.path)
        _ = loaded.name, loaded.input_spec, loaded.output_spec, loaded.platforms, loaded.versions


class SavedModules(Folders):
    """What `tf.saved_model.load` reads."""

    def save(self):
        class Scaled(tf.Module):
            def __init__(self):
                super().__init__()
                self.v = tf.Variable(2.0)

            @tf.function
            def __call__(self, x):
                return {"y": x * self.v}

        module = Scaled()
        module(tf.constant([1.0, 2.0]))
        tf.saved_model.save(module, str(self.path))

    def load(self):
        load_module(self.path)


class SavedModels(Folders):
    """What `load_from_saved_model` reads, and an evaluator."""

    weights = "model.keras"

    def save(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        unisono.export.export_saved_model(self.model, self.path)

    def load(self):
        # Keras reads the file itself: here it is the one that was written.
        if (self.path / self.weights).read_bytes() == self.data:
            load_module(self.path)
        else:
            Restorer(self.model).restore(self.path / self.weights)


class CachedData:
    """A file of `save` and `cache`."""

    cases = st.one_of(BYTE_CHANGES, st.tuples(st.integers(0, 3), TEXT_CHANGES))
    unchanged = (1, SAME)

    def __init__(self, folder):
        self.folder, self.path = folder / "data", folder / "data" / SAVED
        elements = {"a": np.arange(3), "b": np.array([b"x", b"yy", b""], object)}
        Dataset.from_tensor_slices(elements).save(self.folder)
        self.content = self.path.read_bytes()
        count, start, self.magic = _store._END.unpack(self.content[-_store._END.size :])
        offsets = np.frombuffer(self.content[start : start + 8 * count], "<i8")
        self.records = [self.content[a:b] for a, b in zip(offsets, [*offsets[1:], start], strict=True)]

    def run(self, case):
        is_of_bytes = isinstance(case, list)
        self.path.write_bytes(changed_bytes(self.content, case) if is_of_bytes else self.rewritten(*case))
        list(Dataset.load(self.folder))

    def rewritten(self, number, change):
        """The file with another header of one element."""
        found, offsets = bytearray(_store._MAGIC), []
        for i, record in enumerate(self.records):
            offsets.append(len(found))
            (size,) = _store._LENGTH.unpack(record[: _store._LENGTH.size])
            begin = _store._LENGTH.size
            header = record[begin : begin + size]
            header = changed_text(header, change) if i == number else header
            found += _store._LENGTH.pack(len(header)) + header + record[begin + size :]
        end = _store._END.pack(len(offsets), len(found), self.magic)
        return bytes(found) + np.array(offsets, "<i8").tobytes() + end


class Records:
    """A TFRecord file."""

    cases = BYTE_CHANGES
    unchanged = ()

    def __init__(self, folder):
        self.path = folder / "records"
        with tf.io.TFRecordWriter(str(self.path)) as writer:
            for record in (b"one", b"", b"three" * 9):
                writer.write(record)
        self.content = self.path.read_bytes()

    def run(self, case):
        self.path.write_bytes(changed_bytes(self.content, case))
        list(TFRecordDataset(str(self.path)))
