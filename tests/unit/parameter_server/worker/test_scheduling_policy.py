"""The policy of a thread: batch where the system has it, and a user's choice stays."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from unisono.parameter_server.worker._scheduling_policy import let_others_finish

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")


def in_thread(function):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def test_the_thread_lets_others_finish_and_no_other_thread_changes():
    before = os.sched_getscheduler(0)
    assert before == os.SCHED_OTHER
    assert in_thread(lambda: (let_others_finish(), os.sched_getscheduler(0))) == (True, os.SCHED_BATCH)
    assert os.sched_getscheduler(0) == before


def test_a_policy_that_was_chosen_stays():
    def chosen():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return let_others_finish(), os.sched_getscheduler(0)

    assert in_thread(chosen) == (False, os.SCHED_IDLE)


@pytest.mark.parametrize("name", ["sched_getscheduler", "sched_setscheduler"])
def test_a_system_that_refuses_it_goes_on(monkeypatch, name):
    def refused(*args):
        raise PermissionError(1, "Operation not permitted")

    policy_of = os.sched_getscheduler
    monkeypatch.setattr(os, name, refused)
    assert in_thread(lambda: (let_others_finish(), policy_of(0))) == (False, os.SCHED_OTHER)
