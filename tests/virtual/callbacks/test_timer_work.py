"""What `StepTimer` says of the work of steps: operations, tokens, shares; and what it does not cost."""

import jax
import keras
import numpy as np
import pytest
from tests.support import count_host_reads

import unisono
from unisono.callbacks import StepTimer
from unisono.training.groups import _constant_groups, _step_loop, _step_work
from unisono.training.trainer import _trainer_function

ROWS, WIDTHS = 16, (24, 32, 8)
#: Of the weights of matrices.
WEIGHTS = WIDTHS[0] * WIDTHS[1] + WIDTHS[1] * WIDTHS[2]


def build(replicas=1, **compile_with):
    with unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]).scope():
        first = keras.layers.Dense(WIDTHS[1], "tanh")
        model = keras.Sequential([keras.Input(WIDTHS[:1]), first, keras.layers.Dense(WIDTHS[2])])
        model.compile(**{"optimizer": "sgd", "loss": "mse", **compile_with})
    return model


def data(rows):
    return np.ones((rows, WIDTHS[0]), "f4"), np.ones((rows, WIDTHS[2]), "f4")


def fit(model, *callbacks, rows=4 * ROWS, **options):
    return model.fit(*data(rows), batch_size=ROWS, verbose=0, callbacks=list(callbacks), **options).history


#: Forward and by the weights, and by the inputs but for those of the first layer: of each, two operations for
#: each weight and row.
STEP = (6 * WEIGHTS - 2 * WIDTHS[0] * WIDTHS[1]) * ROWS


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("together", [1, 4])
def test_operations_are_those_of_the_matrix_products(replicas, together):
    """Exactly: nothing but products counts, and a program that repeats the step counts one."""
    timer = StepTimer()
    fit(build(replicas, steps_per_execution=together), timer, epochs=2)
    assert timer._work.done == (8 * ROWS, 0, 8 * STEP / replicas)


@pytest.mark.parametrize("replicas", [1, 2])
def test_operations_are_those_of_xla_on_a_cpu_device(replicas, monkeypatch):
    """Within a fifth: XLA counts sums, activations and the optimizer, too, much in a small model."""
    found = []

    def noting(self, group, program, state, data):
        xla = program.lower(state, data).cost_analysis()["flops"]
        found.append((xla, _step_work.flops_of(program.jaxpr(state, data))))

    monkeypatch.setattr(_trainer_function.TrainerFunction, "learn", noting)
    fit(build(replicas), StepTimer())
    assert found
    for xla, ours in found:
        assert ours == STEP / replicas
        assert ours == pytest.approx(xla, rel=0.2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loop_of_constant_length_counts_one_step_at_each(replicas, monkeypatch):
    """As on GPUs, where the operations of such a loop are counted as often as it runs."""
    monkeypatch.setattr(_step_loop, "may_loop", lambda platform: False)
    monkeypatch.setenv(_constant_groups.SWITCH, "always")
    timer, model = StepTimer(), build(replicas)
    fit(model, timer, rows=9 * ROWS, epochs=2)
    assert model.train_function.loop.is_constant
    assert max(form[2] for form, _ in timer._work._flops_of) > 1
    assert timer._work.done == (18 * ROWS, 0, 18 * STEP / replicas)


def test_a_ragged_last_batch_has_a_program_of_its_own():
    timer = StepTimer()
    fit(build(2), timer, rows=ROWS + 6)
    assert timer._work.done == (ROWS + 6, 0, (STEP + STEP * 6 / ROWS) / 2)


def test_speed_and_share_are_of_the_time_of_the_epoch():
    timer = StepTimer(peak_flops=1e9, tokens_per_row=10)
    history = fit(build(), timer, epochs=2)
    for i in range(2):
        seconds = history["step_ms"][i] * 4 / 1000
        assert history["tflop_per_s"][i] == pytest.approx(4 * STEP / seconds / 1e12)
        assert history["mfu"][i] == pytest.approx(4 * STEP / seconds / 1e9)
        assert history["tokens_per_s"][i] == pytest.approx(10 * history["examples_per_s"][i])


def test_a_cpu_has_no_share_and_no_count_of_memory():
    assert {"mfu", "memory_gb", "tokens_per_s"}.isdisjoint(fit(build(), StepTimer()))


def test_tokens_are_seen_in_the_data():
    with unisono.OneDeviceStrategy("cpu:0").scope():
        words = keras.Input((6,), dtype="int32")
        model = keras.Sequential([words, keras.layers.Embedding(9, 4), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((8, 6), "int32"), np.ones((8, 6, 1), "f4")
    history = model.fit(x, y, batch_size=4, verbose=0, callbacks=[StepTimer()]).history
    assert history["tokens_per_s"][0] == pytest.approx(6 * history["examples_per_s"][0])


def test_the_timer_compiles_nothing_and_reads_nothing():
    """As many traces, compilations and host reads as without it; each program is counted once."""
    # Small programs that all models share, such as those that make random numbers, are compiled once.
    fit(build(2, steps_per_execution=2))
    counts = []
    for callbacks in ([], [StepTimer()]):
        names = []

        def note(event, *_, names=names, **__):
            names.append(event)

        model = build(2, steps_per_execution=2)
        jax.monitoring.register_event_duration_secs_listener(note)
        try:
            with count_host_reads() as reads:
                fit(model, *callbacks, epochs=3)
        finally:
            jax.monitoring.unregister_event_duration_listener(note)
        compiled = [name for name in names if name.startswith("/jax/core/compile/")]
        read = [name for name in reads if name != "block_until_ready"]
        counts.append((sorted(compiled), read, model.train_function.num_programs))
    without, timed = counts
    assert timed == without
    assert without[0]


def test_a_program_is_counted_once(monkeypatch):
    calls = []
    monkeypatch.setattr(_step_work, "flops_of", lambda program: calls.append(program) or 1.0)
    model = build()
    fit(model, StepTimer(), epochs=5)
    assert len(calls) == model.train_function.num_programs == 1


def test_without_the_timer_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(_step_work, "flops_of", None)
    model = build()
    fit(model)
    assert model.train_function.timer.work is None
    monkeypatch.undo()
    fit(model, StepTimer())
    assert model.train_function.timer.work is None


def test_a_step_that_runs_op_by_op_is_not_counted():
    assert np.isnan(fit(build(run_eagerly=True), StepTimer())["tflop_per_s"]).all()
