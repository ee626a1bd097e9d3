"""The events of a page: all first, then changes; what it missed; and no work where no page is open."""

import json
import threading
import time

import pytest
from tests.unit.watch.test_json_changes import patched

from unisono.watch.web import _job_feed
from unisono.watch.web._job_feed import JobFeed

LIMIT = 60.0


class FakeJob:
    """A job that makes a step each time it is read."""

    def __init__(self):
        self.step = 0
        self.may_step = threading.Event()
        self.may_step.set()

    def read(self):
        self.step += self.may_step.is_set()
        return {"step": self.step, "curves": {"loss": [[i, 1.0] for i in range(self.step)]}}


@pytest.fixture
def job():
    return FakeJob()


@pytest.fixture
def feed(job, tuned):
    tuned(_job_feed, PERIOD=0.01)
    feed = JobFeed(job.read)
    yield feed
    feed.end()


def fields_of(event):
    """An event's fields, as a browser reads them."""
    lines = [line.partition(": ") for line in event.decode().strip().split("\n")]
    return {name: text for name, _, text in lines}


def next_of(events):
    """The next event that is no sign of life."""
    deadline = time.monotonic() + LIMIT
    while "event" not in (fields := fields_of(next(events))):
        assert time.monotonic() < deadline
    return fields["event"], fields["id"], json.loads(fields["data"])


def test_all_comes_first_and_then_what_has_changed(feed, job):
    events = feed.events()
    assert fields_of(next(events)) == {"retry": "1000"}
    kind, _, state = next_of(events)
    assert (kind, state) == ("full", {"step": state["step"], "curves": {"loss": state["curves"]["loss"]}})
    for _ in range(5):
        kind, _, change = next_of(events)
        assert kind == "change"
        state = patched(state, change)
        assert len(state["curves"]["loss"]) == state["step"]
        # Two points at most: the page may have missed a read.
        assert len(json.dumps(change)) < 90
    events.close()


def test_a_page_that_was_disconnected_gets_what_it_missed(feed, job):
    events = feed.events()
    next(events)
    _, last, state = next_of(events)
    events.close()
    other = feed.events()
    next(other)
    for _ in range(3):
        next_of(other)
    other.close()
    again = feed.events(last)
    next(again)
    kind, _, change = next_of(again)
    assert kind == "change"
    assert patched(state, change)["step"] == state["step"] + 1
    again.close()


@pytest.mark.parametrize(
    "last", ["", "0-7", "other-1", "NAME-999999999999", "NAME-x", "NAME--1", "-", "\x00"]
)
def test_a_page_of_another_server_gets_all(feed, job, last):
    events = feed.events()
    next(events)
    _, known, _ = next_of(events)
    again = feed.events(last.replace("NAME", known.partition("-")[0]))
    next(again)
    assert next_of(again)[0] == "full"
    again.close()
    events.close()


def test_a_job_is_read_while_a_page_is_open_alone(feed, job):
    time.sleep(0.05)
    assert job.step == 0
    events = feed.events()
    next(events)
    next_of(events)
    events.close()
    time.sleep(0.05)  # a read that has begun
    before = job.step
    time.sleep(0.1)
    assert job.step == before


def test_what_does_not_change_is_not_sent(feed, job, tuned):
    tuned(_job_feed, _ALIVE=0.1)
    job.may_step.clear()
    events = feed.events()
    next(events)
    next_of(events)
    assert fields_of(next(events)) == {"": "alive"}
    events.close()


def test_pages_get_a_last_event_and_an_end(feed, job):
    events = feed.events()
    next(events)
    next_of(events)
    feed.end(lambda: {"job": {"state": "ended"}, "logs": {}})
    *_, (kind, _, last) = [
        (fields["event"], fields["id"], json.loads(fields["data"])) for fields in map(fields_of, events)
    ]
    assert (kind, last) == ("end", {"job": {"state": "ended"}, "logs": {}})
    # One that connects again has missed it.
    assert [fields_of(event).get("event") for event in feed.events()] == [None, "full", "end"]


def test_a_job_that_cannot_be_read_once_is_read_again(tuned, caplog):
    tuned(_job_feed, PERIOD=0.01)
    reads = iter([OSError("gone"), None])

    def read():
        if error := next(reads, None):
            raise error
        return {"step": 1}

    feed = JobFeed(read)
    events = feed.events()
    next(events)
    assert next_of(events)[2] == {"step": 1}
    events.close()
    feed.end()
    assert "A page cannot be updated." in caplog.text


def test_what_was_left_is_read_without_a_pause(tuned, job):
    tuned(_job_feed, PERIOD=1000.0)
    tuned(_job_feed, _LONGEST=1000.0)
    third = threading.Event()

    def read():
        state = job.read()
        if job.step == 3:
            third.set()
        return state

    feed = JobFeed(read, lambda: job.step < 3)
    events = feed.events()
    next(events)
    next_of(events)
    assert third.wait(LIMIT)
    events.close()
    feed.end()
    assert job.step == 3


def test_changes_are_half_a_second_apart_and_a_slow_job_takes_a_tenth_of_the_time(tuned):
    assert _job_feed.PERIOD == 0.5
    tuned(_job_feed, PERIOD=0.01)
    began = []

    def read():
        began.append(time.monotonic())
        time.sleep(0.05)
        return {"step": len(began)}

    feed = JobFeed(read)
    events = feed.events()
    next(events)
    next_of(events), next_of(events)
    events.close()
    feed.end()
    assert began[1] - began[0] >= 0.5
