"""The comparison of two revisions: what its statistics tell, turns, benchmarks of either side."""

import math
import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import _pairs  # noqa: E402
import against  # noqa: E402
from _harness import CaseFailedError  # noqa: E402


def noisy(seed, slowdown, rounds=27, noise=0.03):
    """Rates of two sides: a busy moment meets both, and each has noise of its own."""
    rng = random.Random(seed)
    new, old = [], []
    for _ in range(rounds):
        busy = rng.uniform(0.5, 1)
        old.append(100 * busy * rng.gauss(1, noise))
        new.append(100 * busy * rng.gauss(1, noise) / slowdown)
    return _pairs.ratios(new, old)


def test_a_slowdown_of_5_percent_is_told_in_noise():
    told = [noisy(seed, 1.05).verdict for seed in range(200)]
    assert told.count("slower") >= 180
    assert "faster" not in told
    assert sum(noisy(seed, 1.10).is_loss for seed in range(200)) >= 195


def test_equal_sides_are_not_called_slower():
    found = [noisy(seed, 1) for seed in range(400)]
    # 2.5% of intervals lie below the truth, and 2.5% above.
    assert sum(each.verdict == "slower" for each in found) <= 14
    assert not any(each.is_loss for each in found)


def test_the_interval_is_that_of_the_sign_test():
    # Of 10 ratios the second and the ninth: 2 * (1 + 10) / 1024 = 0.02; one more would be 0.11.
    found = _pairs.ratios([float(i) for i in range(1, 11)], [1.0] * 10)
    assert (found.middle, found.low, found.high) == (5.5, 2, 9)
    assert found.verdict == "faster"


def test_few_rounds_tell_nothing():
    found = _pairs.ratios([1.0] * 5, [2.0] * 5)
    assert (found.low, found.high, found.verdict, found.is_loss) == (0, math.inf, "not told apart", False)
    assert _pairs.ratios([1.0] * 6, [2.0] * 6).is_loss


class Noted:
    """Work that notes its turns."""

    def __init__(self):
        self.log = []

    @contextmanager
    def started(self, side):
        if side == "cannot":
            raise CaseFailedError("it cannot")
        self.log.append(f"start {side}")
        yield lambda: self.log.append(side) or against.Value(1.0, None)


def test_sides_take_turns_and_begin_in_turn():
    work = Noted()
    new, old = against.compare(against.Row("", work), 6, "new", "old")
    assert len(new) == len(old) == 6
    pair = ["start new", "start old"]
    # Two starts, as each has three rounds at least.
    assert work.log == [*pair, "old", "new", "new", "old", "old", "new"] * 2


def test_a_side_that_cannot_run_these_benchmarks_runs_its_own():
    asked = []

    def compared(side):
        asked.append(side.benchmarks)
        if len(asked) == 1:
            raise CaseFailedError("an action is unknown")
        return "values"

    old = against.Side(Path("/tree"), Path("/here/benchmarks"))
    assert against.with_benchmarks(compared, old) == "values"
    assert asked == [Path("/here/benchmarks"), Path("/tree/benchmarks")]


def test_cpu_time_judges_where_wall_time_tells_nothing():
    values = [against.Value(1.0 + i % 2, 1.0) for i in range(10)]
    old = [against.Value(1.5, 1.2) for _ in range(10)]
    wall, cpu, judging = against.result(values, old)
    assert (wall.verdict, cpu.verdict, judging) == ("not told apart", "slower", cpu)


def test_names_of_rows():
    assert "import" not in against.selected([])
    assert list(against.selected(["ps-*", "import"])) == ["ps-mlp", "ps-wide", "import"]
    with pytest.raises(SystemExit, match="a row must be one of fit-1-device"):
        against.selected(["nothing"])


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_a_trivial_row_against_head():
    command = [sys.executable, str(ROOT / "benchmarks" / "against.py"), "HEAD", "import", "--rounds", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "| `import` | import unisono |" in ended.stdout
    assert "not told apart" in ended.stdout
    trees = subprocess.run(
        ["git", "-C", str(ROOT), "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert "unisono-against-" not in trees.stdout


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_an_unknown_revision_is_an_error():
    with (
        pytest.raises(SystemExit, match="git has no work tree of 'no-such-revision'"),
        against.checked_out("no-such-revision"),
    ):
        pass
