"""A real Ray with two nodes, which all tests of this file share: Ray Train, and `unisono.ray.Trainer`."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import unisono
from tests.cluster.launch_support import LIMIT, check_evaluated, is_alive, until
from tests.cluster.programs.ray_training import served, train_and_save, train_with_a_kill, trained
from tests.cluster.ray_support import ray_cluster
from unisono.watch._places import find_job

PROGRAMS = Path(__file__).parent / "programs"
ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    # Ray's own.
    pytest.mark.filterwarnings("ignore"),
]


#: An actor imports the library, on however busy a machine.
Trainer = functools.partial(unisono.ray.Trainer, start_timeout=200.0)


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster() as made:
        yield made


def test_more_workers_than_room(cluster):
    with pytest.raises(ValueError, match=r"4 worker with 1 CPU; .*2 nodes \(.*\), with room for 3 workers"):
        Trainer(print, workers=4).fit()
    assert cluster.free()["CPU"] == 3


def test_an_exception_is_raised_with_its_traceback(cluster, capfd):
    def divides(by):
        print("about to divide")
        return 1 / by

    with pytest.raises(ZeroDivisionError) as caught:
        Trainer(divides, workers=1, args=(0,)).fit()
    assert "in divides" in str(caught.value.__cause__)
    assert "[worker:0] about to divide" in capfd.readouterr().out


class OnRay:
    """`unisono launch --on ray` in a folder of its own."""

    def __init__(self, cluster, root, *words, **options):
        self.logs = root / "logs"
        command = (sys.executable, "-m", "unisono", "launch", "--on", "ray", "--log-dir", self.logs, *words)
        environ = {**os.environ, "RAY_ADDRESS": cluster.address}
        self.process = subprocess.Popen(
            command, cwd=root, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            **options,
        )  # fmt: skip

    def end(self):
        out, err = self.process.communicate(timeout=2 * LIMIT)
        return self.process.returncode, out, err


def test_a_launch_with_an_evaluator_that_asks_for_a_restart(cluster, tmp_path):
    flags = ("--evaluator", "--max-restarts", "1")
    run = OnRay(cluster, tmp_path, *flags, PROGRAMS / "evaluated.py", tmp_path / "backup", "42")
    code, out, err = run.end()
    assert code == 0, out + err
    assert "a task requested a restart; asking the others to save" in err
    check_evaluated(run.logs)


SCRIPT = """\
import os, sys, time
import beside
print("begins", os.environ["A_VARIABLE"], sys.argv[1:], flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
beside.fail()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("def fail():\n    raise ValueError('a bad number')\n")
    return ("--runtime-env-json", '{"env_vars": {"A_VARIABLE": "set"}}', "train.py")


def test_a_module_beside_the_script_travels_and_the_cause_is_last(cluster, tmp_path, script):
    code, out, err = OnRay(cluster, tmp_path, *script, "fail", "--lr=1").end()
    assert code == 1, out + err
    assert "[worker:0] begins set ['fail', '--lr=1']\n" in out
    assert "worker:0 failed: ValueError: a bad number, in generation 0" in err
    assert err.rstrip().endswith("ValueError: a bad number")


def test_ctrl_c_ends_the_tasks(cluster, tmp_path, script):
    run = OnRay(cluster, tmp_path, "-n", "2", *script, "wait", start_new_session=True)
    logs = [run.logs / f"worker-{i}.log" for i in range(2)]
    until(lambda: all(log.exists() and "begins" in log.read_text() for log in logs), "the tasks")
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.end()
    assert code == 130, out + err
    until(lambda: cluster.free()["CPU"] == 3, "free resources")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resource", "CPU=1", "--resource", "GPU=2"], "worker-0 needs 2 GPU, and no node has more than 0"),
        (["--address", "127.0.0.1:9"], r"A cluster of Ray must run at the address. Received: '127.0.0.1:9'"),
    ],
)
def test_errors_before_anything_starts(cluster, tmp_path, script, flags, message):
    code, _, err = OnRay(cluster, tmp_path, *flags, *script, "wait").end()
    assert (code, message in err) == (2, True), err
    assert not (tmp_path / "logs").exists()


