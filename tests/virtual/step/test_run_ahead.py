"""XLA's CPU collectives share a thread pool with dispatch, and hang where the host runs too far ahead.

ENGINE: 400 unblocked steps with one psum on 8 virtual devices aborted in every attempt at the default
pool. Here 3,000 steps are started and nothing is read until the end.
"""

import pytest

from tests import forked
from unisono.step._run_ahead import RUN_AHEAD, RunAhead

SCRIPT = """
import unisono, numpy as np
strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(8)])
import jax.numpy as jnp
weights = unisono.Mirrored(jnp.ones((64, 64)))
(batch,) = strategy.distribute_dataset([np.ones((64, 64), "f4")])

def step(w, x):
    y = jnp.tanh(x @ w)
    grads = unisono.get_replica_context().all_reduce("SUM", x.T @ y)
    return unisono.Mirrored(w - 1e-6 * grads)

for _ in range(3000):
    weights = strategy.run(step, args=(weights, batch))
print("done", bool(jnp.isfinite(weights.value).all()))
"""


def test_three_thousand_steps_that_nobody_waits_for(tmp_path):
    (tmp_path / "steps.py").write_text(SCRIPT)
    env = forked.environment()
    env.pop("NPROC", None)
    done = forked.run(["steps.py"], tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done True" in done.stdout


class Token:
    """An output of a step, which is ready."""

    def __init__(self, error=None):
        self._error = error

    def block_until_ready(self):
        if self._error is not None:
            raise self._error


def after_failures(count):
    """What holds the host back, after so many steps that failed."""
    bound = RunAhead()
    for i in range(count):
        bound.wait_for_capacity(Token(RuntimeError(f"step {i}")))
    return bound


def test_an_error_of_a_step_ends_the_steps_that_follow_from_it():
    bound = after_failures(RUN_AHEAD)
    with pytest.raises(RuntimeError, match="step 0"):
        bound.wait_for_capacity(Token(RuntimeError("a consequence")))


def test_an_error_of_earlier_code_does_not_end_later_code(caplog):
    """As in a notebook, after a cell that has failed."""
    bound = after_failures(RUN_AHEAD)
    for _ in range(2 * RUN_AHEAD):
        bound.wait_for_capacity(Token())
    (record,) = caplog.records
    assert record.getMessage() == "A step of earlier code has failed: step 0"
