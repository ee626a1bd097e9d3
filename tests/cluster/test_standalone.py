"""Standalone clients and two servers, which all tests of this file share: one with a key on TCP."""

import functools
import logging
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import unisono
from tests.cluster.standalone_support import KEY, Served, is_alive, until
from tests.virtual.seeds import documents, programs
from unisono.standalone import ServerBusyError, _client, _remote_machines, run_on_cluster
from unisono.standalone._protocol import BATCH_SECONDS

pytestmark = pytest.mark.timeout(600)


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
    strategy = unisono.MultiWorkerMirroredStrategy()
    with strategy.scope():
        loss, weights = fitted(steps, make)
    print("the weights are", float(np.abs(weights).sum()))
    return loss, weights, np.ones(2_000_000)


def fitted(steps, make):
    """Train a model, under the current strategy."""
    import keras

    keras.utils.set_random_seed(1)
    model = make()
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8 * steps, 4)).astype("float32")
    history = model.fit(x, x, epochs=2, batch_size=8, verbose=1)
    return history.history["loss"], model.get_weights()[0]


def test_fit_as_on_one_device(servers, cluster, capfd):
    """The numbers of plain Keras, a class of this function, large results, and few messages."""
    import keras

    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    def make():
        return keras.Sequential([keras.layers.Dense(4), Twice()])

    before, began = servers[0].status()["counts"].get("POLL", 0), time.monotonic()
    results = unisono.launch(trained, args=(300, make), cluster=cluster)
    polls = servers[0].status()["counts"]["POLL"] - before
    # While there is news; and a few for the large result, which is sent in pieces.
    most = (time.monotonic() - began) / BATCH_SECONDS + 30
    shown = capfd.readouterr()
    expected, expected_weights = fitted(300, make)
    for loss, weights, large in results:
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        np.testing.assert_allclose(weights, expected_weights, atol=1e-5)
        assert large.sum() == 2_000_000
    np.testing.assert_array_equal(results[0][1], results[1][1])
    lines = shown.out.splitlines()
    assert all(line.startswith(("[worker:0] ", "[worker:1] ")) for line in lines)
    assert sum("the weights are" in line for line in lines) == 2
    assert any(line.startswith("[worker:0] 300/300") for line in lines), shown.out
    assert "2 tasks run the function trained" in shown.err
    # Two epochs of 300 steps, whose bar is rewritten at each of them.
    assert polls < most, polls


def test_an_error_keeps_its_type_and_the_remote_traceback(cluster, capfd):
    def divides():
        logging.getLogger("unisono").info("about to divide")
        return 1 / int('"index": 0' in os.environ["TF_CONFIG"])

    log = logging.getLogger("unisono")
    before = log.level
    log.setLevel(logging.INFO)
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            run_on_cluster(cluster, divides)
    finally:
        log.setLevel(before)
    assert "in divides" in str(caught.value.__cause__)
    assert caught.value.__notes__ == ["Raised in worker:1 of unisono.launch."]
    shown = capfd.readouterr()
    # The tasks show the messages that this process shows.
    assert "[worker:1] INFO:unisono:about to divide" in shown.out
    # A function's logs are gone by then.
    assert "unisono: worker:1 failed: ZeroDivisionError: division by zero" in shown.err
    assert "log:" not in shown.err


WAITER = """
import os, sys, time, unisono
def wait(path):
    print("at work", os.getpid(), flush=True)
    while not os.path.exists(path):
        time.sleep(0.02)
    return os.getpid()
if __name__ == "__main__":
    print(unisono.launch(wait, args=(sys.argv[1],), cluster={"worker": sys.argv[2:]}, lease=2.0, wait=60.0))
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
    other = Client(tmp_path, servers)
    assert len(set(other.tasks) - set(client.tasks)) == 2
    assert not any(map(is_alive, client.tasks))
    # An interrupt ends the training at once.
    other.process.send_signal(signal.SIGINT)
    other.process.communicate(timeout=100)
    assert all(each.status()["client"] is None for each in servers)
    assert all(each.status()["processes"] == 0 for each in servers)
    assert not any(map(is_alive, other.tasks))


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
    monkeypatch.setattr(
        _client, "ServerTimeouts", functools.partial(_remote_machines.ServerTimeouts, answer=0.5)
    )
    with pytest.raises(unisono.ClusterError, match=r"no answer from localhost:9 within"):
        run_on_cluster({"worker": ["localhost:9"]}, os.getpid)


BACKED_UP = """
import json, keras, numpy as np, os, own, sys, time, unisono
print("arguments", own.double(4), sys.argv[3:-1], open(sys.argv[-1]).read(), os.getcwd())
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
sys.exit(3 * json.loads(os.environ["TF_CONFIG"])["task"]["index"])
"""


def _lose_a_server(server):
    """Kill a server; its tasks die with it."""
    tasks = server.tasks()
    server.kill()
    until(lambda: not any(map(is_alive, tasks)))


def test_a_program_whose_server_dies_resumes_when_it_is_back(servers, cluster, tmp_path):
    """A script with its own modules, files, arguments and exit code; the server is named."""
    (tmp_path / "own.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "words.txt").write_text("some words")
    (tmp_path / "my train.py").write_text(BACKED_UP)
    go = tmp_path / "go"
    command = [sys.executable, "-m", "unisono", "launch", "--cluster", ",".join(cluster["worker"])]
    command += ["--files", "words.txt", "--log-dir", "logs", "my train.py", str(tmp_path / "backup"), str(go)]
    process = subprocess.Popen(
        [*command, "-x", "it's \"quoted\"", "words.txt"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = []
    with process:
        for line in process.stdout:
            lines.append(line)
            # Once: the training may resume inside this epoch.
            if "worker:0] epoch 2 ends" in line and not go.exists():
                _lose_a_server(servers[1])
                go.write_text("")
            if "waiting at most 300 s" in line:
                servers[1].start()
    text = "".join(lines)
    assert process.wait() == 3, text
    given = ["-x", 'it\'s "quoted"']
    for index, server in enumerate(servers):
        assert f"[worker:{index}] arguments 8 {given} some words {server.root}" in text
    assert "worker:1 failed with exit code 3" in text
    assert "arguments 8" in (tmp_path / "logs" / "worker-1.log").read_text()
    lost = servers[1].reached_at
    assert f"worker:1 lost its server {lost}" in text
    assert f"for the server {lost}" in text
    assert text.count("worker:0] epoch 0 ends") == 1
    assert text.count("worker:0] epoch 4 ends") == 1
    weights = {line.split()[-1] for line in lines if "] weights " in line}
    assert len(weights) == 1


def test_the_documents_estimator_trains_on_the_servers_and_is_evaluated_here(cluster, tmp_path, monkeypatch):
    """Document 001, "Standalone client mode", on two servers of one device, where this process has eight."""
    machines = ", ".join(map(repr, cluster["worker"]))
    program = documents.MODEL_FN + documents.STANDALONE
    changes = {
        '"host1:port", "host2:port", "host3:port"': machines,
        "num_gpus_per_worker=2": "num_gpus_per_worker=1",
    }
    names = programs.run(program, monkeypatch, tmp_path, changes)
    metrics, _ = names["results"]
    # Each worker gives its one device 100 elements.
    assert metrics["global_step"] == 100
    assert metrics["loss"] < 1e-6
