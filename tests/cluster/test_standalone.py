"""Standalone clients and two servers, which all tests of this file share: one with a key on TCP."""

import functools
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import unisono
from tests.cluster.standalone_support import KEY, Served, is_alive, until
from unisono.standalone import ServerBusyError, _client, _remote_machines, run_on_cluster

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    root = tmp_path_factory.mktemp("a path with spaces")
    # The first one is reached by a file, the second one by TCP with its key.
    made = [Served(root / "first", "--address", "localhost:0"), Served(root / "second", "--port", "0")]
    yield made
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("UNISONO_CLUSTER_KEY", KEY)


@pytest.fixture
def cluster(servers):
    return {"worker": [each.reached_at for each in servers]}


def trained(steps, make):
    """Train a model on two workers; in a module that servers do not have."""
    import keras

    strategy = unisono.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8 * steps, 4)).astype("float32")
    history = model.fit(x, x, epochs=2, batch_size=8, verbose=1)
    print("the weights are", float(np.abs(model.get_weights()[0]).sum()))
    return history.history["loss"], model.get_weights(), np.ones(2_000_000)


def test_fit_as_by_launch(servers, cluster, capfd):
    """The numbers of `unisono.launch`, a class of this function, large results, and few messages."""
    import keras

    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    def make():
        return keras.Sequential([keras.layers.Dense(4), Twice()])

    before = servers[0].status()["counts"].get("POLL", 0)
    results = unisono.launch(trained, args=(300, make), cluster=cluster)
    polls = servers[0].status()["counts"]["POLL"] - before
    shown = capfd.readouterr()
    expected = unisono.launch(trained, workers=2, args=(300, make))
    for (loss, weights, large), (other_loss, other_weights, _) in zip(results, expected, strict=True):
        assert loss == other_loss
        np.testing.assert_array_equal(weights[0], other_weights[0])
        assert large.sum() == 2_000_000
    lines = shown.out.splitlines()
    assert all(line.startswith(("[worker:0] ", "[worker:1] ")) for line in lines)
    assert sum("the weights are" in line for line in lines) == 2
    assert any(line.startswith("[worker:0] 300/300") for line in lines), shown.out
    assert "2 tasks run the function trained" in shown.err
    # Two epochs of 300 steps, whose bar is rewritten at each of them.
    assert polls < 300, polls


class Unknown(Exception):
    """A class whose constructor wants more than its text."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code


def test_errors_keep_their_type_and_the_remote_traceback(cluster, capfd):
    def fails():
        if '"index": 1' in os.environ["TF_CONFIG"]:
            raise Unknown(7, "from the inside")

    with pytest.raises((Unknown, unisono.ClusterError), match="7: from the inside") as caught:
        unisono.launch(fails, cluster=cluster)
    text = str(caught.value.__cause__ or caught.value)
    assert 'raise Unknown(7, "from the inside")' in text

    def divides():
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        run_on_cluster({"chief": cluster["worker"][:1]}, divides)
    assert "in divides" in str(caught.value.__cause__)
    assert caught.value.__notes__ == ["Raised in chief:0 of unisono.launch."]
    # A function's logs are gone by then.
    assert "unisono: chief:0 failed: ZeroDivisionError: division by zero" in (shown := capfd.readouterr().err)
    assert "log:" not in shown


WAITER = """
import os, sys, time, unisono
def wait(path):
    print("at work", os.getpid(), flush=True)
    while not os.path.exists(path):
        time.sleep(0.02)
    return os.getpid()
if __name__ == "__main__":
    print(unisono.launch(wait, args=(sys.argv[1],), cluster={"worker": sys.argv[2:]}, lease=2.0))