def test_launch_on_ray_returns_what_each_worker_has_returned(cluster, monkeypatch):
    def task(*names):
        here = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        return [here, *map(os.environ.get, names)]

    # After Ray's nodes were started: as from a shell on another machine.
    for name in ("OF_THE_SHELL", "NAMED", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "shell")
    found = unisono.launch(
        task, 2, ("OF_THE_SHELL", "NAMED", "SSH_AUTH_SOCK"), on="ray", resource="slot=1",
        runtime_env_json='{"env_vars": {"NAMED": "runtime_env"}}',
    )  # fmt: skip
    assert found == [[0, "shell", "runtime_env", None], [1, "shell", "runtime_env", None]]


def test_a_chief_that_does_not_return_is_named(cluster):
    with pytest.raises(unisono.ClusterError, match=r"Received: worker:0, whose process exited with code 0"):
        Trainer(os._exit, workers=1, ps=1, args=(0,)).fit()


WATCHED = """\
import sys, time
from pathlib import Path
import keras, numpy as np
import unisono

class Slow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.2)
        self.model.stop_training = Path(sys.argv[1]).exists()

with unisono.MirroredStrategy().scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((8, 2), "float32")
model.fit(x, x[:, :1], epochs=10_000, batch_size=8, verbose=0, callbacks=[Slow()])
"""


def shows_steps(where):
    """Whether a watch of a job shows steps of one task; what it shows is returned."""
    job = find_job(where).refresh()
    return job if [task.step and task.step > 2 for task in job.tasks] == [True] else None


def test_a_job_is_watched_by_its_name(cluster, tmp_path, monkeypatch):
    """From another folder by Ray alone, and where the launcher writes its history with that."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / "watched.py").write_text(WATCHED)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with pytest.raises(ValueError, match=f"no job has this name.*{cluster.address}"):
        find_job("watched.py")
    run = OnRay(cluster, root, "-n", "1", "watched.py", tmp_path / "stop")
    until((run.logs / "launch.json").exists, "the launch")
    until(lambda: shows_steps(str(run.logs)), "steps of the task")
    by_name = shows_steps("watched.py")
    assert (by_name.title, by_name.state) == ("watched.py on Ray", "runs")
    # The launcher's history has no steps, and the actor's files know nothing of restarts.
    with_history = shows_steps(str(run.logs))
    assert (with_history.restarts_left, with_history.state) == (0, "runs")
    words = [sys.executable, "-m", "unisono", "watch", "--once", "watched.py"]
    shown = subprocess.run(words, check=False, capture_output=True, text=True, timeout=LIMIT)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "watched.py on Ray" in shown.stdout
    assert "worker:0" in shown.stdout
    (tmp_path / "stop").touch()
    code, out, err = run.end()
    assert code == 0, out + err
    # An ended launch is read from its folder; its actors are gone.
    assert find_job(str(run.logs)).refresh().state == "ended"
    with pytest.raises(ValueError, match="no job has this name"):
        find_job("watched.py")


DRIVER = """
import os, sys, time, ray, unisono
def wait():
    print("at work", os.getpid(), flush=True)
    time.sleep(600)
