"""Mistakes in how workers that train apart exchange what they have learned, and go on after a restart."""

from tests.simulation._planted import Mistake

_BESIDE = "unisono.local_updates._exchange_beside_steps:ExchangeBesideSteps"
_LAYOUT = "unisono.local_updates._local_layout"
_PHASE = "unisono.local_updates._local_phase"
_FUNCTION = "unisono.local_updates._local_training:LocalTrainFunction"


def _mistake(name, place, old, new):
    return Mistake(name, place, old, new, "local_updates")


MISTAKES = (
    _mistake(
        "a fragment is applied where a group of steps ends, not after its steps",
        f"{_BESIDE}.advance",
        "self._running[0].at + self._sync.overlap == self._steps",
        "self._running[0].at < self._steps",
    ),
    _mistake(
        "of two fragments the one that was sent last is applied first",
        f"{_BESIDE}.advance",
        "self._running.popleft()",
        "self._running.pop()",
    ),
    _mistake(
        "a group of steps does not end where a fragment is applied",
        f"{_BESIDE}.room",
        "min([until_sent, *until_applied])",
        "until_sent",
    ),
    _mistake(
        "what was trained beside an exchange is lost",
        f"{_LAYOUT}:with_changes",
        "rows + (now - sent)",
        "rows",
    ),
    _mistake(
        "what is being sent is forgotten where an epoch ends",
        f"{_BESIDE}.finish",
        "while self._running:",
        "while False:",
    ),
    _mistake(
        "a fragment is exchanged once more where an epoch ends",
        f"{_BESIDE}._send",
        "trained, self._trained[number] = self._trained[number], 0",
        "trained = self._trained[number]",
    ),
    _mistake(
        "a fragment that a callback has cut short is not exchanged again",
        f"{_BESIDE}.drop",
        "self._trained[sent.number] += sent.trained",
        "pass",
    ),
    _mistake(
        "after a restart what was sent is applied too late",
        f"{_BESIDE}.resume",
        "-each.ago",
        "0",
    ),
    _mistake(
        "after a restart a phase has all its steps again",
        f"{_FUNCTION}.resume",
        "self.steps_in_phase, self._ended_at = phase.done, -1",
        "self.steps_in_phase, self._ended_at = 0, -1",
    ),
    _mistake(
        "a backup between two phases has nothing of what is being sent",
        f"{_FUNCTION}.phase",
        "if layout.sync.fragments == 1 and self._beside is None and not self.steps_in_phase:",
        "if not self.steps_in_phase:",
    ),
    _mistake(
        "nothing is running where a phase is over",
        f"{_FUNCTION}.end_phase",
        "if self.num_steps == self._ended_at:",
        "if not self.steps_in_phase:",
    ),
    _mistake(
        "a counter of all workers is added up",
        f"{_LAYOUT}:_part",
        "jnp.equal(engine.replica_id, 0)",
        "True",
    ),
    _mistake(
        "a metric goes on with the sum on each worker",
        f"{_LAYOUT}:Turn.joined",
        "localize(r, m, engine)[None]",
        "m[None]",
    ),
    _mistake(
        "what another number of workers has sent is lost",
        f"{_PHASE}:PhaseEnd.run",
        "for message in self._phase.sent:",
        "for message in ():",
    ),
    _mistake(
        "what another number of workers has trained is added up",
        f"{_PHASE}:PhaseEnd._join",
        "means = [x / self._phase.replicas for x in totals[0]]",
        "means = list(totals[0])",
    ),
)
