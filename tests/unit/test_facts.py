"""The first page of the site has the numbers that `make facts` prints."""

import pytest
from tools import facts

PAGE = facts.PAGE.read_text()


def test_the_first_page_says_what_the_tables_and_the_sources_say():
    assert facts.claims(PAGE) == []


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("52 of 52 mutants", "53 of 53 mutants", "52 of 52"),
        ("9 kinds of faults", "8 kinds of faults", "9 kinds"),
        ("JAX 0.10.2 to 0.12,", "JAX 0.10.2 to 0.11,", "the last before 0.13"),
        ("| 41.63 |", "| 41.53 |", "41.63"),
        ("More than 10,000 tests", "Many tests", "More than N tests"),
    ],
)
def test_another_number_is_found(old, new, missing):
    assert old in PAGE
    (sentence,) = facts.claims(PAGE.replace(old, new))
    assert missing in sentence


def test_a_page_may_not_promise_more_tests_than_there_are():
    assert facts.claims(PAGE, 10_001) == []
    assert facts.claims(PAGE, 10_000) == ["The page says more than 10,000 tests. There are 10,000."]


def test_the_mutants_are_those_of_the_table():
    text = "| all | 30 | 20 (67%) | 21 (70%) | 25 (83%) |\nThe other two change nothing: …"
    assert facts.mutants(text) == (25, 28)


@pytest.mark.exhaustive
def test_the_tests_are_counted():
    assert facts.claims(PAGE, facts.tests()) == []
