"""`unisono launch --on mpi` and `mpirun unisono run` with Open MPI, also on two hosts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

import unisono
from tests.cluster.launch_support import LIMIT, check_evaluated, is_alive, until
from tests.cluster.test_slurm_engine import PROGRAMS
from tests.hosts import Hosts, require_hosts

#: Worker 1, on the other host, ends as the argument says; the others wait for a signal, and save for 0.5 s.
#: As the workers of a cluster do, both end when both have saved: `mpirun` ends the others with the first one.
SCRIPT = """\
import json, os, pathlib, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
here = pathlib.Path(__file__).parent
def save(number, frame):
    time.sleep(0.5)
    print("saved", flush=True)
    (here / f"saved-{task['index']}").touch()
    deadline = time.monotonic() + 300
    while len(list(here.glob("saved-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
print("begins", flush=True)
if task["index"] == 1 and sys.argv[1] == "raise":
    raise ValueError("a bad number")
if task["index"] == 1 and sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def has_open_mpi():
    """Whether `mpirun` is there, and is not another MPI's."""
    if not shutil.which("mpirun"):
        return False
    return b"Open MPI" in subprocess.run(["mpirun", "--version"], capture_output=True, check=False).stdout


pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_open_mpi(), reason="needs mpirun of Open MPI (openmpi-bin)"),
]


@pytest.fixture(scope="module")
def hosts():
    require_hosts()
    with Hosts(2, etc_hosts="127.0.0.1 localhost\n10.88.0.1 h0\n10.88.0.2 h1\n") as found:
        yield found


@pytest.fixture
def mpirun_flags(hosts, tmp_path):
    """What `mpirun` needs on host 0 to reach host 1 as by ssh; the file `hosts` names both."""
    agent = tmp_path / "agent"
    inside = " ".join(f"'{word}'" for word in hosts.command(1))
    agent.write_text(f'#!/bin/bash\nshift\nexec {inside} sh -c "$*"\n')
    agent.chmod(0o755)
    (tmp_path / "hosts").write_text("h0 slots=1\nh1 slots=1\n")
    return ("--allow-run-as-root", "--mca", "plm_rsh_agent", str(agent))


@pytest.fixture
def launch(hosts, tmp_path, mpirun_flags):
    """Run `unisono launch --on mpi` on host 0."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def started(*words):
        flags = ("--hostfile", "hosts", "--log-dir", "logs", *(f"--mpirun={word}" for word in mpirun_flags))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with (tmp_path / "out").open("w") as out:
            process = hosts.start(
                0, sys.executable, "-m", "unisono", "launch", "--on", "mpi", *flags, *words,
                cwd=tmp_path, stdout=out, stderr=out,
            )  # fmt: skip
        signal.signal(signal.SIGINT, before)
        return process

    return started


def test_two_hosts_train(launch, tmp_path):
    code = launch(PROGRAMS / "two_hosts.py").wait(LIMIT)
    out = (tmp_path / "out").read_text()
    assert code == 0, out
    assert (tmp_path / "logs/worker-1.log").read_text().splitlines()[-1] in out.replace("[worker:0] ", "")


def test_a_parameter_server_and_an_evaluator(launch, tmp_path):
    (tmp_path / "hosts").write_text("h0 slots=2\nh1 slots=1\n")
    process = launch("--ps", "1", "--evaluator", PROGRAMS / "evaluated.py", tmp_path / "backup", "0")
    assert process.wait(LIMIT) == 0, (tmp_path / "out").read_text()
    check_evaluated(tmp_path / "logs")


def test_a_function_returns_what_each_worker_has_returned(tmp_path, monkeypatch):
    def task(what):
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        if index == 1 and what == "raise":
            raise KeyError("a key")
        if index == 1 and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return what, index

    monkeypatch.chdir(tmp_path)
    own = {"on": "mpi", "mpirun": "--allow-run-as-root"}
    assert unisono.launch(task, 2, ("a",), **own) == [("a", 0), ("a", 1)]
    assert list((tmp_path / "unisono-logs").iterdir()) == []
    with pytest.raises(KeyError, match="a key"):
        unisono.launch(task, 2, ("raise",), log_dir="kept", **own)
    (call,) = (tmp_path / "kept").iterdir()
    assert "KeyError: 'a key'" in (call / "worker-1.log").read_text()
    with pytest.raises(unisono.ClusterError, match=r"Received: worker:1 was killed by SIGKILL"):
        unisono.launch(task, 2, ("kill",), **own)


@pytest.mark.parametrize(
    ("what", "code", "cause"),
    [
        ("raise", 1, "worker:1 failed: ValueError: a bad number"),
        ("kill", 137, "worker:1 was killed by SIGKILL"),
    ],
)
def test_the_cause_is_last_and_the_code_that_of_the_first_task(launch, tmp_path, what, code, cause):
    assert launch("train.py", what).wait(LIMIT) == code
    assert cause in (tmp_path / "out").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_a_signal_lets_the_tasks_save(launch, tmp_path, number, code):
    process = launch("train.py", "wait")
    logs = [tmp_path / f"logs/worker-{i}.log" for i in range(2)]
    until(lambda: all(log.exists() and "begins" in log.read_text() for log in logs), "the tasks")
    os.kill(process.pid, number)
    assert process.wait(LIMIT) == code
    assert "saved" in (tmp_path / "out").read_text()


def test_mpirun_ends_with_a_launcher_that_is_killed(launch, tmp_path):
    process = launch("train.py", "wait")
    log = tmp_path / "logs" / "worker-1.log"
    until(lambda: log.exists() and "begins" in log.read_text(), "worker 1 begins")
    (pid,) = until(
        lambda: re.findall(r"mpirun has process id (\d+);", (tmp_path / "out").read_text()), "its number"
    )
    assert launch("train.py", "wait").wait(LIMIT) == 2
    assert "A log directory must serve one launcher at a time" in (tmp_path / "out").read_text()
    process.kill()
    process.wait(LIMIT)
    until(lambda: not is_alive(int(pid)), "the end of mpirun")


#: In one piece, which `print` does not write: `mpirun` shows the pieces of all ranks as they arrive.
WHO = "import os; os.write(1, f\"is {os.environ['TF_CONFIG']} {os.environ['PJRT_NPROC']}\\n\".encode())"
UNISONO_RUN = (sys.executable, "-m", "unisono", "run")


def test_mpirun_by_hand_on_one_machine(tmp_path):
    (tmp_path / "who.py").write_text(WHO)
    command = ("mpirun", "--bind-to", "none", "--host", "localhost:3", "-n", "3", *UNISONO_RUN)
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ.pop("PJRT_NPROC", None)
    done = subprocess.run(
        [*command, "--ps=1", "who.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT,
        check=False, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("is ").rpartition(" ") for line in done.stdout.splitlines()]
    tasks = sorted(tuple(json.loads(config)["task"].values()) for config, _, _ in lines)
    assert tasks == [("ps", 0), ("worker", 0), ("worker", 1)]
    assert all(int(threads) >= 1 for _, _, threads in lines)


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="needs mpi4py (the extra `mpi`)")
def test_mpirun_by_hand_on_two_hosts(hosts, mpirun_flags, tmp_path):
    """The ranks tell each other their hosts through mpi4py, and end without a failure of MPI."""
    (tmp_path / "who.py").write_text(WHO)
    command = ("mpirun", *mpirun_flags, "--hostfile", "hosts", "-n", "2", *UNISONO_RUN, "who.py")
    with hosts.start(0, *command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        out = process.communicate(timeout=LIMIT)[0].decode()
    assert process.returncode == 0, out
    assert re.findall(r'"worker": \["h0:\d+", "h1:\d+"\]', out) != [], out
