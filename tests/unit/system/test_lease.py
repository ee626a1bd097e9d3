"""Rights that end unless they are renewed, on a clock that pauses with the process."""

from unisono._system._lease import ActiveClock, Lease


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


def test_time_in_which_this_process_did_not_run_does_not_count():
    clock = Clock()
    active = ActiveClock(2.0, clock)
    read = []
    for clock.now in (10.0, 11.0, 500.0, 500.5):
        read.append(active.now())
    assert read == [0.0, 1.0, 3.0, 3.5]


def test_a_lease_is_over_when_it_was_not_renewed_in_time():
    clock = Clock()
    lease = Lease(clock, 5.0)
    clock.now = 15.0
    assert not lease.is_over
    lease.renew()
    clock.now = 20.1
    assert (lease.is_over, round(lease.silence, 6), round(lease.age, 6)) == (True, 5.1, 10.1)


def test_a_process_that_was_stopped_finds_its_leases_as_they_were():
    clock = Clock()
    lease = Lease(ActiveClock(2.0, clock).now, 5.0)
    clock.now += 3600.0
    assert not lease.is_over
    for _ in range(4):
        clock.now += 1.0
        over = lease.is_over
    assert over


def test_without_a_limit_a_lease_is_never_over():
    clock = Clock()
    lease = Lease(clock)
    clock.now = 1e9
    assert (lease.is_over, lease.silence) == (False, 1e9 - 10.0)
