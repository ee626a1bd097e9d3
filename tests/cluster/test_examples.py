"""The examples of several workers print the numbers of one process: by the launcher, and by TF_CONFIG."""

import json
import re
from pathlib import Path

import pytest

from tests import forked
from tests.cluster._workers import Workers
from tests.cluster.tasks_by_hand import TasksByHand

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBER = r"\d+\.\d+"

#: file: (what it prints at its end, for how many numbers)
CASES = {
    "multi_worker_keras.py": {"Losses": 5, "Evaluation loss": 1, "Predictions": 1},
    "multi_worker_custom_loop.py": {"Evaluation loss": 2, "Loop": 1},
}
#: file: arguments.
SHORT = {"multi_worker_custom_loop.py": ["--epochs", "2"]}


def run(folder, *command):
    done = forked.run(command, folder, 400)
    logs = "\n".join(f"--- {log.name}\n{log.read_text()}" for log in folder.glob("logs/*.log"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs[-6000:]
    return done.stdout


def command_of(name):
    return [str(EXAMPLES / name), *SHORT.get(name, [])]


def numbers(output, name):
    """The numbers of the lines that count, by what they are."""
    found = {}
    for what, count in CASES[name].items():
        lines = re.findall(rf"{what}: .*", output)
        assert len(lines) == 1, f"{what!r} must be printed once:\n{output[-4000:]}"
        found[what] = [float(n) for n in re.findall(NUMBER, lines[0])]
        assert len(found[what]) == count, lines
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What each prints in one process; run when it is asked for."""
    found = {}

    def numbers_of(name):
        if name not in found:
            found[name] = numbers(run(tmp_path_factory.mktemp("alone"), *command_of(name)), name)
        return found[name]

    return numbers_of


def assert_same(found, expected):
    # Two workers add in another order; the last digit that is printed may differ.
    assert found == {what: pytest.approx(values, abs=2e-4, rel=1e-3) for what, values in expected.items()}


@pytest.mark.parametrize("name", CASES)
def test_two_workers_by_the_launcher(alone, tmp_path, name):
    launch = ["-m", "unisono", "launch", "-n", "2", "--log-dir", "logs"]
    output = run(tmp_path, *launch, *command_of(name))
    assert_same(numbers(output, name), alone(name))
    other = (tmp_path / "logs" / "worker-1.log").read_text()
    assert "Evaluation" not in other
    assert "Epoch" not in other


def test_two_workers_by_hand(alone, tmp_path):
    name = "multi_worker_keras.py"
    workers = Workers(tmp_path, [str(EXAMPLES / name)])
    assert workers.wait(400) == [0, 0], workers.text()
    assert_same(numbers(workers.logs[0].read_text(), name), alone(name))
    assert "Workers: 2, replicas: 2" in workers.logs[1].read_text()


def test_parameter_servers_by_the_launcher_with_an_evaluator(tmp_path):
    """The form of `fit`: each update counts once, and the chief's numbers are those of its checkpoints."""
    flags = ["-n", "2", "--ps", "1", "--chief", "--evaluator", "--log-dir", "logs"]
    output = run(tmp_path, "-m", "unisono", "launch", *flags, str(EXAMPLES / "parameter_server_fit.py"))
    assert "Steps: 192" in output
    (accuracy,) = re.findall(r"Evaluation accuracy: (0\.9[5-9]\d)", output)
    evaluated = (tmp_path / "logs" / "evaluator-0.log").read_text()
    (last,) = re.findall(r"checkpoint step 192: .* accuracy (0\.\d+)", evaluated)
    assert float(last) == pytest.approx(float(accuracy), abs=6e-4)
    for task in ("worker-0", "worker-1", "ps-0"):
        assert (tmp_path / "logs" / f"{task}.log").read_text() == ""


def test_a_table_on_two_servers(tmp_path):
    flags = ["-n", "2", "--ps", "2", "--chief", "--log-dir", "logs"]
    small = [str(EXAMPLES / "wide_and_deep.py"), "--rows", "50000", "--steps", "30", "--batch", "64"]
    output = run(tmp_path, "-m", "unisono", "launch", *flags, *small)
    assert "Servers of the table: 2" in output
    # Of 3.2 MB a step moves some 200 rows of 64 bytes; the small table of 0.2 MB travels whole.
    moved = [float(re.findall(rf"{name}_mb: ([0-9.]+)", output)[-1]) / 30 for name in ("pulled", "pushed")]
    assert all(0.2 < megabytes < 0.26 for megabytes in moved), moved


@pytest.mark.exhaustive
def test_the_notebook(tmp_path):
    """Its cells, one after the other, in a process of their own."""
    cells = json.loads((EXAMPLES / "launch.ipynb").read_text())["cells"]
    assert all(cell["source"] for cell in cells)
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n\n".join(code) + "\n")
    output = run(tmp_path, "cells.py")
    first, second = re.findall(r"worker (\d): accuracy (0\.9\d+)", output)
    assert (first[0], second[0], first[1]) == ("0", "1", second[1])
    assert "the first digits: [0, 1, 2, 3, 4]" in output


def test_parameter_servers_by_hand_without_a_chief(tmp_path):
    """The tutorial's loop: worker 0 is the chief, and computes; two servers divide the table."""
    with TasksByHand(tmp_path, EXAMPLES / "parameter_server_custom_loop.py") as tasks:
        assert set(tasks.wait().values()) == {0}, tasks.text()
    output = tasks.log("worker", 0).read_text()
    assert len(re.findall(r"Finished epoch \d, accuracy is", output)) == 4
    assert "Evaluation accuracy: 1.0" in output
    assert tasks.log("worker", 1).read_text() == ""


def test_the_first_lines_say_how_to_run_it():
    for name in CASES:
        assert f"unisono launch -n 2 examples/{name}" in (EXAMPLES / name).read_text()
    for name in ("parameter_server_fit.py", "parameter_server_custom_loop.py"):
        assert f"unisono launch -n 2 --ps 1 --chief examples/{name}" in (EXAMPLES / name).read_text()


def test_the_program_of_the_readme(tmp_path):
    text = (EXAMPLES.parent / "README.md").read_text()
    section = text.partition("## Many workers")[2].partition("\n## ")[0]
    assert len(section.splitlines()) <= 20
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    output = run(tmp_path, "-m", "unisono", "launch", "-n", "2", "--log-dir", "logs", "train.py")
    assert "Epoch 3/3" in output