ray.init(address=sys.argv[1], log_to_driver=False)
unisono.ray.Trainer(wait, workers=2, start_timeout=200.0).fit()
"""


def test_the_end_of_the_driver_ends_its_tasks(cluster, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        tasks = []
        while len(tasks) < 2:
            line = driver.stdout.readline()
            assert line, "the driver has ended"
            tasks += [int(line.split()[-1])] if "at work" in line else []
        driver.send_signal(signal.SIGKILL)
    until(lambda: not any(map(is_alive, tasks)), "the end of the tasks")
    until(lambda: cluster.free()["CPU"] == 3, "free resources")


def alone(x, batch_size):
    """The losses of one device."""
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model.fit(x, x[:, :1], epochs=2, batch_size=batch_size, shuffle=False, verbose=0).history["loss"]


def test_parameter_servers(cluster):
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    losses = Trainer(served, workers=1, ps=1, args=(x,)).fit()
    np.testing.assert_allclose(losses, alone(x, 8), rtol=1e-5)


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """What Ray Train's workers have computed, and the folder with their files."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    folder = tmp_path_factory.mktemp("train")
    x = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
    data = ray.data.from_items([{"x": row, "y": row[:1]} for row in x])
    result = JaxTrainer(
        train_and_save,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "storage"), name="run"),
        datasets={"train": data},
    ).fit()
    return folder, result, x


def test_ray_train_finds_the_workers(undisturbed):
    folder, result, x = undisturbed
    assert set(result.metrics) == {"loss"}
    with result.checkpoint.as_directory() as saved:
        model = keras.models.load_model(os.path.join(saved, "model.keras"))
    weights = np.load(folder / "weights.npz")
    for name, value in zip(weights.files, model.get_weights(), strict=True):
        np.testing.assert_array_equal(weights[name], value)
    # Removed at the end of the training; its folder is Ray's.
    assert (folder / "storage" / "run").is_dir()
    # One batch of all rows: their order does not count.
    np.testing.assert_allclose(np.load(folder / "shard_loss.npy"), alone(x, 8), rtol=1e-5)


def test_ray_train_starts_its_workers_again_after_a_kill(undisturbed, tmp_path):
    """They continue from the backup in the folder of the run.

    More often than once, as Ray takes a node for lost that is silent for two seconds (`ray_support.HEALTH`).
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    JaxTrainer(
        train_with_a_kill,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(tmp_path / "storage"), name="run", failure_config=FailureConfig(max_failures=4)
        ),
    ).fit()
    assert (tmp_path / "killed").exists()
    # Of 32 steps 9 were taken before the kill, and a backup is written in each.
    assert 32 <= len((tmp_path / "steps-1").read_text().split()) < 32 + 9
    expected, weights = np.load(undisturbed[0] / "weights.npz"), np.load(tmp_path / "weights.npz")
    for name in expected.files:
        np.testing.assert_array_equal(expected[name], weights[name])


def test_a_killed_node_changes_no_bit(cluster, undisturbed, tmp_path):
    """Its actor starts again on the other node, and the training goes on from its backup."""
    steps = tmp_path / "steps-1"
    with cluster.second_node_killed_when(lambda: steps.exists() and len(steps.read_text().split()) > 8):
        weights = Trainer(
            trained, workers=2, args=(str(tmp_path), True), placement="SPREAD", max_restarts=1
        ).fit()
    assert set(steps.read_text().split()) == {"0", "1"}
    expected = np.load(undisturbed[0] / "weights.npz")
    for name, value in zip(expected.files, weights, strict=True):
        np.testing.assert_array_equal(expected[name], value)


def test_an_elastic_training_goes_on_without_a_node(cluster, tmp_path):
    """It starts with as many workers as there is room for; the lost node is not replaced."""
    cluster.add_second_node()

    def workers(folder):
        own = json.loads(os.environ["TF_CONFIG"])
        count = len(own["cluster"]["worker"])
        if count > 1:
            Path(folder, str(own["task"]["index"])).touch()
            time.sleep(600)
        return count, os.environ["UNISONO_GENERATION"]

    with cluster.second_node_killed_when(lambda: len(list(tmp_path.iterdir())) == 2):
        found = Trainer(
            workers, args=(str(tmp_path),), resources_per_worker={"slot": 1}, elastic=(1, 4)
        ).fit()
    assert found == (1, "1")
