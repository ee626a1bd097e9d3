"""The limit of open files, in a process of its own; the policy of a thread; the start of a process."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from unisono._system._process import allow_open_files, let_others_finish, started_at

needs_policy = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")

PROGRAM = """
import resource
from unisono._system._process import allow_open_files

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
most = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
assert allow_open_files() == most
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
assert [allow_open_files(), allow_open_files()] == [300, 300]
"""


def test_a_task_may_open_as_many_files_as_the_system_allows():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
    limit = allow_open_files()
    assert allow_open_files() == limit > 0


def in_thread(function):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


@needs_policy
def test_the_thread_lets_others_finish_and_no_other_thread_changes():
    before = os.sched_getscheduler(0)
    assert before == os.SCHED_OTHER
    assert in_thread(lambda: (let_others_finish(), os.sched_getscheduler(0))) == (True, os.SCHED_BATCH)
    assert os.sched_getscheduler(0) == before


@needs_policy
def test_a_policy_that_was_chosen_stays():
    def chosen():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return let_others_finish(), os.sched_getscheduler(0)

    assert in_thread(chosen) == (False, os.SCHED_IDLE)


@needs_policy
@pytest.mark.parametrize("name", ["sched_getscheduler", "sched_setscheduler"])
def test_a_system_that_refuses_it_goes_on(monkeypatch, name):
    def refused(*args):
        raise PermissionError(1, "Operation not permitted")

    policy_of = os.sched_getscheduler
    monkeypatch.setattr(os, name, refused)
    assert in_thread(lambda: (let_others_finish(), policy_of(0))) == (False, os.SCHED_OTHER)


def test_the_start_of_this_process_is_known():
    assert time.time() - 7200 < started_at() < time.time() - 0.05
