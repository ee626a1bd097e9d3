"""What the command line says of flags at the wrong place."""

import re
import sys

import pytest
from typer.testing import CliRunner

from unisono._errors import InvalidArgumentError, MissingPackageError
from unisono.cli._app import app
from unisono.cli._doctor import try_files


@pytest.mark.parametrize(
    ("words", "is_warned"),
    [
        (["absent.py", "-n", "2"], True),
        (["absent.py", "--ps", "1"], True),
        (["-n", "2", "absent.py", "-n", "3"], False),  # the script's own flag
        (["absent.py", "--epochs", "3"], False),
    ],
)
def test_flags_behind_the_script_are_the_scripts(words, is_warned):
    result = CliRunner().invoke(app, ["launch", *words])
    assert "must be a file" in str(result.exception)
    assert ("flags after the script belong to the script" in result.stderr) == is_warned


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("launch", "unisono launch -n 2 train.py --epochs 3"),
        ("explain", "unisono explain model.py"),
    ],
)
def test_without_a_word_there_is_help(command, example):
    result = CliRunner().invoke(app, [command])
    assert example in result.output
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["launch", "--cluster", "node1", "train.py"],
            r"each with its port\. Received: 'node1'\. Write `--cluster host1:2222",
        ),
        (["migrate", "absent.py"], r"absent\.py.*Write the path of a Python program"),
    ],
)
def test_bad_words_name_the_next_step(words, text):
    result = CliRunner().invoke(app, words)
    assert re.search(text, str(result.exception))


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(
        InvalidArgumentError, match=r"must exist\. Received: --dir .*absent\. Write `mkdir -p"
    ):
        try_files(tmp_path / "absent")


def test_a_notebook_is_no_script():
    result = CliRunner().invoke(app, ["launch", "-n", "2", "train.ipynb"])
    assert "Write `unisono.launch(train, workers=2)` in the notebook" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--nproc", "4", "train.py"],
            "The number of workers is `-n`. Received: --nproc. Write `unisono launch -n 4",
        ),
        (
            ["--nproc_per_node=2", "train.py"],
            "Received: --nproc_per_node. Write `unisono launch -n 2 train.py`",
        ),
        (["-np", "3", "train.py"], "Received: -np. Write `unisono launch -n 3 train.py`"),
        (["--gpus", "2", "train.py"], "The workers of a machine share its GPUs"),
        (["--nnodes", "2", "train.py"], "for several machines `--on slurm -N 2`"),
        (["-n", "train.py"], "`-n` takes the number of workers. Received: -n train.py."),
    ],
)
def test_flags_of_other_launchers_have_other_names_here(words, text):
    result = CliRunner().invoke(app, ["launch", *words])
    assert isinstance(result.exception, InvalidArgumentError)
    assert text in str(result.exception)


@pytest.mark.parametrize("words", [["--epohcs", "3", "x.py"], ["-n", "2", "--max-restarts", "many", "x.py"]])
def test_other_flags_get_the_usual_error(words):
    result = CliRunner().invoke(app, ["launch", *words])
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_the_file_of_a_module_is_no_name():
    result = CliRunner().invoke(app, ["launch", "-n", "2", "-m", "package/train.py"])
    assert "Received: -m 'package/train.py'. Write `unisono launch -n 2 package/train.py`" in str(
        result.exception
    )
    assert "`-m package.train`" in str(result.exception)


def test_parameter_servers_need_their_packages_before_tasks_are_started(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "zmq", None)
    script = tmp_path / "train.py"
    script.write_text("")
    words = ["-n", "1", "--ps", "1", "--log-dir", str(tmp_path / "logs"), str(script)]
    result = CliRunner().invoke(app, ["launch", *words])
    assert isinstance(result.exception, MissingPackageError)
    assert "`--ps` needs the package `zmq`" in str(result.exception)
    assert not (tmp_path / "logs").exists()
