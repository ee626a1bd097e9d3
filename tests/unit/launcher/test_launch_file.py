"""The file of a log folder that tells of the launch as a whole."""

import json
import sys

from unisono.launcher._launch_file import write_launch_file
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import RunPaths


def test_the_program_its_tasks_and_the_restarts_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/unisono", "launch", "-n", "2", "my train.py"])
    options = LaunchOptions(workers=2, ps=1, devices_per_worker=3, max_restarts=4)
    write_launch_file(RunPaths(tmp_path), options, "my train.py")
    record = json.loads((tmp_path / "launch.json").read_text())
    assert (record["title"], record["command"]) == ("my train.py", "unisono launch -n 2 'my train.py'")
    assert (record["max_restarts"], record["restart_window_s"]) == (4, 600.0)
    config = dict(record["config"])
    assert (config["tasks"], config["devices of a task"]) == ("2 workers, 1 ps", "3")
    assert (config["restarts"], config["log folder"]) == ("4 in 10 minutes", str(tmp_path))


def test_servers_that_hold_the_events_are_named(tmp_path):
    write_launch_file(
        RunPaths(tmp_path), LaunchOptions(), "train.py", {"kind": "ray", "launch": "train.py/1"}
    )
    record = json.loads((tmp_path / "launch.json").read_text())
    assert record["servers"] == {"kind": "ray", "launch": "train.py/1"}
