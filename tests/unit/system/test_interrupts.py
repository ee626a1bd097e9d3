import signal
import sys
import threading
import weakref

import pytest

from unisono._system._interrupts import Interrupts


@pytest.fixture
def received():
    """What the program's own handler was called with; it does not raise."""
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_the_programs_handler_is_called_where_the_section_ends(received):
    interrupts = Interrupts()
    handler = signal.getsignal(signal.SIGINT)
    with interrupts.put_off():
        interrupt()
        with interrupts.put_off():
            interrupt()
        assert received == []
        assert interrupts.pending
    assert received == [signal.SIGINT]
    assert not interrupts.pending
    assert signal.getsignal(signal.SIGINT) is handler
    interrupt()
    assert received == [signal.SIGINT] * 2


def test_inside_allowed_nothing_is_put_off(received):
    interrupts = Interrupts()
    with interrupts.put_off():
        with interrupts.allowed():
            interrupt()
            assert received == [signal.SIGINT]
            with interrupts.put_off():
                interrupt()
                assert received == [signal.SIGINT]
            assert received == [signal.SIGINT] * 2
        interrupt()
        assert received == [signal.SIGINT] * 2
    assert received == [signal.SIGINT] * 3


def test_a_keyboard_interrupt_is_raised_once_and_after_the_section():
    interrupts, steps = Interrupts(), []

    def section(error=None):
        with interrupts.put_off():
            interrupt()
            steps.append("whole")
            if error:
                raise error

    with pytest.raises(KeyboardInterrupt):
        section()
    assert steps == ["whole"]
    assert not interrupts.pending
    # Another error of the section stays visible behind it.
    with pytest.raises(KeyboardInterrupt) as caught:
        section(ValueError("of the section"))
    assert isinstance(caught.value.__context__, ValueError)
    with interrupts.put_off(), interrupts.allowed():
        pass


def test_what_is_marked_can_be_interrupted_within_a_section(received):
    interrupts = Interrupts()

    @interrupts.interruptible
    def trace():
        interrupt()
        assert received == [signal.SIGINT]

    with interrupts.put_off():
        trace()
    assert received == [signal.SIGINT]


def test_no_interrupt_is_lost_in_functions_that_discard_every_exception():
    interrupts = Interrupts()

    def pythonify_logs():
        try:
            interrupt()
        except:  # noqa: E722 (as in Keras)
            raise AssertionError("here it would be lost") from None

    with interrupts.put_off(), interrupts.allowed():
        pythonify_logs()
        assert interrupts.pending
        with pytest.raises(KeyboardInterrupt):
            interrupts.deliver()

    class Referenced:
        pass

    class Dies:
        def __del__(self):
            interrupt()

    hook, things = sys.unraisablehook, [Dies(), Referenced()]
    reference = weakref.ref(things[-1], lambda gone: interrupt())

    def lose_one():
        with interrupts.put_off(), interrupts.allowed():
            things.pop()
            assert interrupts.pending

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            lose_one()
    assert reference() is None
    assert sys.unraisablehook is hook


def test_other_errors_without_a_caller_go_where_they_went(monkeypatch):
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: found.append(args.exc_type))

    class Fails:
        def __del__(self):
            raise ValueError

    with Interrupts().put_off():
        Fails()
    assert found == [ValueError]


def test_who_insists_is_obeyed(received, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("unisono._system._interrupts.time.monotonic", lambda: now[0])
    interrupts = Interrupts()
    with interrupts.put_off():
        interrupt()
        now[0] = 0.5  # a launcher passes on what the terminal has sent, too
        interrupt()
        assert received == []
        now[0] = 1.5
        interrupt()
        assert received == [signal.SIGINT]
    assert received == [signal.SIGINT] * 2


def test_a_handler_that_the_program_sets_meanwhile_stays(received):
    interrupts, others = Interrupts(), []
    with interrupts.put_off(), interrupts.allowed():
        signal.signal(signal.SIGINT, lambda number, frame: others.append(number))
    interrupt()
    assert (received, others) == ([], [signal.SIGINT])


def test_ignored_signals_and_other_threads_are_left_alone():
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.put_off():
            interrupt()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    inside = []

    def work():
        with interrupts.put_off():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]
