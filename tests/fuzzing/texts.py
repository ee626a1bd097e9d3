"""What users and other programs write: lists of hosts and terms, records, events, sounds, CSV."""

import contextlib
import io
import wave
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import strategies as st

from tests.fuzzing.changes import BYTE_CHANGES, TEXTS, changed_bytes
from tests.fuzzing.launches import checked
from unisono import tf
from unisono.cluster_resolver import _hosts
from unisono.data import ArrayRecordDataset
from unisono.estimator._hparams import HParams
from unisono.estimator.hooks._early_stopping import read_eval_metrics
from unisono.feature_column import categorical_column_with_vocabulary_file
from unisono.launcher._options import LaunchOptions
from unisono.launcher.engines._mpi import first_ended
from unisono.launcher.engines._settings import rank_hosts
from unisono.launcher.engines._slurm_job import first_killed, read_states
from unisono.preprocessing import IntegerLookup, StringLookup


class Lists:
    """A hostfile, vocabularies in files, SageMaker's file of hosts, and hyperparameters in a text."""

    cases = st.tuples(BYTE_CHANGES, TEXTS)
    unchanged = ([], "rate=0.5")

    def __init__(self, folder):
        self.path = folder / "list"

    def run(self, case):
        in_bytes, text = case
        readers = {
            b"node1 slots=4\nnode2 slots=1 max_slots=2\n# none\n": [lambda: rank_hosts(str(self.path))],
            b"red\ngreen\r\nblue\n": [
                lambda: StringLookup().set_vocabulary(str(self.path)),
                lambda: categorical_column_with_vocabulary_file("color", self.path),
            ],
            b"7\n12\n-3\n": [
                lambda: IntegerLookup().set_vocabulary(str(self.path)),
                lambda: categorical_column_with_vocabulary_file("color", self.path, dtype="int64"),
            ],
            b'{"hosts": ["algo-1", "algo-2"], "current_host": "algo-2"}': [self.sagemaker],
        }
        for content, reads in readers.items():
            self.path.write_bytes(changed_bytes(content, in_bytes))
            for read in reads:
                checked(read)
        assignment = changed_bytes(b"rate=0.1,units=[8,4],name=a", in_bytes).decode(errors="surrogateescape")
        for each in (assignment, text):
            checked(lambda each=each: HParams(rate=0.5, units=[1, 2], name="b").parse(each))

    def sagemaker(self):
        """The hosts of a job of SageMaker."""
        before, _hosts.RESOURCES = _hosts.RESOURCES, self.path
        try:
            _hosts._sagemaker_hosts({})
        finally:
            _hosts.RESOURCES = before


_STATES = "JobId=7 ArrayTaskId=2 JobState=FAILED Reason=NonZeroExitCode ExitCode=0:9 NodeList=n[1-2]\n"
_SRUN = "srun: error: n2: task 1: Killed\n"
_MPIRUN = "mpirun noticed that process rank 1 with PID 9 on node a exited on signal 9 (Killed).\n"


class EngineLogs:
    """What Slurm and Open MPI say of a job."""

    cases = BYTE_CHANGES
    unchanged = ()

    def __init__(self, folder):
        pass

    def run(self, case):
        texts = [changed_bytes(t.encode(), case).decode(errors="replace") for t in (_STATES, _SRUN, _MPIRUN)]
        read_states(texts[0])
        first_killed(texts[1], LaunchOptions(workers=2))
        first_ended(texts[2], LaunchOptions(workers=2))


class Examples:
    """Records of `tf.train.Example`, lines of CSV, and sounds."""

    cases = BYTE_CHANGES
    unchanged = ()

    def __init__(self, folder):
        features = {
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=[1.0, 2.0])),
            "n": tf.train.Feature(int64_list=tf.train.Int64List(value=[3])),
            "s": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"abc"])),
        }
        example = tf.train.Example(features=tf.train.Features(feature=features))
        self.record = example.SerializeToString(deterministic=True)
        self.features = {
            "x": tf.io.FixedLenFeature([2], tf.float32),
            "n": tf.io.FixedLenFeature([], tf.int64),
            "s": tf.io.FixedLenSequenceFeature([], tf.string, allow_missing=True),
        }
        sound = io.BytesIO()
        with contextlib.closing(wave.open(sound, "wb")) as file:
            file.setnchannels(2)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(bytes(range(64)))
        self.sound = sound.getvalue()
        image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
        self.images = [tf.io.encode_png(image).item(), tf.io.encode_jpeg(image).item()]

    def run(self, case):
        changed = changed_bytes(self.record, case)
        checked(lambda: tf.io.parse_single_example(changed, self.features))
        line = changed_bytes(b'7,0.5,"a, b"', case)
        checked(lambda: tf.io.decode_csv([line], [0, 0.0, ""]))
        checked(lambda: tf.audio.decode_wav(changed_bytes(self.sound, case)))
        for image in self.images:
            checked(lambda image=image: tf.io.decode_image(changed_bytes(image, case)))


class EventFiles:
    """What `read_eval_metrics` reads: the event files of an evaluation."""

    cases = BYTE_CHANGES
    unchanged = ()

    def __init__(self, folder):
        writer = tf.summary.create_file_writer(str(folder))
        with writer.as_default():
            for step in range(3):
                tf.summary.scalar("loss", 0.5, step=step)
        writer.close()
        (self.path,) = Path(folder).glob("*.tfevents.*")
        self.content = self.path.read_bytes()

    def run(self, case):
        self.path.write_bytes(changed_bytes(self.content, case))
        read_eval_metrics(str(self.path.parent))


class ArrayRecords:
    """A file of ArrayRecord, which another library reads: an error or records, and no crash."""

    cases = BYTE_CHANGES
    unchanged = ()

    def __init__(self, folder):
        self.path = folder / "records"
        writer = ArrayRecordWriter(str(self.path), "group_size:1")
        for record in (b"one", b"", b"three" * 9):
            writer.write(record)
        writer.close()
        self.content = self.path.read_bytes()

    def run(self, case):
        self.path.write_bytes(changed_bytes(self.content, case))
        list(ArrayRecordDataset(str(self.path)).as_numpy_iterator())
