"""Decisions of a rendezvous: who is admitted, who is evicted, how it ends. No socket, and no clock."""

import json
import re
import struct

import pytest

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.cluster.rendezvous import _protocol as m
from unisono.cluster.rendezvous._addresses import interfaces

ADDRESSES = ("a:1", "b:2", "c:3")


def member(process, token=None, host=None, pid=None, **facts):
    token = token or f"token{process}"
    return m.Member(process, host or f"host{process}", pid or 100 + process, token, facts, "10.0.0.9")


def opened(*others, count=3, own=None, addresses=ADDRESSES):
    first = m.open_rendezvous(own or member(0), count, addresses, start_up=60.0, began_at=1000.0)
    for other in others:
        admission = m.admit(first, other)
        assert admission.rejected is None
        first = admission.state
    return first


# --- messages


@pytest.mark.parametrize("size", [0, 1, 4, 9, 10, 11])
def test_a_message_waits_until_it_is_complete(size):
    whole = m.frame({"kind": "x", "n": 1})
    inbox = bytearray(whole[:size])
    assert m.take_frame(inbox) is None
    inbox += whole[size:] + b"UNI"
    assert m.take_frame(inbox) == {"kind": "x", "n": 1}
    assert inbox == b"UNI"


def framed(body, version=m.VERSION, length=None):
    return struct.pack(">4sHI", b"UNIM", version, len(body) if length is None else length) + body


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"G", "not a message of Unisono"),
        (b"GET / HTTP/1.1\r\n\r\n", "GET / HTTP"),
        (b"\x16\x03\x01\x02\x00", "not a message"),
        (b"UNIX", "not a message"),
        (framed(b"", length=m.MAX_BYTES + 1), "announced"),
        (framed(b"", length=0xFFFFFFFF), "announced"),
        (framed(b"{"), "not JSON"),
        (framed(b"\xff\xfe"), "not JSON"),
        (framed(b"[" * 100_000), "not JSON"),
        (framed(b"1" * 10_000), "not JSON"),
        (framed(b"[]"), "not an object with a kind"),
        (framed(b'{"kind": 1}'), "not an object with a kind"),
    ],
)
def test_what_strangers_send_is_no_message(data, words):
    with pytest.raises(m.UnknownPeerError, match=re.escape(words)):
        m.take_frame(bytearray(data))


def test_another_version_is_told_from_a_stranger():
    with pytest.raises(m.OtherVersionError, match=r"version \d+ of the protocol, this process version \d+"):
        m.take_frame(bytearray(framed(b"", version=m.VERSION + 1, length=0xFFFFFFFF)))


def test_a_message_that_is_too_long_is_its_senders_mistake():
    with pytest.raises(InvalidArgumentError, match=r"must fit into 1048576 bytes. Received: \d+ bytes"):
        m.frame({"kind": "x", "text": "x" * m.MAX_BYTES})


def test_a_greeting_arrives_as_it_was_sent():
    own = member(1, jax="0.10.2", devices=2, ok=True, none=None)
    sent = json.loads(json.dumps(m.hello(own)))
    assert m.read_hello(sent, "10.0.0.9") == own


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "hi"},
        {"extra": 1},
        {"process_id": "1"},
        {"process_id": True},
        {"pid": 1.5},
        {"host": ""},
        {"host": "a\nERROR everything is lost"},
        {"host": "x" * 256},
        {"token": 7},
        {"config": []},
        {"config": {"a": [1]}},
        {"config": {"a\nb": 1}},
        {"config": {"generation": "3"}},
        {"config": {"generation": True}},
    ],
)
def test_a_greeting_with_a_wrong_field_is_a_strangers(change):
    with pytest.raises(m.UnknownPeerError):
        m.read_hello({**m.hello(member(1)), **change}, "10.0.0.9")


@pytest.mark.parametrize("message", [{}, {"roster": 1}, {"roster": [1]}, {"roster": "text"}])
def test_an_answer_with_a_wrong_field_is_a_strangers(message):
    with pytest.raises(m.UnknownPeerError, match="no roster"):
        m.read_lines(message, "roster")


