"""What a launch may be asked for."""

import pytest

from unisono import InvalidArgumentError
from unisono.launcher._options import LaunchOptions, UserProgram, parse_elastic, parse_spares


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 0}, "`-n` must be at least 1. Received: workers=0"),
        ({"ps": -1}, "`--ps`"),
        ({"devices_per_worker": 0}, "`--devices-per-worker`"),
        ({"max_restarts": -1}, "`--max-restarts`"),
        ({"spares": -1}, "`--spares`"),
        ({"grace": -1.0}, "`--grace`"),
        ({"grace": float("nan")}, "`--grace`"),
        ({"stall_timeout": float("inf")}, "`--stall-timeout`"),
        ({"workers": 3, "elastic": (2, 4)}, "Leave `-n` out"),
        ({"workers": 1, "elastic": (2, 1)}, "fewest and the most"),
        ({"workers": 1, "elastic": (0, 1)}, "fewest and the most"),
    ],
)
def test_what_cannot_be_used_names_the_flag(arguments, words):
    with pytest.raises(InvalidArgumentError) as caught:
        LaunchOptions(**arguments)
    assert words in str(caught.value)
    assert "Received: " in str(caught.value)


@pytest.mark.parametrize("text", ["", "2", "2:", ":4", "a:b", "2:4:6", "-1:2", "2-4"])
def test_elastic_must_be_two_numbers(text):
    with pytest.raises(InvalidArgumentError, match="--elastic 2:4"):
        parse_elastic(text)


@pytest.mark.parametrize("text", ["", "-1", "all", "1.5"])
def test_spares_are_a_number_or_auto(text):
    with pytest.raises(InvalidArgumentError, match="--spares auto"):
        parse_spares(text)


@pytest.mark.parametrize(
    ("options", "restarts", "spares"),
    [
        (LaunchOptions(workers=3), 0, 0),
        (LaunchOptions(workers=3, max_restarts=2), 2, 3),
        (LaunchOptions(workers=3, max_restarts=2, spares=1), 2, 1),
        (LaunchOptions(workers=3, max_restarts=2, spares=0), 2, 0),
        (LaunchOptions(workers=3, spares=2), 0, 2),
        (LaunchOptions(workers=3, elastic=(1, 3)), 10, 3),
        (LaunchOptions(workers=3, elastic=(1, 3), max_restarts=0), 0, 0),
    ],
)
def test_restarts_and_spares_by_default(options, restarts, spares):
    assert (options.restarts, options.spare_count(3)) == (restarts, spares)


def test_a_program_as_text():
    assert UserProgram("pkg.train", ("--lr", "1"), is_module=True).text == "-m pkg.train --lr 1"
