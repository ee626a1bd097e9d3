"""Runs schedules of a protocol: one, thousands, and shorter and shorter ones of a failure.

A protocol is a function of a `World`: it runs as the world's first fiber, makes processes, and raises
`Violation` where a promise did not hold.

Tests: tests/unit/test_simulation.py.
"""

import dataclasses
import gc
import time
import traceback

from tests.simulation._world import FAULT, ORDER, PREEMPT, World

#: Protocols of which a schedule was run in this process.
_IMPORTED = set()


@dataclasses.dataclass
class Outcome:
    """What a schedule has led to.

    Args:
        error: what was raised; None where everything held.
        world: as it was at its end.
    """

    seed: int
    world: World
    error: BaseException | None

    @property
    def cost(self):
        """What a shorter schedule has less of: faults, switches, choices that are not 0, choices."""
        world = self.world
        noise = sum(map(bool, world.choices))
        return sum(world.faults.values()), world.switches, noise, len(world.choices)

    @property
    def what(self):
        """The kind of error, by which a shrunk schedule is compared."""
        return type(self.error).__name__ if self.error else None

    def text(self):
        """Return the error as a text."""
        return "".join(traceback.format_exception(self.error)) if self.error else "everything held"


def run_one(protocol, seed, choices=None, is_recorded=False):
    """Run one schedule.

    Args:
        choices: of an earlier run of this seed.
    """
    world = World(seed, choices, is_recorded)
    error = None
    try:
        world.run(lambda: protocol(world))
    except Exception as raised:
        error = raised
    return Outcome(seed, world, error)


@dataclasses.dataclass
class Tally:
    """What many schedules were."""

    schedules: int = 0
    switches: int = 0
    messages: int = 0
    seconds: float = 0.0
    spent: float = 0.0
    faults: dict = dataclasses.field(default_factory=dict)

    def add(self, world):
        """Count a schedule."""
        self.schedules += 1
        self.switches += world.switches
        self.seconds += world.now
        self.messages += world.counts["messages"]
        for kind, count in world.faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count

    def join(self, other):
        """Add the counts of another one."""
        for field in ("schedules", "switches", "messages", "seconds", "spent"):
            setattr(self, field, getattr(self, field) + getattr(other, field))
        for kind, count in other.faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count


def run_many(protocol, seeds, look=lambda: None, until=None, most_failures=1):
    """Run schedules; return what they were, and those that failed.

    Args:
        seeds: of the schedules.
        look: what `simulated` gave: replaces what modules have that a schedule has imported.
        until: the time of `time.monotonic` after which no schedule begins.
    """
    tally, failures = Tally(), []
    began = time.process_time()
    was_enabled = gc.isenabled()
    # Collections in the middle of a schedule would not be a choice.
    gc.disable()
    try:
        if protocol not in _IMPORTED:
            # Once for what it imports, which is looked after then.
            run_one(protocol, seeds[0])
            look()
            _IMPORTED.add(protocol)
        # What is there, modules above all, is not searched again and again.
        gc.freeze()
        for count, seed in enumerate(seeds, 1):
            if until is not None and time.monotonic() > until:
                break
            outcome = run_one(protocol, seed)
            tally.add(outcome.world)
            if count % 64 == 0:
                gc.collect()
            if outcome.error is not None:
                failures.append(outcome)
                if len(failures) >= most_failures:
                    break
    finally:
        gc.collect()
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    tally.spent = time.process_time() - began
    return tally, failures


def shrink(protocol, seed, most_runs=600, seconds=60.0):
    """Return the shortest schedule that was found to fail as that of a seed does, recorded."""
    best = run_one(protocol, seed, is_recorded=True)
    if best.error is None:
        raise ValueError(f"Seed {seed} does not fail.")
    until = time.monotonic() + seconds
    runs = 0

    def tries(choices):
        nonlocal best, runs
        if runs >= most_runs or time.monotonic() > until:
            return False
        runs += 1
        found = run_one(protocol, seed, choices)
        if found.what != best.what or found.cost >= best.cost:
            return False
        best = found
        return True

    def zeroed(which):
        """Make choices of a kind the quietest: all, then halves, then single ones."""
        size = None
        while size != 0:
            places = [i for i, k in enumerate(best.world.kinds) if which(k) and best.world.choices[i]]
            if not places:
                return
            size = len(places) if size is None else size
            at = 0
            while at < len(places):
                choices = list(best.world.choices)
                for place in places[at : at + size]:
                    choices[place] = 0
                if tries(choices):
                    places = [i for i, k in enumerate(best.world.kinds) if which(k) and best.world.choices[i]]
                else:
                    at += size
                if runs >= most_runs or time.monotonic() > until:
                    return
            size = size // 2

    before = None
    while before != best.cost:
        before = best.cost
        # What comes after the failure's cause is often nothing but noise.
        length = len(best.world.choices)
        for share in (0.25, 0.5, 0.75, 0.9):
            tries(best.world.choices[: int(length * share)])
        zeroed(lambda kind: kind.startswith(FAULT))
        zeroed(lambda kind: kind in (ORDER, PREEMPT))
        zeroed(lambda kind: not kind.startswith(FAULT) and kind not in (ORDER, PREEMPT))
    return best


def diagram(world, most=200):
    """Return who sent what when, as a text: a column for each process."""
    notes = world.notes if len(world.notes) <= most else world.notes[-most:]
    names = list(dict.fromkeys(name for note in notes for name in note[2:4]))
    width = 16
    at = {name: 10 + width // 2 + width * i for i, name in enumerate(names)}
    total = 10 + width * len(names)
    lines = ["      time " + "".join(name[: width - 1].center(width) for name in names)]
    if len(notes) < len(world.notes):
        lines.append(f"      ... {len(world.notes) - len(notes)} earlier lines")
    for now, kind, source, target, text in notes:
        row = [" "] * total
        for place in at.values():
            row[place] = "|"
        if source == target:
            row[at[source]] = {"kill": "X", "pause": "z"}.get(kind, "*")
        else:
            low, high = sorted((at[source], at[target]))
            for place in range(low + 1, high):
                row[place] = "~" if kind == "part" else "-"
            if kind == "lost":
                row[(low + high) // 2] = "x"
            elif kind == "part":
                row[(low + high) // 2] = "/"
            else:
                row[at[target] + (-1 if at[target] > at[source] else 1)] = (
                    ">" if at[target] > at[source] else "<"
                )
        row[:10] = f"{now:10.3f}"
        lines.append(f"{''.join(row)}  {text}")
    return "\n".join(lines)


def report(protocol_name, outcome):
    """Return the text for a schedule that failed."""
    world = outcome.world
    faults = ", ".join(f"{count} {kind}" for kind, count in world.faults.items()) or "no faults"
    head = f"{protocol_name}, seed {outcome.seed}: {outcome.what}, after {world.now:.1f} s"
    head += f", {world.switches} switches and {faults}"
    return "\n".join((head, diagram(world), outcome.text()))
