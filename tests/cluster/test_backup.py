"""A `fit` that is killed and started again ends with the weights of one that nothing disturbed.

Bit for bit: the same devices compute the same program on the same numbers. `UNISONO_KILL_SEEDS=20`
runs more seeds.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "killed_fit.py"
SEEDS = int(os.environ.get("UNISONO_KILL_SEEDS", "3"))
#: Batches of a whole run; a little fewer where a filter or `steps_per_epoch` takes some away.
BATCHES = 35


class Trainer:
    """Runs of the program, one after the other."""

    def __init__(self, folder):
        self.folder = folder
        self.log = folder / "log.txt"
        self.count = 0
        self.expected = {}
        env = dict(os.environ, JAX_COMPILATION_CACHE_DIR=str(folder / "cache"), PJRT_NPROC="4")
        env |= {"PYTHONWARNINGS": "ignore", "KERAS_BACKEND": "jax"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
            )

    def run(self, data, replicas, backup=None, kill_at=0, **options):
        """One run; returns how it ended and where its result is."""
        self.count += 1
        result = self.folder / f"{self.count}.json"
        run = {"data": data, "replicas": replicas, "backup": backup, "kill_at": kill_at, **options}
        self.process.stdin.write(json.dumps({**run, "result": str(result)}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return int(line), result

    def finished(self, *args, **kwargs):
        code, result = self.run(*args, **kwargs)
        assert code == 0, self.log.read_text()
        return json.loads(result.read_text())

    def undisturbed(self, data, replicas, **options):
        key = (data, replicas, *options.items())
        if key not in self.expected:
            self.expected[key] = self.finished(data, replicas, **options)
        return self.expected[key]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = Trainer(tmp_path_factory.mktemp("runs"))
    yield trainer
    trainer.process.stdin.close()
    trainer.process.wait(60)
    trainer.process.stdout.close()


def killed_until_it_ends(trainer, data, replicas, backup, kills, **options):
    for kill_at in kills:
        code, _ = trainer.run(data, replicas, str(backup), kill_at, **options)
        if code == 0:
            pytest.fail("the run ended before it was killed")
        assert code == -9, trainer.log.read_text()
    return trainer.finished(data, replicas, str(backup), **options)


def further(*values):
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


# The third one saves as often as "auto" chooses.
@pytest.mark.parametrize("seed", [*further(0), *range(1, SEEDS)])
def test_killed_at_a_random_step_and_started_again(trainer, tmp_path, seed):
    """Backups are written beside training, so the kill also meets one that is half written."""
    kill_at = random.Random(seed).randrange(2, BATCHES)
    # How often "auto" saves depends on the machine, and the result must not.
    every = "auto" if seed % 3 == 2 else 2
    found = killed_until_it_ends(trainer, "arrays", 2, tmp_path / "b", [kill_at], every=every)
    assert found == trainer.undisturbed("arrays", 2), f"seed {seed}, killed at {kill_at}, every {every}"
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("data", ["dataset", *further("endless", "unknown size"), "generator"])
def test_every_kind_of_data_goes_on_at_the_next_batch(trainer, tmp_path, data):
    """Killed twice: in the middle of an epoch, and again in the next."""
    found = killed_until_it_ends(trainer, data, 2, tmp_path / "b", [12, 9], beside=False)
    assert found == trainer.undisturbed(data, 2)


@pytest.mark.parametrize("data", [*further("dataset", "generator"), "unknown size"])
def test_steps_that_run_ahead_are_saved_where_keras_has_come_to_them(trainer, tmp_path, data):
    """Five at once and no more than until the next backup; killed within such a program."""
    found = killed_until_it_ends(trainer, data, 2, tmp_path / "b", [12, 9], ahead=5, every=3, beside=False)
    assert found == trainer.undisturbed(data, 2, ahead=1)
    looked = trainer.undisturbed(data, 2)
    assert (found["state"], found["history"]) == (looked["state"], looked["history"])


@pytest.mark.parametrize("every", ["auto", *further("epoch", 4)])
def test_how_often_is_saved_beside_steps_that_run_ahead_changes_no_number(trainer, tmp_path, every):
    found = killed_until_it_ends(trainer, "arrays", 2, tmp_path / "b", [26], ahead=4, every=every)
    assert found == trainer.undisturbed("arrays", 2, ahead=1)


def test_a_damaged_backup_costs_some_steps_and_nothing_else(trainer, tmp_path):
    code, _ = trainer.run("arrays", 2, str(tmp_path / "b"), 15, beside=False)
    assert code == -9
    newest = max((tmp_path / "b").iterdir(), key=lambda p: int(p.name.split("-")[1]))
    file = next(newest.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    before = trainer.log.stat().st_size
    found = trainer.finished("arrays", 2, str(tmp_path / "b"), beside=False)
    assert found == trainer.undisturbed("arrays", 2)
    assert "Falling back to the one before" in trainer.log.read_text()[before:]
