"""A loop without a model, for hooks."""

import jax.numpy as jnp

from unisono.estimator.hooks import HookRunner, HookSession


class Loop:
    """A loop of steps that count, and return `loss = -step`."""

    def __init__(self, hooks, start=0, **session):
        self.step, self.groups, self.saved = start, [], []
        exposed = {"loss": jnp.float32(0), "other": jnp.float32(1)}
        self.exposed = session.pop("exposed", exposed)
        session = HookSession(self.exposed, lambda: self.step, self._save, **session)
        self.runner = HookRunner(hooks, session)

    def _save(self, wait):
        self.saved.append(self.step)
        return f"ckpt-{self.step}"

    def run(self, steps, values=lambda step: {}):
        """At most so many steps."""
        self.runner.begin()
        self.runner.after_create_session()
        end = self.step + steps
        while self.step < end and not self.runner.should_stop:
            group = min(self.runner.before_step(self.step), end - self.step)
            self.step += group
            self.groups.append(group)
            self.runner.after_step(
                {"loss": jnp.float32(-self.step), "global_step": self.step, **values(self.step)}
            )
        self.runner.end()
        return self
