"""What `make gpu` says about a machine before it installs anything."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu import machine

SMI = """\
#!/bin/sh
case "$1" in
-L) printf '%s' "{listed}" ;;
*) printf '%s' "{queried}" ;;
esac
exit {code}
"""
H100 = "{}, GPU-{}, NVIDIA H100 80GB HBM3, {}, 81559, 4, 9.0"
V100 = "0, GPU-v, Tesla V100-SXM2-16GB, 580.65.06, 16384, 0, 7.0"
THOR = "0, GPU-t, NVIDIA Thor, 580.00, [N/A], [N/A], 11.0"
TWO = "\n".join(H100.format(i, "ab"[i], "580.65.06") for i in range(2))
INSTANCES = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)
  MIG 1g.10gb     Device  0: (UUID: MIG-11111111-aa)
  MIG 1g.10gb     Device  1: (UUID: MIG-22222222-bb)
"""


@pytest.fixture
def checked(tmp_path):
    """Runs the check as `make gpu` does, on a machine whose `nvidia-smi` says what it is given."""

    def check(queried=None, cuda="13", listed="", code=0, **environ):
        if queried is not None:
            script = tmp_path / "nvidia-smi"
            script.write_text(SMI.format(queried=queried, listed=listed, code=code))
            script.chmod(0o755)
        command = [sys.executable, "-m", "tests.gpu.machine", "--cuda", cuda]
        root = Path(__file__).parents[2]
        environ |= {"PATH": f"{tmp_path}:/bin"}
        return subprocess.run(
            command, env=environ, cwd=root, capture_output=True, text=True, timeout=60, check=False
        )

    return check


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"queried": TWO}, "2 x NVIDIA H100 80GB HBM3 (80 GiB), driver 580.65.06\n"),
        ({"queried": TWO, "CUDA_VISIBLE_DEVICES": "1"}, "1 x NVIDIA H100 80GB HBM3 (80 GiB), driver 580"),
        ({"queried": TWO, "listed": INSTANCES}, "2 x NVIDIA H100 80GB HBM3 (80 GiB) as MIG instances"),
        ({"queried": THOR}, "1 x NVIDIA Thor (0 GiB)"),
        ({"queried": V100, "cuda": "12"}, "1 x Tesla V100"),
    ],
    ids=["two", "one of two", "MIG", "shared memory", "older"],
)
def test_gpus_that_will_do(checked, given, said):
    done = checked(**given)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "`nvidia-smi` was not found"),
        ({"queried": "Driver/library version mismatch", "code": 18}, "exit code 18, 'Driver/library"),
        ({"queried": ""}, "names no GPU"),
        ({"queried": H100.format(0, "a", "550.54.14")}, "Received: 550.54.14.*Or write `make gpu CUDA=12`"),
        ({"queried": H100.format(0, "a", "470.1"), "cuda": "12"}, "driver 525 or later. Received: 470.1"),
        ({"queried": V100}, "capability 7.5 or higher. Received: Tesla V100-SXM2-16GB with 7.0"),
        ({"queried": TWO, "CUDA_VISIBLE_DEVICES": ""}, "shows no GPU: unset it"),
    ],
    ids=["no driver", "broken driver", "no GPU", "old driver", "older driver", "old GPU", "hidden"],
)
def test_what_is_missing_is_named_before_anything_is_installed(checked, given, said):
    done = checked(**given)
    assert done.returncode == 1
    assert done.stderr.startswith("make gpu: ")
    assert re.search(said, done.stderr), done.stderr


def test_values_that_show_one_instance_to_a_process(monkeypatch):
    monkeypatch.setattr(machine, "run", lambda *command: INSTANCES if "-L" in command else TWO)
    assert machine.visible({}) == ["MIG-11111111-aa", "MIG-22222222-bb"]
    assert machine.visible({"CUDA_VISIBLE_DEVICES": "GPU-b,0"}) == ["GPU-b", "0"]
    assert [gpu.index for gpu in machine.of_places(["GPU-b", "0"], machine.gpus())] == [1, 0]
