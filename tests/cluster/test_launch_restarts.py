"""`unisono launch`: generations that follow each other."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.cluster.launch_support import LIMIT, WHO, is_alive, launched, until

FAILS_ONCE = """
print("generation", generation, os.getpid(), flush=True)
if generation == 0:
    if me == "worker:1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


def test_all_tasks_start_again_with_new_ports_and_another_number(tmp_path):
    script = "print(os.environ['TF_CONFIG'], flush=True)" + FAILS_ONCE
    with launched(tmp_path, script, "-n", "2", "--max-restarts", "1", "--spares", "0") as run:
        assert run.end() == 0
        # Of the task that fails: the other may be ended before it has written anything.
        clusters = [json.loads(line) for line in run.log("worker:1").splitlines() if line.startswith("{")]
        assert len(clusters) == 2
        first, second = (set(c["cluster"]["worker"]) for c in clusters)
        assert not first & second
        assert re.findall(r"generation (\d) \d", run.log("worker:1")) == ["0", "1"]
        assert run.history("failed")[0]["detail"].startswith("was killed by SIGKILL")
        assert (run.logs / "fence").read_text() == "1\n"


def test_with_servers_a_task_that_fails_starts_again_alone(tmp_path):
    """A worker is killed, a server raises, the chief is killed; the other worker runs through."""
    script = """
print("start", os.environ["TF_CONFIG"], generation, flush=True)
here = os.path.dirname(os.environ["UNISONO_FENCE"])
mark = os.path.join(here, me)
first = not os.path.exists(mark)
open(mark, "w").close()
if first and me == "ps:0":
    raise OSError("no disk")
if first and me in ("worker:1", "chief:0"):
    os.kill(os.getpid(), signal.SIGKILL)
if me == "chief:0":
    logs = [os.path.join(here, f"{name}.log") for name in ("worker-1", "ps-0")]
    while not all(open(log).read().count("start {") == 2 for log in logs):
        time.sleep(0.01)
else:
    time.sleep(600)
"""
    with launched(tmp_path, script, "-n", "2", "--ps", "1", "--chief", "--grace", "0.2") as run:
        assert run.end() == 0
        starts = {
            task: run.log(task).count("start {") for task in ("worker:0", "worker:1", "ps:0", "chief:0")
        }
        assert starts == {"worker:0": 1, "worker:1": 2, "ps:0": 2, "chief:0": 2}
        # The same addresses and generation.
        lines = [line for line in run.log("worker:1").splitlines() if line.startswith("start")]
        assert len(set(lines)) == 1
        assert {e["task"] for e in run.history("restart task")} == {"worker:1", "ps:0", "chief:0"}
        assert re.search(
            r"worker:1 was killed by SIGKILL .*; it starts again in \S+ s, the others go on", run.err
        )
        assert "worker:1 was started again" in run.err


def test_with_servers_an_error_at_each_start_ends_the_launch_soon(tmp_path):
    script = "if me == 'worker:1': raise KeyError('a column')\ntime.sleep(600)\n"
    with launched(tmp_path, script, "-n", "2", "--ps", "1", "--chief", "--grace", "0.2") as run:
        assert run.end() == 1
        assert "worker:1 failed twice with the same error and is not started again" in run.err
        assert run.err.rstrip().endswith("KeyError: 'a column'")
        assert len(run.history("started", task="worker:1")) == 2


@pytest.mark.exhaustive
def test_with_servers_that_the_program_does_not_use_the_first_failure_ends_the_launch(tmp_path):
    script = """
if me == "ps:0":
    time.sleep(600)
import unisono, jax.numpy
unisono.MirroredStrategy(["cpu:0"]).run(lambda: jax.numpy.ones(()))
raise KeyError("a column")
"""
    with launched(tmp_path, script, "-n", "1", "--ps", "1", "--grace", "0.2", forks=True) as run:
        assert run.end() == 1
        assert "failed, and its program has no ParameterServerStrategy: no task is started" in run.err
        assert run.err.rstrip().endswith("KeyError: 'a column'")
        assert len(run.history("started", task="worker:0")) == 1


def test_the_first_error_is_raised_when_restarts_are_used_up(tmp_path):
    script = "if me == 'worker:0': raise KeyError(f'in generation {generation}')\ntime.sleep(600)\n"
    with launched(tmp_path, script, "-n", "2", "--max-restarts", "2", "--spares", "0") as run:
        assert run.end() == 1
        assert run.err.rstrip().endswith("KeyError: 'in generation 2'")
        assert "2 restarts in 10 minutes are used up" in run.err
        assert len(run.history("restart")) == 2


