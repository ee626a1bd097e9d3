"""Ctrl-C at any moment: the model is whole, and holds the state after one of its steps."""

import os
import random
import signal
import sys
import threading

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training._digits import crossentropy, digits, mirrored, mlp
from unisono.training.groups import _batch_source, _group_size

_STEPS = 6


def compiled(replicas):
    keras.utils.set_random_seed(3)
    with mirrored(replicas).scope():
        model = mlp(keras.layers.BatchNormalization())
        model.compile("adam", crossentropy(), metrics=["accuracy"])
    return model


class At:
    """Raises before the n-th instruction of certain functions, as a signal's handler would."""

    def __init__(self, names, number=None):
        self.names, self.number, self.count = names, number, 0
        self.seen = set()

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, *error):
        sys.settrace(self._before)

    def _called(self, frame, event, arg):
        if frame.f_code.co_qualname not in self.names:
            return None
        self.seen.add(frame.f_code.co_qualname)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame, event, arg):
        if event == "opcode":
            self.count += 1
            if self.count == self.number:
                raise KeyboardInterrupt
        return self._instruction


#: Where the state has no other name than in our hands, or in those of Keras' loop.
_EACH = (
    "CompiledStep.__call__",
    "FitState.place",
    "TrainerFunction.__call__",
    "TrainerFunction.prepare",
    "hold_state",
    "set_attribute",
    "start_steps",
    "taken_state",
    "JAXTrainer._get_jax_state",
    "JAXTrainer.fit",
    "put_back",
    "store_values",
)
_ONE_BY_ONE = (*_EACH, "FitState.keep", "StepLoop.run", "TrainerFunction.run", "TrainerFunction.start")
_LOOKAHEAD = (*_ONE_BY_ONE, "StepLookahead.hand_out", "JAXTrainer._purge_model_variables")
#: Where a callback sees each batch.
_SPECULATION = (
    *_EACH,
    "FitState.keep_unread",
    "JAXTrainer._purge_model_variables",
    "Speculation._run_ahead",
    "Speculation._start",
    "Speculation.continue_from",
    "Speculation.next_steps",
    "Speculation.step",
    "TrainerFunction.begin_with",
)
_RUN = ("CompiledStep.__call__", "Entry.__call__", "Entry._store_all", "store_values")


def moments(work, names, some):
    """Numbers of instructions, at random, of those that `work` executes; all of the functions must run."""
    at = At(names)
    with at:
        work()
    assert at.count > 100
    assert at.seen == set(names)
    return random.Random(0).sample(range(1, at.count + 1), some)


class Looks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.last = logs["loss"]


@pytest.fixture(autouse=True)
def two_together(monkeypatch):
    """How many steps run together depends on time, and so would the instructions."""
    monkeypatch.setattr(_group_size, "_FIRST", 2)
    monkeypatch.setattr(_group_size, "_SECONDS", (-1.0, float("inf")))
    monkeypatch.setattr(_batch_source, "_PATIENCE", float("inf"))


@pytest.mark.parametrize(("replicas", "callbacks"), [(1, []), (2, []), (2, [Looks()])])
def test_fit_interrupted_at_any_instruction_leaves_a_finished_step(replicas, callbacks):
    x, y = digits()
    x, y = x[: 32 * _STEPS], y[: 32 * _STEPS]
    model = compiled(replicas)
    model.build((None, 64))
    model.optimizer.build(model.trainable_variables)

    def fit(steps=_STEPS):
        kept = x[: 32 * steps], y[: 32 * steps]
        model.fit(*kept, batch_size=32, shuffle=False, verbose=0, callbacks=callbacks)

    fit()
    begin = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]

    def back():
        for variable, value in zip((*model.variables, *model.optimizer.variables), begin, strict=True):
            variable.assign(value)

    def trained():
        return [np.asarray(v.value).tobytes() for v in model.trainable_variables + model.optimizer.variables]

    finished = []
    for steps in range(_STEPS + 1):
        back()
        if steps:
            fit(steps)
        finished.append(trained())
    back()
    names = _SPECULATION if callbacks else _LOOKAHEAD
    for number in moments(fit, names, 60):
        back()
        with pytest.raises(KeyboardInterrupt), At(names, number):
            fit()
        assert trained() in finished, number
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    back()
    fit()
    assert trained() == finished[-1]


