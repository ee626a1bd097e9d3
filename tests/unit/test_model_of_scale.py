"""The model of larger clusters: its limits, what was published, and the page that shows its tables."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import model_of_scale as m

ROOT = Path(__file__).parents[2]
WORK = m.Work("any", 1.0, 100e6)


def test_the_page_shows_the_tables_of_the_program():
    page = (ROOT / "docs" / "beyond_these_machines.md").read_text()
    for table in m.tables():
        assert table in page


def test_one_accelerator_is_the_computation_alone():
    assert m.step(WORK, m.Place(1, 1)) == WORK.seconds
    assert m.efficiency(WORK, m.Place(1, 1), hidden=False) == 1.0


def test_the_bytes_of_an_exchange_are_those_of_an_all_reduce():
    """Each host sends and receives 2 (h - 1) / h of them, without the latency."""
    place = m.Place(32, 8, per_host=8)
    latency = 2 * 31 * m.HOP * 2
    assert m.exchange(WORK, place) - latency == pytest.approx(2 * 3 / 4 * 100e6 / 1e9)
    assert m.exchange(WORK, place, passes=3) == pytest.approx(1.5 * m.exchange(WORK, place))


def test_more_accelerators_and_slower_links_are_never_better():
    rows = [[m.efficiency(WORK, m.Place(n, gbits)) for gbits in m.GBITS] for n in m.COUNTS]
    assert all(row == sorted(row) for row in rows)
    assert all(list(column) == sorted(column, reverse=True) for column in zip(*rows, strict=True))
    place = m.Place(1024, 100)
    assert m.efficiency(WORK, place, hidden=False) < m.efficiency(WORK, place)


@pytest.mark.parametrize(("work", "count", "found"), m.PUBLISHED)
def test_published_efficiencies(work, count, found):
    place = m.Place(count, 25, per_host=4)
    # Those at 512 have chosen the constants; those at 128 are predicted.
    assert m.efficiency(work, place) == pytest.approx(found, abs=0.01 if count == 512 else 0.03)
    assert m.efficiency(work, place, hidden=False) < found
