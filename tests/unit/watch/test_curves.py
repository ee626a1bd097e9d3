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
    for step in (10, 20, 30, 20, 40):
        curve.add(step, float(step))
    assert curve.points == [(10, 10.0), (20, 20.0), (40, 40.0)]
