"""In which facts processes differ, said in sentences: pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

#: Values of one fact that are told; a cluster may have a thousand processes.
_VALUES = 16
#: Characters of a value that are told.
_CHARACTERS = 120

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


class _Absent:
    """A fact that a process did not tell, or a line that its text does not have."""

    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def differences(facts_by_process: Mapping[int, Mapping[str, Any]]) -> list[str]:
    r"""Return a sentence for each fact that is not equal in all processes.

    Of texts of many lines the first line that differs is named, of long lines the part that does.

    Args:
        facts_by_process: process -> fact -> value, a string or a number.

    Returns:
        Sentences in the order of the facts, each with the value of most processes first.

    >>> print(*differences({0: {"devices": 2}, 1: {"devices": 4}, 2: {"devices": 2}}))
    devices is 2 on processes 0 and 2, but 4 on process 1. Give every process the same number of devices.
    >>> print(*differences({0: {"model": "a (2,)\nb (3,)"}, 1: {"model": "a (2,)\nb (4,)"}}))
    model, line 2, is 'b (3,)' on process 0, but 'b (4,)' on process 1. Build the same model in every process.
    """
    names = dict.fromkeys(name for facts in facts_by_process.values() for name in facts)
    found = []
    for name in names:
        values = {process: facts.get(name, _ABSENT) for process, facts in facts_by_process.items()}
        if len(_groups(values)) > 1:
            found.append(_difference(name, values))
    return found


def _difference(name: str, values: Mapping[int, Any]) -> str:
    line, values = _first_line(values)
    where = f", line {line}," if line else ""
    told = [f"{value} on {named(processes)}" for value, processes in _groups(_excerpts(values))]
    if len(told) > _VALUES:
        told[_VALUES:] = [f"{len(told) - _VALUES} other values elsewhere"]
    return f"{name}{where} is {', but '.join(told)}. {_remedy(name)}"


def _groups(values: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Values and who has them, most processes first."""
    groups: dict[str, tuple[Any, list[int]]] = {}
    for process, value in sorted(values.items()):
        # The text, because 1 == True, and NaN is not equal to itself.
        groups.setdefault(repr(value), (value, []))[1].append(process)
    return sorted(groups.values(), key=lambda group: (-len(group[1]), group[1]))


def _first_line(values: Mapping[int, Any]) -> tuple[int, Mapping[int, Any]]:
    """The number of the first line that differs, and each process' line; 0 for values without lines."""
    texts = [value for value in values.values() if isinstance(value, str)]
    if len(texts) < len(values) or not any("\n" in text for text in texts):
        return 0, values
    lines = {process: value.split("\n") for process, value in values.items()}
    index = 0
    while len({line[index] if index < len(line) else None for line in lines.values()}) == 1:
        index += 1
    return index + 1, {p: line[index] if index < len(line) else _ABSENT for p, line in lines.items()}


def _excerpts(values: Mapping[int, Any]) -> dict[int, Any]:
    """The values as they are printed: of long texts the part where they begin to differ."""
    texts = [value for value in values.values() if isinstance(value, str)]
    common = _common(texts)
    start = max(0, common - 20) if any(len(text) > _CHARACTERS for text in texts) else 0
    return {process: _Excerpt(value, start) for process, value in values.items()}


@dataclasses.dataclass(frozen=True, repr=False)
class _Excerpt:
    value: Any
    start: int

    def __repr__(self) -> str:
        if not isinstance(self.value, str):
            return shortened(repr(self.value), _CHARACTERS)
        text = repr(self.value[self.start : self.start + _CHARACTERS])
        more = "…" if len(self.value) > self.start + _CHARACTERS else ""
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
    # Two in a row are no run.
    texts = [f"{r[0]}-{r[-1]}" if len(r) > 2 else " and ".join(map(str, r)) for r in runs]
    several = len(runs) > 1 or len(runs[0]) > 1
    return f"process{'es' if several else ''} " + " and ".join(
        [", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts
    )


def _common(texts: list[str]) -> int:
    """With how many equal characters the texts begin."""
    # Of all texts, the first and the last in order share the least.
    first, last = min(texts, default=""), max(texts, default="")
    pairs = zip(first, last, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


def shortened(text: str, limit: int) -> str:
    """Return a text for a message, not longer than `limit` characters and a sign that more follows."""
    return text if len(text) <= limit else text[:limit] + "…"
