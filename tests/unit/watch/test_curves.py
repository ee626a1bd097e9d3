"""Curves of bounded length."""

from unisono.watch._curves import SHOWN, GrowingCurve, thinned


def test_extremes_and_ends_stay_however_long_the_curve_grows():
    curve = GrowingCurve()
    for step in range(100_000):
        curve.add(step, {31_337: -5.0, 77_777: 9.0}.get(step, step % 3))
    shown = thinned(curve.points)
    assert len(curve.points) <= 4 * SHOWN
    assert len(shown) <= SHOWN
    assert {(31_337, -5.0), (77_777, 9.0)} <= set(shown)
    assert shown[0][0] == 0
    assert shown[-1][0] == 99_999
    assert shown == sorted(shown)


def test_a_run_that_is_resumed_replaces_the_steps_that_were_lost():
    curve = GrowingCurve()
    for step in (10, 20, 30):
        curve.add(step, 1.0)
    curve.rewind(20)
    assert curve.points == [(10, 1.0), (20, 1.0)]


def test_logs_that_are_read_late_lie_where_they_belong():
    curve = GrowingCurve()
    for step, value in [(450, 0.5), (314, 0.7), (450, 0.4), (500, 0.3)]:
        curve.add(step, value)
    assert curve.points == [(314, 0.7), (450, 0.4), (500, 0.3)]
