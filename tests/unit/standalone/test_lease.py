"""One client at a time, and its end."""

import pytest

from unisono import ContextError
from unisono.standalone._lease import LeaseBook, ServerBusyError


def test_a_second_client_is_refused_with_the_name_of_the_first():
    book = LeaseBook("a:1")
    assert book.claim("one", "me@laptop", 10.0, now=0.0)
    with pytest.raises(ServerBusyError, match=r"me@laptop since 5 s and was last seen 5\.0 s ago.*13 s"):
        book.claim("two", "you@laptop", 10.0, now=5.0)


def test_a_repeated_claim_renews():
    book = LeaseBook("a:1")
    book.claim("one", "me", 10.0, now=0.0)
    assert not book.claim("one", "me", 10.0, now=8.0)
    assert not book.lease.is_over(now=17.0)
    assert book.lease.is_over(now=18.1)


def test_requests_renew_and_those_of_others_do_not():
    book = LeaseBook("a:1")
    book.claim("one", "me", 10.0, now=0.0)
    book.check("one", now=9.0)
    with pytest.raises(ContextError, match="was started again, or the client was silent"):
        book.check("two", now=10.0)
    assert not book.lease.is_over(now=18.0)


def test_a_job_that_is_being_ended_keeps_the_server_until_it_has_ended():
    book = LeaseBook("a:1")
    book.claim("one", "me", 10.0, now=0.0)
    book.begin_to_end()
    assert not book.lease.is_over(now=100.0)
    for job in ("one", "two"):
        with pytest.raises(ServerBusyError, match="is being ended"):
            book.claim(job, "me", 10.0, now=1.0)
    with pytest.raises(ContextError):
        book.check("one", now=1.0)
    book.end(for_good=True)
    assert book.claim("two", "you", 10.0, now=2.0)


def test_a_replayed_claim_of_an_ended_job_takes_nothing():
    book = LeaseBook("a:1")
    book.claim("one", "me", 10.0, now=0.0)
    book.end(for_good=True)
    with pytest.raises(ContextError, match="after its END"):
        book.claim("one", "me", 10.0, now=1.0)
    assert book.lease is None


def test_a_client_that_was_silent_may_come_back():
    book = LeaseBook("a:1")
    book.claim("one", "me", 10.0, now=0.0)
    book.end(for_good=False)
    assert book.claim("one", "me", 10.0, now=20.0)
