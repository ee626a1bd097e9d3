"""`unisono launch --on slurm` and `srun` on a real Slurm, whose nodes have addresses of their own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.launch_support import LIMIT, check_evaluated, until
from tests.slurm import Slurm, require_slurm

PROGRAMS = Path(__file__).parent / "programs"
#: worker:1 ends as the argument says for the generation: with a code, by SIGKILL or by an exception; or it
#: waits. It waits for worker:0 first: Slurm ends a step at its first failure, and then worker:0 would print
#: nothing.
SCRIPT = """\
import json, os, pathlib, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
me, generation = task["type"] + ":" + str(task["index"]), int(os.environ["UNISONO_GENERATION"])
print("begins", me, "in", generation, flush=True)
begun = pathlib.Path(f"begun-{generation}")
if me == "worker:0":
    begun.touch()
deadline = time.monotonic() + 300
while not begun.exists() and time.monotonic() < deadline:
    time.sleep(0.05)
what = sys.argv[1].split(",")[generation]
if me != "worker:1" or what == "wait":
    time.sleep(0 if what == "0" else 600)
elif what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "raise":
    raise ValueError("a bad number")
sys.exit(int(what))
"""

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def slurm():
    require_slurm()
    with Slurm(nodes=3) as found:
        yield found


class Launched:
    """`unisono launch --on slurm` that runs on the host of the controller."""

    def __init__(self, slurm, root, *words):
        self._slurm, self._out, self.logs = slurm, root / "out", root / "logs"
        # As from a shell: in the background it may be ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with self._out.open("w") as out:
            command = ("-m", "unisono", "launch", "--on", "slurm", "--log-dir", self.logs, *words)
            self.process = slurm.start(sys.executable, *command, cwd=root, stdout=out, stderr=out)
        signal.signal(signal.SIGINT, before)

    @property
    def out(self):
        return self._out.read_text()

    def wait_for(self, text):
        until(lambda: text in self.out or self.process.poll() is not None, text)
        assert text in self.out, self.everything()

    def end(self):
        code = self.process.wait(LIMIT)
        return code, self.out

    def everything(self):
        files = [*self.logs.glob("*.log")] if self.logs.exists() else []
        return self.out + "".join(f"--- {f.name} ---\n{f.read_text()}" for f in files) + self._slurm.logs()


def launched(slurm, root, what, *flags):
    (root / "train.py").write_text(SCRIPT)
    return Launched(slurm, root, "-N", "2", *flags, root / "train.py", what)


def state(text):
    return re.search(r"state (\w+) generation", text)[1]


def test_preempted_and_a_node_lost_with_the_weights_of_an_undisturbed_run(slurm, tmp_path):
    program = PROGRAMS / "slurm_fit.py"
    run = Launched(slurm, tmp_path, "-N", "2", program, tmp_path / "backup", "2")
    run.wait_for("waits in generation 0")
    slurm.run("sbatch", "-p", "urgent", "-N", "3", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    run.wait_for("waits in generation 1")
    nodes = slurm.run("squeue", "-h", "-n", program.stem, "-o", "%N").strip()
    _, lost = slurm.run("scontrol", "show", "hostnames", nodes).split()
    left = ",".join(sorted({"h1", "h2", "h3"} - {lost}))
    slurm.kill_node(int(lost[1:]))
    # Meanwhile, in a batch script: plain Python, whose strategy reads Slurm's variables.
    plain = tmp_path / "plain.out"
    script = f"#!/bin/bash\nsrun {sys.executable} {program} {tmp_path / 'plain'} 0\n"
    (tmp_path / "plain.sh").write_text(script)
    slurm.run("sbatch", "-N", "2", "-w", left, "-D", str(tmp_path), "-o", str(plain), f"{tmp_path}/plain.sh")
    code, out = run.end()
    assert code == 0, run.everything()
    assert "runs on " + slurm.run("scontrol", "show", "hostlist", left).strip() in out
    until(lambda: plain.exists() and plain.read_text().count("state ") == 2, "the undisturbed run")
    assert state(out) == state(plain.read_text())
    assert "generation 2" in out
    slurm.start_node(int(lost[1:]))


def test_a_parameter_server_and_an_evaluator(slurm, tmp_path):
    run = Launched(
        slurm, tmp_path, "-N", "3", "--ps", "1", "--evaluator",
        PROGRAMS / "evaluated.py", tmp_path / "backup", "0",
    )  # fmt: skip
    assert run.end()[0] == 0, run.everything()
    check_evaluated(run.logs)


ELASTIC = """\
import json, os, time
workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
print(workers, "workers in generation", os.environ["UNISONO_GENERATION"], flush=True)
time.sleep(600 if workers == 3 else 0)
"""


def test_an_elastic_job_goes_on_without_a_node(slurm, tmp_path):
    (tmp_path / "elastic.py").write_text(ELASTIC)
    run = Launched(slurm, tmp_path, "--elastic", "1:3", tmp_path / "elastic.py")
    run.wait_for("3 workers in generation 0")
    # Not the first node, on which the batch script and worker 0 run.
    slurm.kill_node(3)
    try:
        assert run.end()[0] == 0, run.everything()
        assert "2 workers in generation 1" in run.out
    finally:
        slurm.start_node(3)


CALL = """\
import json, os, socket, unisono
def task(letter):
    return letter + str(json.loads(os.environ["TF_CONFIG"])["task"]["index"]), os.environ["SLURMD_NODENAME"]