def test_stopped_tasks_of_the_old_generation_are_killed(tmp_path):
    script = """
if generation == 0:
    if me == "worker:1":
        print("ready", flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        sys.exit(5)
    os.kill(os.getpid(), signal.SIGSTOP)
print("gone", os.path.exists("/proc/" + open(sys.argv[1]).read()), flush=True)
"""
    go = tmp_path / "go"
    flags = ("-n", "2", "--max-restarts", "1", "--spares", "0", "--grace", "0.2")
    with launched(tmp_path, script, *flags, args=[str(go)]) as run:
        pid = run.wait_for("stopped")["pid"]
        aside = tmp_path / "aside"
        aside.write_text(str(pid))
        aside.replace(go)
        assert run.end() == 0
        assert "gone False" in run.log("worker:0")
        assert run.history("ended", pid=pid)[0]["exit_code"] == 137


def test_warm_spares_become_the_next_generation(tmp_path):
    script = """
progress(1)
print("jax" in sys.modules, "keras" in sys.modules, os.getpid(), flush=True)
if generation == 0:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(1 if me == "worker:1" else 0)
# As at the top of many programs, before they import JAX.
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["TF_CONFIG"]
import jax
# Only before the backend starts.
jax.config.update("jax_num_cpu_devices", 3)
print("devices", len(jax.devices()), jax.numpy.ones(1).dtype, os.getpriority(os.PRIO_PROCESS, 0), flush=True)
print("argv", sys.argv[0], sys.path[0], sys.stdin.read() == "", flush=True)
"""
    go = tmp_path / "go"
    with launched(tmp_path, script, "-n", "2", "--max-restarts", "1", args=[str(go)]) as run:
        run.wait_for("spare", count=2)
        spares = {e["pid"] for e in run.history("spare")}
        for task in ("worker:0", "worker:1"):
            run.wait_for_log(task, "False False")
        go.write_text("")
        assert run.end() == 0
        assert {e["pid"] for e in run.history("started", generation=1)} == spares
        for task in ("worker:0", "worker:1"):
            log = run.log(task)
            assert re.findall(r"(True|False) \1 (\d+)", log)[0][0] == "False"
            assert int(re.search(r"True True (\d+)", log).group(1)) in spares
            # The priority that tasks have that never waited.
            assert f"devices 3 float64 {os.getpriority(os.PRIO_PROCESS, 0)}" in log
            assert f"argv {tmp_path / 'train.py'} {tmp_path} True" in log
        assert not any(is_alive(pid) for pid in run.everyone())


def test_spares_that_died_are_not_used(tmp_path):
    script = """
progress(1)
if generation == 0:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(1)
"""
    go = tmp_path / "go"
    flags = ("-n", "1", "--max-restarts", "1", "--spares", "1")
    with launched(tmp_path, script, *flags, args=[str(go)]) as run:
        pid = run.wait_for("spare")["pid"]
        os.kill(pid, signal.SIGKILL)
        # Until then it could still be given the task.
        until(lambda: not is_alive(pid), "the end of the spare")
        go.write_text("")
        assert run.end() == 0
        assert pid not in {e["pid"] for e in run.history("started")}


def test_exit_code_42_asks_for_a_restart(tmp_path):
    script = """
def save(number, frame):
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
if generation == 0:
    if me == "worker:0":
        sys.exit(42)
    time.sleep(600)
"""
    with launched(tmp_path, script, "-n", "2", "--max-restarts", "1", "--spares", "0") as run:
        assert run.end() == 0
        assert run.history("failed") == []
        assert run.history("ending")[0]["detail"] == "restart wanted"


def test_saved_state_counts_where_python_takes_longer_to_end_than_there_is_time(tmp_path):
    script = """
import atexit
atexit.register(time.sleep, 600)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(42))
print("begins", flush=True)
time.sleep(600)
"""
    with launched(tmp_path, script, "-n", "1", "--grace", "1") as run:
        run.wait_for_log("worker:0", "begins")
        run.send(signal.SIGTERM)
        assert run.end() == 42
        assert [e["exit_code"] for e in run.history("ended")] == [137]


def test_a_worker_that_fails_twice_is_dropped(tmp_path):
    script = """
count = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
print("workers", count, flush=True)
if count == 3:
    if me == "worker:2":
        sys.exit(9)
    time.sleep(600)
"""
    with launched(tmp_path, script, "--elastic", "2:3", "--spares", "0") as run:
        assert run.end() == 0
        # The failing one has written before it failed; the others may have been ended before.
        assert re.findall(r"workers (\d)", run.log("worker:2")) == ["3", "3"]
        assert re.findall(r"workers (\d)", run.log("worker:0"))[-1] == "2"


