import json
import logging
import os
import pickle
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from unisono._system._signals import RESTART_WANTED
from unisono.launcher import _task
from unisono.launcher._function_call import pickle_call

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


def test_a_call_shows_the_messages_that_its_caller_shows(tmp_path):
    def level():
        return logging.getLogger("unisono").level

    log = logging.getLogger("unisono")
    before = log.level
    found = []
    try:
        for callers in (logging.INFO, logging.WARNING):
            log.setLevel(callers)
            (tmp_path / "call").write_bytes(pickle_call(level, ()))
            log.setLevel(logging.ERROR)
            _task._call(tmp_path / "call", tmp_path / "result")
            found.append(pickle.loads((tmp_path / "result").read_bytes()))
    finally:
        log.setLevel(before)
    # A program's own level stays where the caller has chosen none.
    assert found == [logging.INFO, logging.ERROR]


def test_a_forked_process_of_a_call_writes_no_result(tmp_path):
    script = f"""
import os, pathlib, cloudpickle
from unisono.launcher import _task
from unisono.launcher._function_call import pickle_call
def forks():
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return "parent" if child else "child"
root = pathlib.Path({str(tmp_path)!r})
(root / "call").write_bytes(cloudpickle.dumps((forks, (), 30)))
_task._call(root / "call", root / f"result-{{os.getpid()}}")
print([b"parent" in path.read_bytes() for path in root.glob("result*")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[True]", done.stdout


def test_a_title_leaves_the_environment_where_the_launcher_reads_it(monkeypatch):
    titles = []
    fake = types.SimpleNamespace(
        setproctitle=lambda title: titles.append((title, os.environ["SPT_NOENV"])),
        setthreadtitle=titles.append,
    )
    monkeypatch.setitem(sys.modules, "setproctitle", fake)
    _task.set_title("unisono worker:1 train.py")
    assert titles == [("unisono worker:1 train.py", "1"), "worker:1"]
    monkeypatch.setitem(sys.modules, "setproctitle", None)
    _task.set_title("unisono worker:1 train.py")
    assert "SPT_NOENV" not in os.environ


def test_the_short_name_of_a_process_has_no_blank():
    pytest.importorskip("setproctitle")
    script = """
import os
from unisono.launcher import _task
_task.set_title("unisono worker:1 train.py")
print(open("/proc/self/stat").read().split()[3] == str(os.getppid()), open("/proc/self/cmdline").read())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[0].strip() == "True unisono worker:1 train.py", done.stdout


def test_the_exit_code_that_wants_a_restart_is_that_of_the_library():
    assert _task._RESTART_WANTED == RESTART_WANTED


def test_a_spare_follows_the_jax_variables_of_its_job(tmp_path):
    """JAX has been imported before the job and its variables are there."""
    (tmp_path / "train.py").write_text(
        "import jax; print(jax.config.jax_platforms, jax.config.jax_enable_x64)"
    )
    job = {"log": str(tmp_path / "log"), "sys_path": None, "kind": "script", "args": [], "target": "train.py"}
    job |= {"environ": {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}, "error": str(tmp_path / "error")}
    code = f"import jax\nfrom unisono.launcher import _task\njob = {job!r}\n_task.take_over(job, warm=True)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "_task.run(job)"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("JAX_")},
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "log").read_text() == "cpu True\n"
