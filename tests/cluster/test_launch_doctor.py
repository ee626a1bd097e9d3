"""`unisono doctor`."""

import json
import re
import subprocess
import sys

from tests import forked
from tests.cluster.launch_support import LIMIT


def doctor(*args, **environ):
    command = [sys.executable, "-m", "unisono", "doctor", *args]
    env = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env)


def test_all_is_well(tmp_path):
    done = doctor("--dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("ok ") for line in lines)
    assert any("all-reduce" in line and "1 replica, right" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_all_reduces_between_two_processes(tmp_path):
    done = forked.run(["-m", "unisono", "doctor", "-n", "2", "--model", "0.5", "--json"], tmp_path, LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert re.fullmatch(r"[\d.e+]+ ms for 4 bytes, [\d.e+-]+ GB/s for 0.5 MB", found["link"]["text"])
    assert "for 0.5 MB of gradients" in found["all-reduce of a model"]["text"]


def test_what_is_wrong_is_found_and_nothing_secret_told(tmp_path):
    environ = {"TF_CONFIG": '{"cluster": {"wroker": ["a:1"]}}', "API_TOKEN": "secret-token"}
    done = doctor("--json", "--dir", str(tmp_path / "absent"), **environ)
    assert done.returncode == 1
    findings = json.loads(done.stdout)
    assert {name for name, finding in findings.items() if not finding["ok"]} == {"cluster", "file system"}
    assert "write 'worker'" in findings["cluster"]["text"]
    assert "secret-token" not in done.stdout
