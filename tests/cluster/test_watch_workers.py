"""Workers without a launcher are watched by their addresses, from this machine and from another one."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.cluster._workers import Workers
from tests.cluster.host_tasks import PORT, Tasks
from tests.cluster.standalone_support import KEY, until
from tests.cluster.tasks_by_hand import TasksByHand
from tests.hosts import DEBIAN, Hosts, require_hosts
from unisono.rpc._transport._keys import new_secret

PROGRAM, WATCHER = (Path(__file__).parent / "programs" / name for name in ("watched.py", "watcher.py"))
LIMIT = 300.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def key(tmp_path):
    file = tmp_path / "watch.key"
    file.write_text(new_secret())
    file.chmod(0o600)
    return file


def lines(path):
    """What a watcher has printed."""
    complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
    return [json.loads(line) for line in complete]


def test_a_kill_a_restart_and_the_end_are_seen(tmp_path, key):
    """By the address of the worker that is killed."""
    env = {"UNISONO_WATCH_KEY_FILE": str(key), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    workers = Workers(tmp_path, [str(PROGRAM), str(tmp_path)], env=env)
    seen = tmp_path / "seen"
    seen.touch()
    watcher = None
    try:
        until(lambda: list((tmp_path / "tmp").rglob("*.jsonl")) or dead(workers))
        address = re.search(r"127\.0\.0\.1:\d+(?=\"\])", json.dumps(tf_config(workers)))[0]
        watcher = forked.Program([str(WATCHER), address, str(key)], tmp_path, seen)
        until(lambda: has(seen, state="runs", faults=[]) or dead(workers))
        workers.processes[1].kill()
        until(lambda: has(seen, state="restarts", faults=["failure"]) or watcher.poll() is not None)
        for i, process in enumerate(workers.processes):
            process.wait(LIMIT)
            workers.processes[i] = workers._start(i)
        until(lambda: has(seen, state="runs", faults=["failure", "restart", "recovery"]) or dead(workers))
        (tmp_path / "stop").touch()
        assert workers.wait(LIMIT) == [0, 0], workers.text()
        assert watcher.wait(LIMIT) == 0, seen.read_text()
    finally:
        workers.kill()
        if watcher is not None:
            watcher.kill()
    last = lines(seen)[-1]
    assert (last["state"], last["code"], set(last["tasks"].values())) == ("ended", 0, {"ended"}), last
    # The last steps are told with the end.
    assert last["step"] == 8 * (int((tmp_path / "last").read_text()) + 1)
    assert not list((tmp_path / "tmp").rglob("*.jsonl"))


def tf_config(workers):
    return json.loads(workers._starts[0][1]["TF_CONFIG"])["cluster"]


def has(path, **facts):
    return any({name: line[name] for name in facts} == facts for line in lines(path))


def dead(workers):
    assert all(p.poll() is None for p in workers.processes), workers.text()


CHIEF = """
import sys, time
from pathlib import Path
import keras, numpy, unisono
strategy = unisono.ParameterServerStrategy()
class Wait(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = Path("stop").exists()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
x = numpy.ones((64, 4), "float32")
model.fit(x, x, epochs=1000, batch_size=8, verbose=0, callbacks=[Wait()])
"""


def test_a_chief_of_parameter_servers_shows_its_progress_to_the_end(tmp_path, key, monkeypatch):
    monkeypatch.setenv("UNISONO_WATCH_KEY_FILE", str(key))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    script, seen = tmp_path / "chief.py", tmp_path / "seen"
    script.write_text(CHIEF)
    seen.touch()
    with TasksByHand(tmp_path, script, count=1) as tasks:
        until(lambda: list((tmp_path / "tmp").rglob("*.jsonl")) or tasks.processes["worker", 0].poll())
        watcher = forked.Program([str(WATCHER), tasks.cluster["worker"][0], str(key)], tmp_path, seen)
        try:
            until(lambda: has(seen, state="runs", faults=[]) or watcher.poll() is not None)
            (tmp_path / "stop").touch()
            assert set(tasks.wait().values()) == {0}, tasks.text()
            assert watcher.wait(LIMIT) == 0, seen.read_text()
        finally:
            watcher.kill()
    last = lines(seen)[-1]
    assert (last["state"], last["code"], last["tasks"]) == ("ended", 0, {"worker:0": "ended"}), last
    assert last["step"] >= 8
    assert last["step"] % 8 == 0
    assert not list((tmp_path / "tmp").rglob("*.jsonl"))


@pytest.fixture
def hosts():
    require_hosts()
    others = "".join(f"10.88.0.{i + 1} h{i}\n" for i in range(3))
    with Hosts(3, etc_hosts=DEBIAN + others) as found:
        yield found


def test_another_machine_needs_the_key_and_one_address(hosts, tmp_path, key):
    cluster = {"worker": [f"h0:{PORT}", f"h1:{PORT + 1}"]}
    (tmp_path / "tmp").mkdir()
    variables = {"UNISONO_WATCH_KEY_FILE": str(key), "TMPDIR": str(tmp_path / "tmp")}
    tasks = Tasks(hosts, tmp_path, cluster, [tmp_path], program=PROGRAM, **variables)

    def watch(*words):
        env = ["env", "-u", "UNISONO_WATCH_KEY_FILE", "COLUMNS=100"]
        done = hosts.start(
            2,
            *env,
            sys.executable,
            "-m",
            "unisono",
            "watch",
            "--once",
            *words,
            stdout=-1,
            stderr=-1,
            text=True,
        )
        out, err = done.communicate(timeout=LIMIT)
        return done.returncode, out, err

    try:
        until(
            lambda: (
                list((tmp_path / "tmp").rglob("*.jsonl")) or any(p.poll() for p in tasks.processes.values())
            )
        )
        # They compile at first.
        until(lambda: " runs " in watch("--key", key, cluster["worker"][0])[1])
        for address in cluster["worker"]:
            code, out, err = watch("--key", key, address)
            assert code == 0, err + tasks.text
            assert re.search(r"watched\.py · runs · epoch \d+ of 1000 · step \d+ of 8000", out), out
            for i in range(2):
                assert re.search(rf"worker:{i} +h{i} +runs +\d+", out), out
        other = tmp_path / "other.key"
        other.write_text(KEY)
        other.chmod(0o600)
        for words, text in (
            # The key of the cluster, too, lets no one watch.
            (["--key", other, f"h0:{PORT}"], "does not take"),
            ([f"h0:{PORT}"], "and no key"),
            (["--key", key, "h0:2999"], "no answer of h0:2999 within 6 s (connection refused)"),
        ):
            code, out, err = watch(*words)
            assert (code, out) == (2, ""), err
            assert text in " ".join(err.split()), err
            assert "Traceback" not in err
        (tmp_path / "stop").touch()
        assert tasks.wait() == [0, 0], tasks.text
    finally:
        for process in tasks.processes.values():
            process.kill()
    assert os.listdir(tmp_path / "tmp" / f"unisono-events-{os.geteuid()}") == []
