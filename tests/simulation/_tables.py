"""Tables of Markdown for docs: which planted mistakes are found, and after how many schedules.

Tests: tests/unit/test_simulation.py.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Trial:
    """A mistake that was planted.

    Args:
        protocols: those that were searched; the one that has shown it first of all.
        count: schedules that were run until it was found, or in all.
        what: the kind of error that has shown it; None where none did.
    """

    name: str
    protocols: tuple[str, ...]
    count: int
    what: str | None

    def line(self):
        """The trial as a line of text."""
        where = f"{self.what} in {self.protocols[0]}" if self.what is not None else "not found"
        return f"{self.name:75} {self.count:6}  {where}"


def by_protocol(trials):
    """Return a table with a row for each protocol."""
    rows = {}
    for trial in sorted(trials, key=lambda trial: trial.protocols[0]):
        rows.setdefault(trial.protocols[0], []).append(trial)
    lines = [
        "| protocol | mistakes | found | within 10 schedules | within 100 | the last one after |",
        "|---|---|---|---|---|---|",
    ]
    for name, own in rows.items():
        found = [trial for trial in own if trial.what is not None]
        last = max(found, key=lambda trial: trial.count, default=None)
        text = "" if last is None else f"{last.count}: {last.name}"
        lines.append(f"| `{name}` | {_counts(own)} | {text} |")
    lines.append(f"| all | {_counts(trials)} | |")
    return "\n".join(lines)


def _counts(trials):
    found = [trial.count for trial in trials if trial.what is not None]
    numbers = len(trials), len(found), sum(n <= 10 for n in found), sum(n <= 100 for n in found)
    return " | ".join(map(str, numbers))


def of_all(trials):
    """Return a table with a row for each mistake, those that need most schedules first."""
    order = sorted(trials, key=lambda trial: (trial.what is not None, -trial.count, trial.name))
    lines = ["| mistake | protocol | schedules |", "|---|---|---|"]
    for trial in order:
        name = trial.name.replace("|", "\\|")
        count = trial.count if trial.what is not None else f"not within {trial.count}"
        lines.append(f"| {name} | `{trial.protocols[0]}` | {count} |")
    return "\n".join(lines)
