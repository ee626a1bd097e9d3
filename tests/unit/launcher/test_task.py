"""The process of one task, by itself."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unisono.launcher import _task

AUTOGROUP = Path("/proc/self/autogroup")


def until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.01)


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="no scheduling groups")
def test_a_spare_that_gets_a_task_finishes_its_imports_at_full_priority(tmp_path):
    """On a busy machine the lowest priority is none: a restart would wait for minutes."""
    library = tmp_path / "unisono"
    library.mkdir()
    (library / "__init__.py").write_text(
        "import pathlib, time\n__all__ = []\npathlib.Path('importing').touch()\n"
        "while not pathlib.Path('go').exists():\n    time.sleep(0.01)\n"
    )
    for name in ("unisono/data", "unisono/cluster_resolver", "numpy", "jax/__init__", "jax/numpy", "keras"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "train.py").write_text("print('trained')\n")
    job = {"log": str(tmp_path / "log"), "environ": {}, "sys_path": None, "kind": "script", "args": []}
    job |= {"target": "train.py", "error": str(tmp_path / "error")}
    process = subprocess.Popen(
        [sys.executable, _task.__file__, str(os.getpid()), "warm"],
        stdin=subprocess.PIPE,
        cwd=tmp_path,
        start_new_session=True,
    )
    group = Path(f"/proc/{process.pid}/autogroup")
    with process:
        try:
            until((tmp_path / "importing").exists, "the imports")
            assert group.read_text().split()[-1] == "19"
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.close()
            until(lambda: group.read_text().split()[-1] == "0", "the priority of a task")
        finally:
            (tmp_path / "go").touch()
    assert process.returncode == 0
    assert (tmp_path / "log").read_text() == "trained\n"


def test_a_priority_is_set_as_soon_as_the_kernel_allows_it(monkeypatch):
    answers = iter([BlockingIOError, BlockingIOError, None])
    stop_requests = []

    def write_text(path, text):
        stop_requests.append((str(path), text))
        if error := next(answers):
            raise error

    monkeypatch.setattr(_task.Path, "write_text", write_text)
    monkeypatch.setattr(_task.time, "sleep", lambda seconds: None)
    _task._set_group_priority(0)
    assert stop_requests == [(str(AUTOGROUP), "0\n")] * 3
