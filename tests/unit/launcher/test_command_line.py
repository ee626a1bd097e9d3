"""What the command line says of flags at the wrong place."""

import pytest
from typer.testing import CliRunner

from unisono.cli._app import app


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


def test_a_notebook_is_no_script():
    result = CliRunner().invoke(app, ["launch", "-n", "2", "train.ipynb"])
    assert "Write `unisono.launch(train, workers=2)` in the notebook" in str(result.exception)