"""


class Client:
    """A client in a process of its own, whose function waits for a file."""

    def __init__(self, root, servers):
        self.go = root / "go"
        script = root / "client.py"
        script.write_text(WAITER)
        command = [sys.executable, str(script), str(self.go), *(each.reached_at for each in servers)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.STDOUT)
        self.tasks = []
        for line in self.process.stdout:
            if "at work" in line:
                self.tasks.append(int(line.split()[-1]))
            if len(self.tasks) == len(servers):
                return
        raise AssertionError("the client has ended")


def test_a_second_client_is_refused_and_the_end_of_the_first_ends_its_training(servers, cluster, tmp_path):
    client = Client(tmp_path, servers)
    try:
        name = f"process {client.process.pid}"
        with pytest.raises(ServerBusyError, match=rf"trains for .*\({name}\), the function wait"):
            unisono.launch(os.getpid, cluster=cluster)
        assert all(map(is_alive, client.tasks))
    finally:
        client.process.send_signal(signal.SIGKILL)
        client.process.communicate()
    # Another model on the same servers: it gets them when the lease of the first has ended.
    pids = unisono.launch(os.getpid, cluster=cluster, wait=60.0)
    assert len(pids) == 2
    assert not any(map(is_alive, client.tasks))


def test_an_interrupt_ends_the_training_at_once(servers, tmp_path):
    client = Client(tmp_path, servers)
    client.process.send_signal(signal.SIGINT)
    client.process.communicate(timeout=100)
    assert all(each.status()["client"] is None for each in servers)
    assert all(each.status()["processes"] == 0 for each in servers)


def test_a_program_with_arguments_and_its_own_modules(servers, cluster, tmp_path):
    (tmp_path / "own.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "words.txt").write_text("some words")
    go = tmp_path / "go"
    (tmp_path / "my train.py").write_text(
        textwrap.dedent("""
        import json, os, sys, time, own
        print("arguments", own.double(4), sys.argv[1], open(sys.argv[2]).read(), os.getcwd())
        if not json.loads(os.environ["TF_CONFIG"])["task"]["index"]:
            open(sys.argv[3], "w").close()
            sys.exit(0)
        while not os.path.exists(sys.argv[3]):
            time.sleep(0.02)
        sys.exit(3)
        """)
    )
    command = [sys.executable, "-m", "unisono.cli", "launch", "--cluster", ",".join(cluster["worker"])]
    done = subprocess.run(
        [*command, "--files", "words.txt", "--log-dir", "logs", "my train.py", "-x", "words.txt", str(go)],
        cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    for index, server in enumerate(servers):
        assert f"[worker:{index}] arguments 8 -x some words {server.root}" in done.stdout
    assert "worker:1 failed with exit code 3" in done.stderr
    assert "arguments 8" in (tmp_path / "logs" / "worker-1.log").read_text()


def test_parameter_servers_a_worker_and_a_chief_on_two_servers(cluster):
    def train():
        import keras

        strategy = unisono.ParameterServerStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        return model.fit(np.ones((64, 2)), np.ones((64, 1)), verbose=0).history["loss"]

    first, second = cluster["worker"]
    values = unisono.launch(train, cluster={"chief": [first], "worker": [second], "ps": [first]})
    assert len(values[0]) == 1
    assert values[1:] == [None]


def test_another_key_or_none_is_refused(servers, monkeypatch):
    monkeypatch.setenv("UNISONO_CLUSTER_KEY", "ab" * 32)
    with pytest.raises(unisono.ClusterError, match="key"):
        run_on_cluster({"worker": [servers[1].reached_at]}, os.getpid)


def test_a_server_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(_client, "Patience", functools.partial(_remote_machines.Patience, answer=0.5))
    with pytest.raises(unisono.ClusterError, match=r"no answer from localhost:9 within"):
        run_on_cluster({"worker": ["localhost:9"]}, os.getpid)


BACKED_UP = """
import keras, numpy as np, os, sys, time, unisono
strategy = unisono.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(4)])
    model.compile("sgd", "mse")
class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, "ends", flush=True)
        while epoch == 2 and not os.path.exists(sys.argv[2]):
            time.sleep(0.02)
backup = unisono.callbacks.BackupAndRestore(sys.argv[1], save_freq=8)
model.fit(np.ones((64, 3)), np.ones((64, 4)), epochs=5, verbose=0, batch_size=8, callbacks=[backup, Report()])
print("weights", model.get_weights()[0].sum())
"""


def _lose_a_server(server):
    """Kill a server; its tasks die with it."""
    tasks = server.tasks()
    server.kill()
    until(lambda: not any(map(is_alive, tasks)))


def test_a_server_that_dies_is_named_and_training_resumes_when_it_is_back(servers, cluster, tmp_path):
    (tmp_path / "train.py").write_text(BACKED_UP)
    go = tmp_path / "go"
    command = [sys.executable, "-m", "unisono.cli", "launch", "--cluster", ",".join(cluster["worker"])]
    process = subprocess.Popen(
        [*command, "train.py", str(tmp_path / "backup"), str(go)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = []
    with process:
        for line in process.stdout:
            lines.append(line)
            if "worker:0] epoch 2 ends" in line:
                _lose_a_server(servers[1])
                go.write_text("")
            if "waiting at most 300 s" in line:
                servers[1].start()
    text = "".join(lines)
    assert process.wait() == 0, text
    lost = servers[1].reached_at
    assert f"worker:1 lost its server {lost}" in text
    assert f"for the server {lost}" in text
    assert text.count("worker:0] epoch 0 ends") == 1
    assert text.count("worker:0] epoch 4 ends") == 1
    weights = {line.split()[-1] for line in lines if "] weights " in line}
    assert len(weights) == 1


def test_an_estimator_trains_on_the_servers_and_is_evaluated_here(cluster, tmp_path):
    from unisono.estimator import (
        DistributeConfig,
        Estimator,
        EstimatorSpec,
        EvalSpec,
        RunConfig,
        TrainSpec,
        train_and_evaluate,
    )

    def model_fn(features, labels, mode):
        import keras

        from unisono.estimator import train

        loss = keras.ops.mean((keras.layers.Dense(1)(features) - labels) ** 2)
        return EstimatorSpec(mode, loss=loss, train_op=train.GradientDescentOptimizer(0.1).minimize(loss))

    def input_fn():
        from unisono.data import Dataset

        return Dataset.from_tensor_slices(([[1.0]] * 8, [[2.0]] * 8)).batch(4).repeat()

    distribute = DistributeConfig(
        train_distribute=unisono.MultiWorkerMirroredStrategy(), remote_cluster=cluster
    )
    config = RunConfig(tmp_path, experimental_distribute=distribute, save_summary_steps=0)
    estimator = Estimator(model_fn, config=config)
    spec = EvalSpec(input_fn, steps=1)
    metrics, _ = train_and_evaluate(estimator, TrainSpec(input_fn, max_steps=60), spec)
    assert metrics["global_step"] == 60
    assert metrics["loss"] < 1e-6
