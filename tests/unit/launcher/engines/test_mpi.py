"""The script with `mpirun`, hostfiles, and what `mpirun` says of its ranks."""

import shutil

import pytest

from unisono import InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher.engines._engine import Submission
from unisono.launcher.engines._mpi import first_ended, render, run
from unisono.launcher.engines._settings import MpiSettings, rank_hosts


def submission(tmp_path, options=None, **settings):
    options = options or LaunchOptions(workers=3)
    return Submission(options, UserProgram(__file__, ("a b",)), tmp_path / "logs", MpiSettings(**settings))


def hostfile(tmp_path, text):
    (tmp_path / "hosts").write_text(text)
    return str(tmp_path / "hosts")


def test_one_machine(tmp_path):
    *_, command = render(submission(tmp_path, mpirun=("--report-bindings",))).splitlines()
    assert command.startswith(
        "exec mpirun -n 3 --map-by slot --bind-to none --host localhost:3 --report-bindings "
    )
    assert command.endswith(f" --log-dir=\"$logs\" {__file__} 'a b'")
    assert "--hosts" not in command


def test_the_slots_of_a_hostfile_say_where_each_rank_is(tmp_path):
    hosts = hostfile(tmp_path, "# ours\nn1 slots=2 max_slots=4\n\nn2  slots = 3 # big\nn3\n")
    assert rank_hosts(hosts) == ["n1", "n1", "n2", "n2", "n2", "n3"]
    assert MpiSettings(hostfile=hosts).default_workers(others=2) == 4
    text = render(submission(tmp_path, hostfile=hosts))
    assert f"--hostfile {hosts} " in text
    assert " --hosts=n1,n1,n2 " in text


def test_parameter_servers_have_a_key(tmp_path):
    assert '>"$logs/cluster_key"' in render(submission(tmp_path, LaunchOptions(ps=1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n1 slots=2\n", r"2 slots in '.*hosts' for 3 tasks. Write more slots, such as `n1 slots=2`"),
        ("n1 slots=two\n", "Received: 'n1 slots=two'"),
        ("# none\n", "a line for each host"),
    ],
)
def test_hostfiles_that_cannot_be_right(tmp_path, text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        render(submission(tmp_path, hostfile=hostfile(tmp_path, text)))


def test_a_hostfile_that_is_not_there(tmp_path):
    with pytest.raises(InvalidArgumentError, match="must be a text file"):
        render(submission(tmp_path, hostfile=str(tmp_path / "absent")))


@pytest.mark.parametrize(
    ("options", "flag"),
    [(LaunchOptions(max_restarts=1), "--max-restarts"), (LaunchOptions(elastic=(1, 1)), "--elastic")],
)
def test_mpi_restarts_nothing(tmp_path, options, flag):
    with pytest.raises(InvalidArgumentError, match=f"Received: `{flag}`"):
        render(submission(tmp_path, options))


def test_without_mpirun(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InvalidArgumentError, match="no `mpirun` on this machine"):
        run(submission(tmp_path))
    assert not (tmp_path / "logs").exists()


def test_an_mpirun_that_is_not_of_open_mpi(tmp_path, monkeypatch):
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho HYDRA build details:\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(InvalidArgumentError, match=r"mpirun, which says 'HYDRA build details:'"):
        run(submission(tmp_path))
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("log", "code"),
    [
        ("to do so was:\n\n  Process name: [[1760,1],1]\n  Exit code:    7\n", 7),
        ("to do so was:\n\n   Process name: [prterun-vm-24563@1,1]\n   Exit code:    7\n", 7),
        ("mpirun noticed that process rank 1 with PID 0 on node h1 exited on signal 9 (Killed).\n", 137),
        ("prterun noticed that process rank 1 with PID 2 on node vm exited on\nsignal 9 (Killed).\n", 137),
    ],
)
def test_the_rank_that_ended_first(log, code):
    """As Open MPI 4.1 and 5.0 write it."""
    (failure,) = first_ended(log, LaunchOptions(workers=1, ps=1))
    assert (failure.task, failure.code) == (Task("ps", 0), code)
    assert first_ended("mpirun was unable to launch", LaunchOptions()) == []
