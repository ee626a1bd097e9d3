"""`unisono doctor` and `unisono plan`."""

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


def test_a_plan_of_a_model(tmp_path):
    (tmp_path / "model.py").write_text(
        "import keras\n"
        "def make_model():\n"
        "    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(50)])\n"
        "    model.compile('adam', 'mse')\n"
        "    return model\n"
    )
    given = ["--devices", "4", "--link", "1gbit", "--step-ms", "1", "--ps", "0", "--memory", "1mb"]
    done = forked.run(["-m", "unisono", "plan", "model.py", *given], tmp_path, LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.endswith("yes")]
    rows = {line[:25].strip(): line[25:] for line in lines}
    cells = {name: re.findall(r"[\d.]+ \w+", text) for name, text in rows.items()}
    # 5,050 weights and their two slots, of which a quarter each, and some numbers besides.
    assert (cells["MirroredStrategy"][0], cells['state_layout="sharded"'][0]) == ("60.6 kB", "30.3 kB")
    # 2 * 3/4 of 20.2 kB at 125 MB/s.
    assert cells["MirroredStrategy"][3:] == ["30.3 kB", "0.242 ms", "1.24 ms"]