@pytest.mark.parametrize("method", ["evaluate", "predict", "train_on_batch"])
def test_other_methods_interrupted_at_any_instruction_keep_the_weights(method):
    x, y = digits()
    model = compiled(2)
    arguments = {"evaluate": (x[:96], y[:96]), "predict": (x[:96],), "train_on_batch": (x[:32], y[:32])}[
        method
    ]
    functions = _ONE_BY_ONE if method == "train_on_batch" else _LOOKAHEAD
    names = tuple(name.replace(".fit", f".{method}") for name in functions)

    def work():
        options = {} if method == "train_on_batch" else {"batch_size": 32, "verbose": 0}
        getattr(model, method)(*arguments, **options)

    # JAX starts the first calls from Python code, in which there are more instructions.
    for _ in range(5):
        work()
    seen = [w.tobytes() for w in model.get_weights()]
    for number in moments(work, names, 25):
        # A call has fewer instructions where the one before was interrupted at its very end.
        work()
        with pytest.raises(KeyboardInterrupt), At(names, number):
            work()
        now = [w.tobytes() for w in model.get_weights()]
        assert now == seen or method == "train_on_batch"
    work()


def loop_of(model, strategy, x, y):
    loss_of = crossentropy()

    def step(x, y):
        with unisono.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def run():
        for i in range(0, len(x), 32):
            strategy.run(step, args=(x[i : i + 32], y[i : i + 32]))

    return run


def test_a_custom_loop_interrupted_at_any_instruction_leaves_a_finished_step():
    x, y = digits()
    model, strategy = compiled(2), mirrored(2)
    with strategy.scope():
        model = mlp()
        model.compile("sgd", crossentropy())
    run = loop_of(model, strategy, x[:128], y[:128])
    run()
    begin = [v.numpy() for v in model.variables]
    finished = [[w.tobytes() for w in begin]]
    single = [loop_of(model, strategy, x[i : i + 32], y[i : i + 32]) for i in range(0, 128, 32)]
    for step in single:
        step()
        finished.append([v.numpy().tobytes() for v in model.variables])
    for number in moments(run, _RUN, 80):
        for variable, value in zip(model.variables, begin, strict=True):
            variable.assign(value)
        with pytest.raises(KeyboardInterrupt), At(_RUN, number):
            run()
        assert [v.numpy().tobytes() for v in model.variables] in finished, number


def test_real_signals_at_random_moments_leave_a_model_that_trains_on():
    x, y = digits()
    model, strategy = compiled(2), mirrored(2)
    with strategy.scope():
        other = mlp()
        other.compile("sgd", crossentropy())
    loop = loop_of(other, strategy, x[:320], y[:320])
    works = [
        (model, lambda: model.fit(x[:640], y[:640], verbose=0, epochs=2, validation_data=(x[:64], y[:64]))),
        (model, lambda: model.evaluate(x[:640], y[:640], verbose=0)),
        (other, loop),
    ]
    moment = random.Random(1)

    def interrupted(work):
        timer = threading.Timer(moment.uniform(0, 0.05), os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        for _ in range(1000):
            work()

    for trained, work in works:
        work()
        for _ in range(20):
            with pytest.raises(KeyboardInterrupt):
                interrupted(work)
            assert all(np.isfinite(w).all() for w in trained.get_weights())
    for _, work in works:
        work()


def test_an_interrupt_while_jax_starts_a_program_for_the_first_time_is_put_off():
    x, y = digits()
    model = compiled(2)
    model.build((None, 64))
    started = []

    def started_step(original):
        def start(donated, kept):
            result = original(donated, kept)
            if not started:
                started.append(1)
                signal.raise_signal(signal.SIGINT)
            return result

        return start

    model.make_train_function()
    programs = model.train_function._programs
    compile_step = programs.compile

    def compile_and_watch(key, group):
        program = compile_step(key, group)

        class Watched:
            trace = program._compiled.trace
            __call__ = staticmethod(started_step(program._compiled))

        program._compiled = program._program = Watched()
        return program

    programs.compile = compile_and_watch
    with pytest.raises(KeyboardInterrupt):
        model.fit(x[:64], y[:64], verbose=0)
    assert started == [1]
    # The first program has two steps.
    assert int(model.optimizer.iterations.numpy()) == 2
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_an_interrupt_while_keras_reads_logs_ends_training():
    """Keras discards every exception there, so that training went on."""
    x, y = digits()

    class Interrupted(float):
        def __float__(self):
            signal.raise_signal(signal.SIGINT)
            return 1.0

    class Epochs(keras.callbacks.Callback):
        ended = 0

        def on_epoch_end(self, epoch, logs=None):
            self.ended += 1

    model, epochs = compiled(2), Epochs()
    original = model._get_metrics_result_or_logs
    model._get_metrics_result_or_logs = lambda logs: {**original(logs), "loss": Interrupted(1.0)}
    with pytest.raises(KeyboardInterrupt):
        model.fit(x[:64], y[:64], verbose=0, epochs=10, callbacks=[epochs])
    assert epochs.ended <= 1
