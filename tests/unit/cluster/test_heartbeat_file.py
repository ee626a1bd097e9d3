"""Signs of life: written once a second at most, and the end of a process that was replaced."""

import subprocess
import sys
import textwrap
import time

from unisono._system._task_reports import Heartbeat, heartbeat_of_environ
from unisono.cluster.liveness._heartbeat_file import HeartbeatFile


def test_the_file_holds_the_last_step(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    heart = HeartbeatFile(tmp_path / "progress", None, "0")
    for _ in range(3):
        heart.beat()
    assert (tmp_path / "progress").read_text().split()[0] == "1"
    clock[0] += 1.1
    heart.beat()
    assert (tmp_path / "progress").read_text().split()[0] == "4"


def test_a_disk_that_takes_nothing_does_not_stop_training(tmp_path, monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    removed = tmp_path / "removed" / "progress"
    # A device that has no room, behind the file's name.
    full = tmp_path / "progress"
    full.symlink_to("/dev/full")
    for path in (removed, full):
        caplog.clear()
        heart = HeartbeatFile(path, None, "0")
        for _ in range(3):
            heart.beat()
            clock[0] += 1.1
        assert heart.steps == 3
        (record,) = caplog.records
        assert str(path) in record.getMessage()
    removed.parent.mkdir()
    heart = HeartbeatFile(removed, None, "0")
    heart.beat()
    assert removed.read_text().startswith("1 ")


def test_an_older_fence_ends_nothing(tmp_path):
    # The supervisor could not write the newer one.
    (tmp_path / "fence").write_text("1\n")
    heart = HeartbeatFile(tmp_path / "progress", tmp_path / "fence", "2")
    heart.beat()
    assert (tmp_path / "progress").exists()


def test_without_a_supervisor_nothing_is_written():
    assert type(heartbeat_of_environ()) is Heartbeat


def test_the_variables_of_a_supervisor_name_the_files(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_PROGRESS", str(tmp_path / "progress"))
    heartbeat_of_environ().beat()
    assert (tmp_path / "progress").read_text().startswith("1 ")


def test_a_replaced_process_ends_before_it_writes(tmp_path):
    (tmp_path / "fence").write_text("4\n")
    program = textwrap.dedent(f"""
        from pathlib import Path
        from unisono.cluster.liveness._heartbeat_file import HeartbeatFile
        folder = Path({str(tmp_path)!r})
        HeartbeatFile(folder / "progress", folder / "fence", "4").beat()
        (folder / "progress").unlink()
        HeartbeatFile(folder / "progress", folder / "fence", "3").beat()
    """)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "of generation 3, the cluster is at 4" in done.stderr
    assert not (tmp_path / "progress").exists()