print(unisono.launch(task, args=("a",), on="slurm", nodes=2, sbatch="--nodelist=h1,h2"))
"""


def test_a_function_returns_what_each_worker_has_returned(slurm, tmp_path):
    (tmp_path / "call.py").write_text(CALL)
    with slurm.start(
        sys.executable, "call.py", cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as done:
        out, err = done.communicate(timeout=LIMIT)
    assert out == "[('a0', 'h1'), ('a1', 'h2')]\n", err + slurm.logs()


def test_42_requeues_and_a_failure_starts_the_step_again(slurm, tmp_path):
    run = launched(slurm, tmp_path, "42,kill,0", "--max-restarts=1")
    code, out = run.end()
    assert code == 0, run.everything()
    assert [f"begins worker:0 in {n}" in out for n in range(3)] == [True] * 3
    number = re.search(r"submitted Slurm job (\d+)", out)[1]
    assert "Restarts=1 " in slurm.run("scontrol", "show", "job", "-o", number)


@pytest.mark.parametrize(
    ("what", "code", "cause"),
    [
        ("raise", 1, "worker:1 failed: ValueError: a bad number, in generation 0"),
        ("kill", 137, "worker:1 ended: srun says 'Killed', in generation 0"),
        ("7", 7, "worker:1 failed with exit code 7, in generation 0"),
    ],
)
def test_the_cause_is_last_and_the_code_that_of_the_first_task(slurm, tmp_path, what, code, cause):
    run = launched(slurm, tmp_path, what)
    found, out = run.end()
    assert found == code, run.everything()
    last = out.partition("failed (NonZeroExitCode)")[2]
    assert cause in last
    if what == "raise":
        assert out.rstrip().endswith("ValueError: a bad number")


def test_a_task_for_each_gpu(slurm, tmp_path):
    (tmp_path / "train.py").write_text("import os; print('GPU', os.environ['CUDA_VISIBLE_DEVICES'])")
    run = Launched(slurm, tmp_path, "-N", "2", "--gpus-per-node", "2", tmp_path / "train.py")
    assert run.end()[0] == 0, run.everything()
    logs = [(run.logs / f"worker-{i}.log").read_text() for i in range(4)]
    assert logs == ["GPU 0\n", "GPU 1\n", "GPU 0\n", "GPU 1\n"]


def check_the_log_directory_is_taken(slurm, run):
    """Another job, also one that is submitted by hand, may not write where this one does."""
    number = re.search(r"submitted Slurm job (\d+)", run.out)[1]
    command = (sys.executable, "-m", "unisono", "launch", "--on", "slurm", "--log-dir", run.logs)
    words = slurm.hosts.command(0, *command, run.logs.parent / "train.py", "0")
    options = {"env": slurm.environ, "capture_output": True, "text": True, "timeout": LIMIT}
    done = subprocess.run(words, check=False, **options)
    taken = f"which Slurm job {number} uses (runs on h"
    assert (done.returncode, taken in done.stderr) == (2, True), done.stderr
    script = run.logs.parent / "by_hand.sh"
    printed = subprocess.run([*words[:-2], "--print", *words[-2:]], check=True, **options)
    script.write_text(printed.stdout)
    other = slurm.run("sbatch", "--parsable", "--no-requeue", str(script)).strip()
    log = run.logs / f"slurm-{other}.log"
    until(lambda: log.exists() and f"which Slurm job {number} uses. Write" in log.read_text(), "the refusal")


def test_ctrl_c_cancels_the_job(slurm, tmp_path):
    run = launched(slurm, tmp_path, "wait")
    run.wait_for("begins worker:0")
    check_the_log_directory_is_taken(slurm, run)
    os.kill(run.process.pid, signal.SIGINT)
    code, out = run.end()
    assert (code, "cancelled" in out) == (130, True), run.everything()
    until(lambda: slurm.run("squeue", "-h", "-n", "train") == "", "the end of the job on its nodes")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-p", "absent"], "invalid partition specified: absent"),
        (["-N", "4"], "node configuration is not available"),
        (["--sbatch=--constraint=gpu"], "feature"),
    ],
)
def test_what_slurm_would_refuse_is_an_error_before_anything_starts(slurm, tmp_path, flags, message):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ("-m", "unisono", "launch", "--on", "slurm", *flags, tmp_path / "train.py", "0")
    done = subprocess.run(
        slurm.hosts.command(0, sys.executable, *command), env=slurm.environ, cwd=tmp_path,
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]
