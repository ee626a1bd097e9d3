"""Slurm's short forms: lists of hosts and of counts; pure.

The forms of `scontrol show hostnames` and of SLURM_STEP_TASKS_PER_NODE:
https://slurm.schedmd.com/scontrol.html, https://slurm.schedmd.com/srun.html.
"""

from __future__ import annotations

import itertools
import re

from unisono._errors import InvalidArgumentError

#: More is a slip: the largest machines have tens of thousands of nodes.
_MOST = 100_000

_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list such as Slurm writes.

    Args:
        text: names separated by commas; `[1-3,7]` stands for several numbers, and `[01-10]` keeps zeros.

    >>> expand_hosts("node[1-3,7],gpu-[09-10]-ib,login")
    ['node1', 'node2', 'node3', 'node7', 'gpu-09-ib', 'gpu-10-ib', 'login']
    """
    patterns = _split_outside_brackets(text)
    if not all(_HOST.fullmatch(p) for p in patterns):
        raise _unreadable(text)
    hosts: list[str] = []
    for pattern in patterns:
        hosts += _expand_host(pattern, text)
        _refuse_too_many(len(hosts), text)
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    # Commas also separate the numbers in brackets.
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text)]


def _expand_host(pattern: str, text: str) -> list[str]:
    choices = []
    total = 1
    for numbers, name in _PART.findall(pattern):
        choices.append([name] if name else _expand_numbers(numbers, text))
        # Before the product is made: `n[1-99999][1-99999]` would fill the memory.
        total *= len(choices[-1])
        _refuse_too_many(total, text)
    return ["".join(parts) for parts in itertools.product(*choices)]


def _expand_numbers(numbers: str, text: str) -> list[str]:
    expanded: list[str] = []
    for part in numbers.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise _unreadable(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _unreadable(text)
        _refuse_too_many(int(last) - int(first) + 1, text)
        # As many digits as the first number has: Slurm keeps leading zeros.
        expanded += [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)]
    return expanded


def _refuse_too_many(count: int, text: str) -> None:
    if count > _MOST:
        raise InvalidArgumentError(
            f"A list must have {_MOST} entries at most. Received: {text[:200]!r}. Write a smaller range."
        )


def _unreadable(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "A host list must be names separated by commas, with ascending numbers in brackets. "
        f"Received: {text[:200]!r}. Write, for example, 'node[1-3,7],gpu-[01-04]'."
    )


def expand_counts(text: str) -> list[int]:
    """Return the counts of a list in which `2(x3)` stands for `2,2,2`.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if not match:
            raise InvalidArgumentError(
                "Tasks per node must be counts separated by commas. "
                f"Received: {text[:200]!r}. Write, for example, '2(x3),1'."
            )
        repeats = int(match[2] or 1)
        _refuse_too_many(len(counts) + repeats, text)
        counts += [int(match[1])] * repeats
    return counts