# --- differences


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([2, 2, 2], None),
        ([float("nan"), float("nan")], None),
        ([2, 4, 2], "x is 2 on processes 0 and 2, but 4 on process 1."),
        ([4, 2, 2], "x is 2 on processes 1 and 2, but 4 on process 0."),
        ([1, 2], "x is 1 on process 0, but 2 on process 1."),
        ([1, True], "x is 1 on process 0, but True on process 1."),
        ([1, "1"], "x is 1 on process 0, but '1' on process 1."),
        (["", None], "x is '' on process 0, but None on process 1."),
        ([1, 2, 3], "x is 1 on process 0, but 2 on process 1, but 3 on process 2."),
        ([0, 0, 0, 0, 5], "x is 0 on processes 0-3, but 5 on process 4."),
        (["a\nb\nc", "a\nX\nY"], "x, line 2, is 'b' on process 0, but 'X' on process 1."),
        (["a\nb", "a"], "x, line 2, is 'b' on process 0, but absent on process 1."),
        (["a\nb", "a\nb\nc"], "x, line 3, is absent on process 0, but 'c' on process 1."),
        (["a\nb", 1], "x is 'a\\nb' on process 0, but 1 on process 1."),
    ],
)
def test_differences(values, words):
    found = m.differences({i: {"x": value, "same": 1} for i, value in enumerate(values)})
    assert found == ([] if words is None else [f"{words} Make it the same in every process."])


def test_a_fact_that_is_missing():
    assert m.differences({0: {"jax": "1"}, 1: {}, 2: {"jax": "1"}}) == [
        "jax is '1' on processes 0 and 2, but absent on process 1. "
        "Install one version of jax for every process."
    ]


def test_every_fact_that_differs_is_named_in_order():
    found = m.differences({0: {"seed": 1, "devices": 2}, 1: {"seed": 2, "devices": 3}})
    assert [text.split()[0] for text in found] == ["seed", "devices"]
    assert "set_random_seed" in found[0]


def test_of_long_texts_the_part_that_differs_is_told():
    (text,) = m.differences({0: {"x": "k" * 5000 + "A" + "t" * 5000}, 1: {"x": "k" * 5000 + "B"}})
    assert "kkA" in text
    assert "kkB" in text
    assert len(text) < 500


def test_a_thousand_processes_are_a_short_text():
    (text,) = m.differences({i: {"host": f"h{i}"} for i in range(1000)})
    assert len(text) < 1500
    assert "984 other values elsewhere" in text


# --- arrivals


def test_all_come_and_agree():
    done = opened(member(2), member(1))
    assert m.outcome(done, now=1001.0) == m.Proceed()
    assert m.outcome(done, now=2000.0) == m.Proceed(), "who was here in time is not late"


@pytest.mark.parametrize(("now", "ends"), [(1000.0, False), (1059.9, False), (1060.0, True), (5000.0, True)])
def test_a_missing_process_ends_the_meeting_in_time(now, ends):
    end = m.outcome(opened(member(1)), now)
    assert (end is not None) == ends
    if end is not None:
        for words in (
            "within 60 s",
            "connected: process 0 at a:1 (host host0, pid 100)",
            "connected: process 1 at b:2 (host host1, pid 101)",
            "missing: process 2 at c:3",
            "`Timeouts(start_up=120)`",
        ):
            assert words in end.reason


def test_addresses_that_are_not_known():
    lines = m.roster(opened(member(1), addresses=("a:1",)))
    assert lines[1:] == ["connected: process 1 from 10.0.0.9 (host host1, pid 101)", "missing: process 2"]


def test_a_long_roster_is_cut():
    lines = m.roster(opened(count=1000, addresses=("a:1",)))
    assert lines[-1] == "… and 983 more"
    assert len(lines) < 20


@pytest.mark.parametrize("process", [-1, 3, 10**9])
def test_a_number_out_of_range(process):
    admission = m.admit(opened(member(1)), member(process))
    assert f"from 0 to 2 in a cluster of 3. Received: process {process} (" in admission.rejected
    assert set(admission.state.connected) == {0, 1}
    assert admission.state.rejections[0].startswith(f"rejected: process {process}")


@pytest.mark.parametrize("process", [0, 1])
def test_a_number_that_is_taken(process):
    admission = m.admit(opened(member(1)), member(process, token="other", host="evil", pid=7))
    words = f"process {process} twice, host host{process}, pid {100 + process} and host evil, pid 7"
    assert words in admission.rejected
    assert admission.state.connected[process].token != "other"
    assert not admission.evicted


