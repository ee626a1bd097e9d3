"""Each optional feature can be taken away: what remains trains, and using the feature is a clear error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from tests import shut_doors

SRC = Path(unisono.__file__).parent

#: What a program loads that trains with a `MirroredStrategy`; the numbers may only shrink.
MOST = {"modules": 99, "lines": 18_200, "classes": 174}


@pytest.fixture(scope="module")
def trained():
    """What a program prints that trains with all doors shut."""
    command = [sys.executable, "-m", "tests.shut_doors", *shut_doors.USES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_without_any_feature_training_saving_and_a_loop_give_the_numbers_of_one_device(trained):
    assert not [m for m in trained["modules"] if f"{m}.".startswith(tuple(f"{f}." for f in shut_doors.USES))]


@pytest.mark.parametrize("folder", shut_doors.USES)
def test_a_feature_that_is_not_there_is_named(trained, folder):
    error = trained["errors"][folder]
    assert error.startswith("MissingPackageError: "), error
    assert folder in error


def test_what_a_program_loads_that_trains_only_shrinks(trained):
    paths = [SRC.parent / f"{module.replace('.', '/')}.py" for module in trained["modules"]]
    texts = [p.read_text() for p in (q if q.exists() else q.with_suffix("") / "__init__.py" for q in paths)]
    lines = sum(text.count("\n") for text in texts)
    classes = sum(text.count("\nclass ") for text in texts)
    sizes = {"modules": len(texts), "lines": lines, "classes": classes}
    assert not {what: size for what, size in sizes.items() if size > MOST[what]}, sizes
