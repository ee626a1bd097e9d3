"""Slurm's short forms of lists."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import InvalidArgumentError
from unisono.cluster_resolver._slurm_hostlist import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node1,node2", ["node1", "node2"]),
        (" a , b ", ["a", "b"]),
        (
            "node[1-3,7],gpu-[01-04]",
            ["node1", "node2", "node3", "node7", "gpu-01", "gpu-02", "gpu-03", "gpu-04"],
        ),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[001,5,1000]", ["n001", "n5", "n1000"]),
        ("n[1, 3]", ["n1", "n3"]),
        ("n[1-2]-ib.example", ["n1-ib.example", "n2-ib.example"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("[1-2]", ["1", "2"]),
        ("a[1-2],b", ["a1", "a2", "b"]),
    ],
)
def test_hosts(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a b", "a[", "a]", "a[]", "a[1", "a1]", "a[1-]", "a[-1]", "a[1--2]"),
        *("a[x]", "a[1,]", "a[3-1]", "a[[1]]", "a[1-2-3]", "a[1],[", "a[" + "9" * 12 + "]"),
    ],
)
def test_unreadable_hosts(text):
    with pytest.raises(
        InvalidArgumentError, match=rf"host list must.*Received: {re.escape(repr(text))}.*Write"
    ):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["a[1-999999999]", "a[1-1000]b[1-1000]", "a[1-60000],b[1-60000]"])
def test_lists_have_an_end(text):
    with pytest.raises(InvalidArgumentError, match=r"100000 entries at most. Received: .*Write a smaller"):
        expand_hosts(text)


NAMES = st.text("abz-", min_size=1, max_size=4)
RANGES = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4))


@settings(deadline=None)
@given(st.lists(st.tuples(NAMES, st.lists(RANGES, max_size=3), NAMES), min_size=1, max_size=4))
def test_written_lists_are_read_again(parts):
    """Against a second, slower definition: numbers are counted and padded one by one."""
    texts, hosts = [], []
    for name, ranges, suffix in parts:
        numbers = [str(first + i).zfill(width) for first, more, width in ranges for i in range(more + 1)]
        written = [f"{str(a).zfill(w)}-{str(a + more).zfill(w)}" for a, more, w in ranges]
        texts.append(f"{name}[{','.join(written)}]{suffix}" if ranges else name + suffix)
        hosts += [name + number + suffix for number in numbers] if ranges else [name + suffix]
    assert expand_hosts(",".join(texts)) == hosts


@settings(deadline=None)
@given(st.text("ab1,-[] ", max_size=12))
def test_any_text_is_read_or_refused(text):
    try:
        hosts = expand_hosts(text)
    except InvalidArgumentError:
        return
    assert hosts
    assert all(host and not set(host) & set("[], ") for host in hosts)


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1, 4(x1)", [1, 4]), ("3(x0),1", [1])]
)
def test_counts(text, counts):
    assert expand_counts(text) == counts


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 20)), min_size=1, max_size=6))
def test_written_counts_are_read_again(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3", "2(x3", "-1", "1,,2", "2(3)"])
def test_unreadable_counts(text):
    with pytest.raises(InvalidArgumentError, match=rf"counts.*Received: {re.escape(repr(text))}.*2\(x3\),1"):
        expand_counts(text)


def test_counts_have_an_end():
    with pytest.raises(InvalidArgumentError, match="100000 entries at most"):
        expand_counts("1(x999999999)")