def test_the_same_process_may_come_again():
    admission = m.admit(opened(member(1)), member(1))
    assert admission.rejected is None
    assert not admission.evicted


def test_who_leaves_is_named_and_may_be_replaced():
    gone = m.disconnect(opened(member(1)), 1)
    assert any(
        "missing: process 1 at b:2, which connected (host host1, pid 101), and ended" in x
        for x in m.roster(gone)
    )
    again = m.admit(gone, member(1, token="new")).state
    assert not any("ended" in line for line in m.roster(again))


def test_notes_are_few_and_not_repeated():
    noted = opened()
    for i in range(100):
        noted = m.note_rejection(m.note_rejection(noted, f"note {i}"), f"note {i}")
    assert noted.rejections == tuple(f"note {i}" for i in range(84, 100))


# --- generations


def test_an_older_process_is_told_to_end():
    admission = m.admit(opened(own=member(0, generation=4)), member(1, generation=3))
    assert "this process is of generation 3, the cluster is at 4. End this process" in admission.rejected
    assert set(admission.state.connected) == {0}
    assert admission.state.newest == 4


def test_a_newer_process_sends_the_older_away():
    older = opened(member(1, generation=3), own=member(0, generation=3))
    admission = m.admit(older, member(2, generation=4))
    assert admission.rejected is None
    assert set(admission.evicted) == {0, 1}
    assert set(admission.state.connected) == {2}
    assert all("generation 3, the cluster is at 4" in text for text in admission.evicted.values())


def test_a_newer_process_takes_the_number_of_an_older():
    mixed = opened(member(1, generation=3), own=member(0, host="without"))
    admission = m.admit(mixed, member(1, token="new", generation=4))
    assert admission.rejected is None
    assert set(admission.evicted) == {1}
    assert admission.state.connected[1].token == "new"


def test_the_newest_generation_is_remembered():
    left = m.disconnect(opened(member(1, generation=4), own=member(0, generation=4)), 1)
    assert m.admit(left, member(2, generation=3)).rejected


def test_generations_of_some_only_are_a_difference():
    done = opened(member(1), member(2, generation=1), own=member(0, generation=1))
    assert "generation is 1 on processes 0 and 2, but absent on process 1" in m.outcome(done, 1001.0).reason


# --- the verdict


def test_a_difference_stops_all():
    done = opened(member(1, jax="1"), member(2, jax="2"), own=member(0, jax="1"))
    text = m.outcome(done, 1001.0).reason
    assert "jax is '1' on processes 0 and 1, but '2' on process 2" in text
    assert "process 2 at c:3 (host host2, pid 102)" in text


# --- the others


def test_pauses_grow_to_a_second():
    pauses = [m.retry_delay(attempt) for attempt in range(3000)]
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < 0.1
    assert pauses[-1] == 1.0


@pytest.mark.parametrize(
    ("host", "resolved", "hosts", "expected"),
    [
        ("localhost", ["127.0.0.1", "::1"], ["localhost"], ("127.0.0.1", "::1")),
        ("127.0.0.1", ["127.0.0.1"], ["127.0.0.1", "10.0.0.2"], ("127.0.0.1",)),
        ("::1", ["::1"], ["::1"], ("::1",)),
        ("10.0.0.1", ["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ("10.0.0.1",)),
        ("node1", ["10.0.0.1"], ["node1", "node2"], ("10.0.0.1",)),
        ("node1", ["127.0.1.1"], ["node1", "node2"], ()),
        ("node1", ["127.0.1.1"], ["node1", ""], ()),
        ("node1", ["127.0.1.1"], ["node1", "node1"], ("127.0.1.1",)),
        ("node1", ["127.0.1.1", "10.0.0.1"], ["node1", "node2"], ("10.0.0.1",)),
        ("node1", [], ["node1", "node2"], ()),
    ],
)
def test_interfaces(host, resolved, hosts, expected):
    assert interfaces(host, resolved, hosts) == expected


def test_texts_say_what_to_do():
    text = m.unreachable_text("127.0.0.1:4711", "connection refused", 7, 1.5)
    assert "within 1.5 s. Received: cannot reach 127.0.0.1:4711: connection refused (7 attempts)" in text
    assert "`Timeouts(start_up=4)`" in text
    assert issubclass(m.UnknownPeerError, ClusterError)
