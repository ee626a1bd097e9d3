"""Sentences about the values in which processes differ: pure.

Tests: tests/unit/cluster/test_protocol.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

#: Different values that a sentence quotes: a cluster may have a thousand processes.
_MAX_VALUES = 16
#: Characters of a value that a sentence quotes.
_MAX_CHARACTERS = 120

_ONE_VERSION = dict.fromkeys(("jax", "jaxlib", "keras", "numpy", "python", "unisono"))
_ONE_MODEL = dict.fromkeys(("dtypes", "layers", "model", "shapes", "structure", "variables", "weights"))
_REMEDIES = {
    "cluster": "Give every process the same cluster in TF_CONFIG.",
    "num_processes": "Give every process the same cluster in TF_CONFIG.",
    "program": "Start the same program file in every process.",
    "devices": "Give every process the same number of devices.",
    "optimizer": "Compile the model with the same optimizer in every process.",
    "loss": "Compile the model with the same loss in every process.",
    "run_eagerly": "Compile the model with the same `run_eagerly` in every process.",
    "precision": "Call `keras.config.set_dtype_policy` with the same policy in every process.",
    "seed": "Call `keras.utils.set_random_seed` with the same number in every process.",
}


class _AbsentValue:
    """A value that a process did not send, or a line that its text does not have."""

    def __repr__(self) -> str:
        return "absent"


_ABSENT = _AbsentValue()


def differences(configs: Mapping[int, Mapping[str, object]]) -> list[str]:
    r"""Return a sentence for each name whose value is not equal in all processes.

    Of texts with several lines it quotes the first line that differs, of long lines the part that differs.

    Args:
        configs: process -> name -> value, a string or a number.

    Returns:
        Sentences in the order of the names, each with the value of most processes first.

    >>> print(*differences({0: {"devices": 2}, 1: {"devices": 4}, 2: {"devices": 2}}))
    devices is 2 on processes 0 and 2, but 4 on process 1. Give every process the same number of devices.
    >>> print(*differences({0: {"model": "a (2,)\nb (3,)"}, 1: {"model": "a (2,)\nb (4,)"}}))
    model, line 2, is 'b (3,)' on process 0, but 'b (4,)' on process 1. Build the same model in every process.
    """
    names = dict.fromkeys(name for config in configs.values() for name in config)
    found = []
    for name in names:
        values = {process: config.get(name, _ABSENT) for process, config in configs.items()}
        if len(_groups(values)) > 1:
            found.append(_difference(name, values))
    return found


def _difference(name: str, values: Mapping[int, object]) -> str:
    line, values = _first_line(values)
    where = f", line {line}," if line else ""
    quoted = [f"{value} on {named(processes)}" for value, processes in _groups(_excerpts(values))]
    if len(quoted) > _MAX_VALUES:
        quoted[_MAX_VALUES:] = [f"{len(quoted) - _MAX_VALUES} other values elsewhere"]
    return f"{name}{where} is {', but '.join(quoted)}. {_remedy(name)}"


def _groups(values: Mapping[int, object]) -> list[tuple[object, list[int]]]:
    """The different values and the processes that have each, most processes first."""
    groups: dict[str, tuple[object, list[int]]] = {}
    for process, value in sorted(values.items()):
        # By the text: 1 == True, and NaN is not equal to itself.
        groups.setdefault(repr(value), (value, []))[1].append(process)
    return sorted(groups.values(), key=lambda group: (-len(group[1]), group[1]))


def _first_line(values: Mapping[int, object]) -> tuple[int, Mapping[int, object]]:
    """The number of the first line that differs, and each process' line; 0 for values without lines."""
    texts = {process: value for process, value in values.items() if isinstance(value, str)}
    if len(texts) < len(values) or not any("\n" in text for text in texts.values()):
        return 0, values
    lines = {process: text.split("\n") for process, text in texts.items()}
    index = 0
    while len({line[index] if index < len(line) else None for line in lines.values()}) == 1:
        index += 1
    return index + 1, {p: line[index] if index < len(line) else _ABSENT for p, line in lines.items()}


def _excerpts(values: Mapping[int, object]) -> dict[int, object]:
    """The values as a sentence quotes them: of long texts the part where they begin to differ."""
    texts = [value for value in values.values() if isinstance(value, str)]
    common = _common(texts)
    start = max(0, common - 20) if any(len(text) > _MAX_CHARACTERS for text in texts) else 0
    return {process: _Excerpt(value, start) for process, value in values.items()}


@dataclasses.dataclass(frozen=True, repr=False)
class _Excerpt:
    value: object
    start: int

    def __repr__(self) -> str:
        if not isinstance(self.value, str):
            return shortened(repr(self.value), _MAX_CHARACTERS)
        text = repr(self.value[self.start : self.start + _MAX_CHARACTERS])
        more = "…" if len(self.value) > self.start + _MAX_CHARACTERS else ""
        return f"{'…' if self.start else ''}{text}{more}"


def _remedy(name: str) -> str:
    if name in _ONE_VERSION:
        return f"Install one version of {name} for every process."
    if name in _ONE_MODEL:
        return "Build the same model in every process."
    if name.startswith("step "):
        return "Give every worker the same model, and the same data with the same batch size."
    return _REMEDIES.get(name, "Make it the same in every process.")


def named(processes: Iterable[int]) -> str:
    """Return numbers of processes as text, runs of them joined.

    >>> named([0, 1, 2, 5]), named([3])
    ('processes 0-2 and 5', 'process 3')
    """
    runs: list[list[int]] = []
    for process in sorted(processes):
        if runs and process == runs[-1][-1] + 1:
            runs[-1].append(process)
        else:
            runs.append([process])
    # Two in a row are listed, not a range.
    texts = [f"{r[0]}-{r[-1]}" if len(r) > 2 else " and ".join(map(str, r)) for r in runs]
    several = len(runs) > 1 or len(runs[0]) > 1
    return f"process{'es' if several else ''} " + " and ".join(
        [", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts
    )


def _common(texts: list[str]) -> int:
    """How many first characters the texts have in common."""
    # In sorted order, the first and the last text share the fewest.
    first, last = min(texts, default=""), max(texts, default="")
    pairs = zip(first, last, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


def shortened(text: str, limit: int) -> str:
    """Return a text for a message: at most `limit` characters, and an ellipsis where it was longer."""
    return text if len(text) <= limit else text[:limit] + "…"
