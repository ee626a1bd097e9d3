"""Launches on Kubernetes whose pods are processes of this machine; the launcher is the command."""

import shutil
import threading
import time
from pathlib import Path

import pytest

from tests import forked
from tests.kubernetes import LocalNode
from unisono.watch._places import find_job

pytest.importorskip("kubernetes")
pytestmark = pytest.mark.exhaustive
PROGRAM = Path(__file__).parent / "programs" / "on_kubernetes.py"


@pytest.fixture
def launched(tmp_path):
    """Run a launch; return its exit code, output and messages."""
    shutil.copy(PROGRAM, tmp_path / "train.py")
    (tmp_path / "volume").mkdir()
    node = LocalNode(tmp_path, tmp_path / "volume")

    def run(*words, at=lambda node: None):
        def look(_):
            # Each request has a thread of its own.
            with lock:
                at(node)

        node.at, lock = look, threading.Lock()
        launch = ["-m", "unisono", "launch", "--on", "kubernetes", "--image", "t:1", "--log-dir", "logs"]
        with node.serving(tmp_path) as config:
            done = forked.run([*launch, *words], tmp_path, 400.0, forked.environment(KUBECONFIG=str(config)))
        assert not node.objects, done
        return done

    try:
        yield run
    finally:
        node.close()


def test_a_killed_worker_starts_again_from_the_backup(launched, tmp_path):
    """Before that, its probes: the first worker lives, and is ready when the second one has joined it."""
    words = ("-n", "2", "--max-restarts", "1", "train.py", "workers", str(tmp_path), "killed", "probed")
    first, second = "unisono-train-worker-0", "unisono-train-worker-1"
    found = []

    def at(node):
        if not found:
            node.held = {second}
            found.append("begun")
        elif found == ["begun"] and node.probe(first, "livenessProbe") == 200:
            found.append(node.probe(first, "readinessProbe"))
            node.held = set()
        elif len(found) == 2 and {node.probe(p, "readinessProbe") for p in (first, second)} == {200}:
            found.append("ready")
            (tmp_path / "probed").touch()

    done = launched(*words, at=at)
    assert found == ["begun", 503, "ready"], done
    assert done.returncode == 0, done
    assert "unisono: worker:1 ended with exit code 137\n" in done.stderr
    # Only the first worker prints here; the second epoch was not begun twice before the kill.
    assert done.stdout.endswith("[worker:0] replicas 2 epochs [0, 1, 2]\n"), done
    assert (tmp_path / "logs" / "worker-1.log").read_text().count("epoch 1") == 2


def test_a_jobset_with_parameter_servers(launched, tmp_path):
    flags = ("--kind", "jobset", "-n", "1", "--ps", "1", "--chief")
    pods = [f"unisono-train-{job}-0-0" for job in ("chief", "worker", "ps")]
    looks = []

    def at(node):
        looks.append(None)
        # Pods start after the first look; the chief goes on when all have been ready.
        if len(looks) > 1 and {node.probe(pod, "readinessProbe") for pod in pods} == {200}:
            (tmp_path / "probed").touch()

    done = launched(*flags, "train.py", "ps", str(tmp_path), "probed", at=at)
    assert (tmp_path / "probed").exists(), done
    assert done.returncode == 0, done
    assert done.stdout.endswith("[chief:0] replicas 1 epochs [0, 1, 2]\n"), done
    assert "epoch" not in (tmp_path / "logs" / "worker-0.log").read_text()


HELD = """\
import sys, time
from pathlib import Path
import keras, numpy as np
import unisono

class Slow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.2)
        self.model.stop_training = Path(sys.argv[1]).exists()

with unisono.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((8, 2), "float32")
model.fit(x, x[:, :1], epochs=10_000, batch_size=8, verbose=0, callbacks=[Slow()])
"""


def test_a_launch_is_watched_by_its_name(launched, tmp_path, monkeypatch):
    """Its task writes events in the pod, and they are read through the API server while it trains."""
    (tmp_path / "held.py").write_text(HELD)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    location = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(location, str(tmp_path / "kubeconfig"))
    seen, begins = [], threading.Event()

    def watch():
        deadline = time.monotonic() + 120.0
        try:
            assert begins.wait(60.0)
            reader = find_job("k8s:unisono-held")
            while time.monotonic() < deadline:
                job = reader.refresh()
                if [bool(task.step and task.step > 2) for task in job.tasks] == [True]:
                    seen.append(job)
                    break
                time.sleep(0.1)
        finally:
            (tmp_path / "stop").touch()
        while (job := reader.refresh()).state != "ended" and time.monotonic() < deadline:
            time.sleep(0.1)
        seen.append(job)
        reader.folder.close()

    def at(node):
        if node.objects:
            begins.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    done = launched("-n", "1", "held.py", str(tmp_path / "stop"), at=at)
    watcher.join()
    assert done.returncode == 0, done
    running, over = seen
    assert (running.title, running.state, running.epochs) == ("unisono-held on Kubernetes", "runs", 10_000)
    assert "loss" in {curve.name for curve in running.curves}
    # Its pods may be deleted before the next look.
    assert (over.state, over.exit_code in (0, None)) == ("ended", True)


def test_a_trainjob_on_kubeflows_runtime(launched, tmp_path):
    done = launched("--kind", "trainjob", "-n", "2", "train.py", "workers", str(tmp_path))
    assert done.returncode == 0, done
    assert done.stdout.endswith("[worker:0] replicas 2 epochs [0, 1, 2]\n"), done
