"""One client at a time, and its end."""

import pytest

from unisono import ContextError
from unisono.standalone._lease_book import LeaseBook, ServerBusyError


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_second_client_is_refused_with_the_name_of_the_first(clock):
    book = LeaseBook("a:1", clock)
    assert book.claim("one", "me@laptop", 10.0)
    clock.now = 5.0
    with pytest.raises(ServerBusyError, match=r"me@laptop since 5 s and was last seen 5\.0 s ago.*13 s"):
        book.claim("two", "you@laptop", 10.0)


def test_a_repeated_claim_renews(clock):
    book = LeaseBook("a:1", clock)
    book.claim("one", "me", 10.0)
    clock.now = 8.0
    assert not book.claim("one", "me", 10.0)
    clock.now = 17.0
    assert not book.held.is_over
    clock.now = 18.1
    assert book.held.is_over


def test_requests_renew_and_those_of_others_do_not(clock):
    book = LeaseBook("a:1", clock)
    book.claim("one", "me", 10.0)
    clock.now = 9.0
    book.check("one")
    clock.now = 10.0
    with pytest.raises(ContextError, match="was started again, or the client was silent"):
        book.check("two")
    clock.now = 18.0
    assert not book.held.is_over


def test_a_job_that_is_being_ended_keeps_the_server_until_it_has_ended(clock):
    book = LeaseBook("a:1", clock)
    book.claim("one", "me", 10.0)
    book.begin_to_end()
    clock.now = 100.0
    assert not book.held.is_over
    for job in ("one", "two"):
        clock.now = 1.0
        with pytest.raises(ServerBusyError, match="is being ended"):
            book.claim(job, "me", 10.0)
    clock.now = 1.0
    with pytest.raises(ContextError):
        book.check("one")
    book.end(for_good=True)
    clock.now = 2.0
    assert book.claim("two", "you", 10.0)


def test_a_replayed_claim_of_an_ended_job_takes_nothing(clock):
    book = LeaseBook("a:1", clock)
    book.claim("one", "me", 10.0)
    book.end(for_good=True)
    clock.now = 1.0
    with pytest.raises(ContextError, match="after its END"):
        book.claim("one", "me", 10.0)
    assert book.held is None


def test_a_client_that_was_silent_may_come_back(clock):
    book = LeaseBook("a:1", clock)
    book.claim("one", "me", 10.0)
    book.end(for_good=False)
    clock.now = 20.0
    assert book.claim("one", "me", 10.0)
