"""Names of variables that are the same in every process that builds the same model. Pure.

Keras numbers the objects of a process: the second `Dense` is `dense_1`, in a second model
`dense_2`. A checkpoint needs names that depend on the model alone, so siblings are numbered
again, in the order of their variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import keras

_NUMBERED = re.compile(r"(.+?)_\d+")


def canonical_paths(paths: Iterable[str]) -> list[str]:
    """Return paths with automatic numbers counted from the first sibling, all different.

    Args:
        paths: parts joined by `/`, in the order of the model's variables.

    >>> canonical_paths(["dense_4/kernel", "dense_4/bias", "dense_7/kernel"])
    ['dense/kernel', 'dense/bias', 'dense_1/kernel']
    """
    renamed: dict[tuple[str, str], str] = {}
    counts: dict[tuple[str, str], int] = {}
    canonical = []
    for path in paths:
        parts: list[str] = []
        for part in path.split("/"):
            parent = "/".join(parts)
            if (parent, part) not in renamed:
                match = _NUMBERED.fullmatch(part)
                base = match[1] if match else part
                number = counts.get((parent, base), 0)
                counts[parent, base] = number + 1
                # As Keras counts in a fresh process: the first sibling has no number.
                renamed[parent, part] = f"{base}_{number}" if number else base
            parts.append(renamed[parent, part])
        canonical.append("/".join(parts))
    return _different(canonical)


def slot_names(names: Sequence[str], references: Mapping[str, str]) -> list[str]:
    """Return names for an optimizer's variables, slots by the weight they belong to.

    Args:
        names: as Keras gives them: `sequential_1_dense_3_kernel_momentum`, `iteration`.
        references: path of each weight in the process -> its canonical path.

    >>> slot_names(["iteration", "dense_3_kernel_velocity"], {"dense_3/kernel": "dense/kernel"})
    ['iteration', 'dense/kernel/velocity']
    """
    # The longest first: one weight's name may be the beginning of another's.
    prefixes = sorted(((p.replace("/", "_"), c) for p, c in references.items()), key=lambda x: -len(x[0]))
    names_of_slots = []
    for name in names:
        # Keras replaces the `/` of a weight's path by `_` in the names of its slots.
        flat = name.replace("/", "_")
        match = next(((p, c) for p, c in prefixes if flat.startswith(p + "_")), None)
        names_of_slots.append(f"{match[1]}/{flat[len(match[0]) + 1 :]}" if match else name)
    return _different(names_of_slots)


def _different(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    numbered = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        numbered.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return numbered


def variables_by_name(variables: Sequence[keras.Variable]) -> dict[str, keras.Variable]:
    """The variables of a Keras object by canonical name."""
    return dict(zip(canonical_paths([v.path for v in variables]), variables, strict=True))