def test_fewer_workers_than_allowed_end_the_launch(tmp_path):
    script = "if me == 'worker:1': sys.exit(9)\ntime.sleep(600)\n"
    with launched(tmp_path, script, "--elastic", "2:2", "--max-restarts", "1", "--spares", "0") as run:
        assert run.end() == 9


def test_workers_follow_the_capacity_file(tmp_path):
    script = """
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(42))
count = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
print("workers", count, flush=True)
if generation < 2:
    time.sleep(600)
"""
    flags = ("--elastic", "1:2", "--spares", "0", "--cool-down", "0.1")
    with launched(tmp_path, script, *flags) as run:
        for task in ("worker:0", "worker:1"):
            run.wait_for_log(task, "workers 2")
        (run.logs / "capacity").write_text("1\n")
        run.wait_for_log("worker:0", "workers 1")
        (run.logs / "capacity").write_text("2\n")
        assert run.end() == 0
        assert re.findall(r"workers (\d)", run.log("worker:0")) == ["2", "1", "2"]
        assert [e["detail"] for e in run.history("ending")] == ["resize", "resize"]


def test_a_signal_ends_the_wait_before_a_restart(tmp_path):
    flags = ("-n", "1", "--max-restarts", "50", "--spares", "0")
    with launched(tmp_path, "sys.exit(3)", *flags) as run:
        # The wait after the third is a second long.
        run.wait_for("restart", count=3)
        run.send(signal.SIGTERM)
        assert run.end() == 143
        until(lambda: not any(is_alive(pid) for pid in run.everyone()), "the end of all")


BEATS = """
from unisono._system._task_reports import process_heartbeat
process_heartbeat().beat()
"""


def on_a_full_disk(root, script, *flags):
    """Run a launch whose files cannot grow; return how it ended."""
    (root / "train.py").write_text(WHO + script)
    logs = root / "logs"
    logs.mkdir()
    # Of a launch before: its last generation is none that replaces the first of this one.
    (logs / "fence").write_text("5\n")
    command = [sys.executable, "-m", "unisono", "launch", "--spares", "0", *flags]
    # As on a full disk no file can grow; the pipes that show it can.
    limited = ["sh", "-c", 'ulimit -S -f 0; exec "$@"', "sh", *command]
    run = subprocess.run(
        [*limited, "--log-dir", str(logs), str(root / "train.py")],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert run.stderr.count("the log directory cannot be written") == 1
    assert not (logs / "history.jsonl").read_text()
    return run


def test_a_full_disk_stops_neither_tasks_nor_restarts(tmp_path):
    script = """
import resource
print("x" * 10_000, flush=True)
if generation == 0:
    time.sleep(600) if me == "worker:0" else sys.exit(7)
# There is room again.
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("trained", flush=True)
"""
    run = on_a_full_disk(tmp_path, BEATS + script, "-n", "2", "--max-restarts", "1")
    assert run.returncode == 0, run.stderr
    assert "[worker:0] trained\n" in run.stdout
    assert "worker:1 failed with exit code 7" in run.stderr


def test_on_a_full_disk_a_failure_is_shown_and_ends_the_launch_when_it_comes_again(tmp_path):
    script = """
if me != "ps:0":
    time.sleep(600)
raise OSError(28, "No room for the server's log")
"""
    run = on_a_full_disk(tmp_path, script, "-n", "1", "--ps", "1", "--chief")
    assert run.returncode == 1, run.stderr
    assert "ps:0 failed twice with the same error and is not started again" in run.stderr
    assert run.stderr.count("it starts again in") == 1
    assert run.stderr.rstrip().endswith("OSError: [Errno 28] No room for the server's log")


def test_a_removed_log_directory_stops_neither_tasks_nor_restarts(tmp_path):
    script = """
import shutil
if generation == 0 and me == "worker:0":
    print("before", flush=True)
    shutil.rmtree(os.path.dirname(os.environ["UNISONO_FENCE"]))
    print("after", flush=True)
    while not os.path.exists(os.path.dirname(os.environ["UNISONO_PROGRESS"])):
        time.sleep(0.01)
    sys.exit(7)
print("trained in", generation, flush=True)
"""
    flags = ("-n", "2", "--max-restarts", "1", "--spares", "0")
    with launched(tmp_path, BEATS + script, *flags) as run:
        assert run.end() == 0
        assert [line for line in run.out.splitlines() if "WARNING" not in line] == [
            "[worker:0] before",
            "[worker:0] after",
            "[worker:0] trained in 1",
        ]
        assert run.err.count("the log directory cannot be written") == 1
        assert run.history("quit", exit_code=0)
        assert "trained in 1" in run.log("worker:1")
