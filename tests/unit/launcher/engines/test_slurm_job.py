"""The batch script for Slurm, and what Slurm says of its job."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from unisono import InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher.engines import _slurm_job
from unisono.launcher.engines._engine import Submission
from unisono.launcher.engines._settings import SlurmSettings
from unisono.launcher.engines._slurm import render
from unisono.launcher.engines._slurm_job import (
    SlurmJob,
    check_with_slurm,
    first_killed,
    folder_of_job,
    read_states,
)

PROGRAM = UserProgram(__file__, ("--name", "a b"))


def script(options=None, log_dir=None, **settings):
    options = options or LaunchOptions(workers=2)
    return render(Submission(options, PROGRAM, log_dir, SlurmSettings(**settings)))


def arguments(text):
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]


def runs(tmp_path, text, codes, restarted=0):
    """Run a script with an `srun` whose tasks end with these codes in turn; return its code and the calls."""
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    stand_in = """#!/bin/sh
echo "$0 $UNISONO_GENERATION $*" >>calls
case $0 in *scontrol) exit 0;; esac
code=$(head -1 codes); sed -i 1d codes
[ $code = 0 ] && exit 0
if [ $code = 137 ]; then echo "srun: error: n2: task 1: Killed"; else
echo "srun: error: n2: task 1: Exited with exit code $code"; fi >&2
echo "srun: error: n1: task 0: Terminated" >&2
exit 143
"""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(stand_in)
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    done = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60,
        env=environ | ({"SLURM_RESTART_COUNT": str(restarted)} if restarted else {}),
    )  # fmt: skip
    calls = (tmp_path / "calls").read_text().replace(f"{tmp_path}/", "").splitlines()
    return done.returncode, [[*call.split(" ")[:2], call.split(" ")[-1]] for call in calls]


def test_one_task_per_gpu_fills_the_nodes():
    settings = SlurmSettings(nodes=2, gpus_per_node="a100:4")
    options = LaunchOptions(workers=settings.default_workers(others=2), ps=1, evaluator=True)
    given = arguments(render(Submission(options, PROGRAM, None, settings)))
    assert {"nodes=2", "ntasks=8", "ntasks-per-node=4", "gpus-per-node=a100:4"} <= set(given)


def test_the_arguments_of_sbatch():
    given = arguments(
        script(partition="big", time="1:00:00", account="us", sbatch=("--mem=8G",), array="0-3")
    )
    for each in ("requeue", "signal=TERM@90", "partition=big", "time=1:00:00", "account=us", "mem=8G"):
        assert each in given
    assert "array=0-3" in given
    assert any(each.endswith("/slurm-%A_%a.log") for each in given)
    assert "signal=TERM@181" in arguments(script(LaunchOptions(grace=120.5)))


def test_a_word_with_spaces_stays_one():
    assert "#SBATCH '--comment=two words'" in script(sbatch=("--comment=two words",))
    assert f"{__file__} --name 'a b' 2>" in script()


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (
            LaunchOptions(workers=5),
            {"nodes": 2, "gpus_per_node": "2"},
            "5 tasks for 2 nodes with 2.*`--nodes 3`",
        ),
        (LaunchOptions(workers=2, elastic=(1, 2)), {"nodes": 2}, "Leave `--nodes` out"),
        (None, {"nodes": 0}, "`--nodes` must be at least 1"),
        (None, {"gpus_per_node": "a:b"}, "`--gpus-per-node` must be a number"),
    ],
)
def test_what_cannot_be_right(options, settings, message):
    with pytest.raises(InvalidArgumentError, match=message):
        script(options, **settings)


def test_the_script_must_exist():
    with pytest.raises(InvalidArgumentError, match="The script must be a file"):
        render(Submission(LaunchOptions(), UserProgram("absent.py"), None, SlurmSettings()))


def test_without_slurm(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InvalidArgumentError, match="no `sbatch` on this machine"):
        check_with_slurm("")


def test_names_that_sbatch_would_read_otherwise():
    assert "output=/logs/a%%j{b}/slurm-%j.log" in arguments(script(log_dir=Path("/logs/a%j{b}")))[2]
    for folder in ("a\nb", "a\\b"):
        with pytest.raises(InvalidArgumentError, match="no line break, and a folder no backslash"):
            script(log_dir=Path(folder))
    with pytest.raises(InvalidArgumentError, match="no line break"):
        script(sbatch=("--comment=a\ntouch b",))


@pytest.mark.parametrize(
    ("number", "end"), [(1, r"the end of .*\n\[slurm-1.log\] module: not found"), (2, "there is no log")]
)
def test_a_job_that_ended_before_its_first_step(tmp_path, monkeypatch, number, end):
    (tmp_path / "slurm-1.log").write_text("module: not found\n")
    answer = subprocess.CompletedProcess((), 0, f"{number}\n", "")
    monkeypatch.setattr(_slurm_job, "_slurm", lambda *words, text: answer)
    job = SlurmJob("", LaunchOptions(), tmp_path, tmp_path / "a{b}", is_array=False)
    assert re.search(end, job._report([]))


@pytest.mark.parametrize("index", ["", "3"])
def test_a_job_that_was_ended_after_its_tasks_had_saved(tmp_path, monkeypatch, index):
    answer = subprocess.CompletedProcess((), 0, "1\n", "")
    monkeypatch.setattr(_slurm_job, "_slurm", lambda *words, text: answer)
    job = SlurmJob("", LaunchOptions(workers=2, ps=1), tmp_path, tmp_path, is_array=bool(index))
    errors = tmp_path / "1" / index / "errors"
    errors.mkdir(parents=True)
    array = f" ArrayTaskId={index}" if index else ""

    def code(state="CANCELLED"):
        line = f"JobId=1{array} JobState={state} Reason=None Restarts=0 ExitCode=0:15 NodeList=n1"
        return job._code(*read_states(line))

    record = {"at": 1.0, "code": 42, "summary": "has saved", "traceback": ""}
    assert code() == 143
    (errors.parent / "fence").write_text("2\n")
    # With parameter servers the chief saves, here worker 0, and the others serve it.
    (errors / "g1-worker-0.json").write_text(json.dumps(record))
    assert code() == 143
    (errors / "g2-worker-0.json").write_text(json.dumps(record))
    assert (code(), code("TIMEOUT"), code("NODE_FAIL")) == (42, 42, 143)
    (errors / "g2-worker-1.json").write_text(json.dumps(record | {"code": 1}))
    assert code() == 42
    (errors / "g2-worker-0.json").write_text(json.dumps(record | {"code": 1}))
    assert code() == 143


class TestScript:
    """The script in a shell, with a stand-in for `srun`."""

    def test_success(self, tmp_path):
        assert runs(tmp_path, script(log_dir=tmp_path), [0]) == (0, [["srun", "0", "b"]])
        assert (tmp_path / "fence").read_text() == "0\n"

    def test_a_line_of_setup_that_fails_ends_the_job(self, tmp_path):
        text = script(log_dir=tmp_path, setup=("a='it is'", "(exit 7)", "touch calls"))
        done = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, check=False, capture_output=True, timeout=60
        )
        assert (done.returncode, list(tmp_path.iterdir())) == (7, [])
        assert done.stderr == b"unisono: --setup must succeed. Received: (exit 7)\n"

    def test_the_code_is_that_of_the_task_that_ended_first(self, tmp_path):
        assert runs(tmp_path, script(log_dir=tmp_path), [3])[0] == 3
        assert runs(tmp_path, script(log_dir=tmp_path), [137])[0] == 137

    def test_exit_code_42_requeues_the_job(self, tmp_path):
        code, calls = runs(tmp_path, script(log_dir=tmp_path), [42])
        assert (code, calls[1]) == (42, ["scontrol", "0", "7"])

    def test_a_requeued_job_is_the_next_generation(self, tmp_path):
        (tmp_path / "fence").write_text("4\n")
        text = script(log_dir=tmp_path)
        assert runs(tmp_path, text, [0], restarted=1) == (0, [["srun", "5", "b"]])
        # Killed while it writes, a script must not leave an empty file: generations would begin anew.
        assert text.count('"$logs/fence"') == 2
        assert 'mv "$logs/fence.new" "$logs/fence"' in text

    @pytest.mark.parametrize(("codes", "code"), [([1, 137, 0], 0), ([1, 1, 9, 0], 9), ([1, 42, 0], 42)])
    def test_failures_are_restarted_as_often_as_allowed(self, tmp_path, codes, code):
        text = script(dataclasses.replace(LaunchOptions(), max_restarts=2), log_dir=tmp_path)
        found, calls = runs(tmp_path, text, codes)
        steps = [generation for name, generation, _ in calls if name == "srun"]
        assert (found, steps) == (code, ["0", "1", "2"][: len(steps)])

    def test_a_step_that_does_not_end_after_a_failure_is_cancelled(self, tmp_path):
        stand_ins = {
            "srun": 'echo "srun: launch/slurm: _step_signal: Terminating StepId=7.0" >&2\n'
            "until [ -e cancelled ]; do /bin/sleep 0.02; done; exit 9",
            "scontrol": "echo 'KillWait                = 30 sec'",
            "sleep": "echo $1 >>slept",
            "scancel": "echo $1 >cancelled",
        }
        for name, text in stand_ins.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        done = subprocess.run(
            ["bash", "-c", script(log_dir=tmp_path)], cwd=tmp_path, check=False, timeout=60,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        )  # fmt: skip
        assert done.returncode == 9
        assert (tmp_path / "cancelled").read_text() == "7.0\n"
        assert (tmp_path / "slept").read_text().split()[-1] == "45"

    def test_elastic_takes_the_nodes_that_there_are(self, tmp_path):
        options = LaunchOptions(workers=5, elastic=(2, 5))
        text = script(options, log_dir=tmp_path, ntasks_per_node=2)
        assert "nodes=1-3" in arguments(text)
        runs(tmp_path, text, [0])
        assert "--ntasks=5 " in (tmp_path / "calls").read_text()

    def test_parameter_servers_have_a_key_that_restarts_keep(self, tmp_path):
        text = script(LaunchOptions(ps=1, max_restarts=1), log_dir=tmp_path)
        runs(tmp_path, text, [1, 0])
        key = tmp_path / "cluster_key"
        assert (len(key.read_text().strip()), key.stat().st_mode & 0o777) == (64, 0o600)

    def test_each_job_of_an_array_has_its_folder(self, tmp_path):
        assert 'logs="$logs/$SLURM_ARRAY_TASK_ID"' in script(array="0-3", log_dir=tmp_path)


def test_states_of_jobs():
    text = (
        "JobId=9 ArrayJobId=7 ArrayTaskId=1 JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 "
        "ReqNodeList=(null) ExcNodeList=(null) NodeList=n[1-2] BatchHost=n1\n"
        "JobId=8 ArrayJobId=7 JobState=NODE_FAIL Reason=NodeDown Restarts=0 ExitCode=0:0 NodeList=n1\n"
    )
    running, lost = read_states(text)
    assert (running.has_ended, running.text) == (False, "runs on n[1-2]")
    assert (lost.has_ended, lost.text, lost.code) == (True, "node fail (NodeDown)", 1)


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("srun: error: n1: tasks 2-3: Exited with exit code 1", Task("ps", 0)),
        ("srun: error: n1: tasks 1,3: Killed\nsrun: error: n2: task 0: Terminated", Task("worker", 1)),
        ("srun: error: Node failure on n2", None),
    ],
)
def test_the_task_that_ended_first(text, task):
    assert [f.task for f in first_killed(text, LaunchOptions(workers=2, ps=2))] == ([task] if task else [])


def test_the_folder_of_a_job_is_found_by_its_name(tmp_path, monkeypatch):
    logs = tmp_path / "my logs"
    logs.mkdir()
    outputs = {"7": f"   StdErr=/x\n   StdOut={tmp_path}/gone/slurm-7.log\n"}
    outputs["12"] = f"   StdOut={logs}/slurm-12.log\n"

    def answer(*words, text=""):
        found = "12\n7\n12\n" if "--name=train" in words else outputs.get(words[-1], "")
        return subprocess.CompletedProcess(words, 0, found, "")

    monkeypatch.setattr(_slurm_job, "_slurm", answer)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert folder_of_job("train") == logs
    assert folder_of_job("other") is None
    del outputs["12"]
    assert folder_of_job("train") is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert folder_of_job("train") is None
