"""`HParams`: hyperparameters by name, with the types of their first values.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/contrib/training/HParams
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from unisono._checks import is_number
from unisono._errors import InvalidArgumentError

#: One assignment of a text: a name, perhaps an index, and a value or a list of values.
_ASSIGNMENT = re.compile(
    r"\s*(?P<name>[a-zA-Z][\w.]*)(\[\s*(?P<index>\d+)\s*\])?\s*=\s*"
    r"((?P<value>[^,\[]*)|\[(?P<values>[^\]]*)\])\s*($|,)"
)


class HParams:
    """Hyperparameters as attributes; for `Estimator(params=...)`.

    A value keeps the type with which its name was made, by which a text such as `"rate=0.1,units=[8,4]"` is
    read.

    Args:
        **values: by name; lists hold values of one type.

    Raises:
        InvalidArgumentError: for an empty list, or a name that is one of this class.

    >>> params = HParams(rate=0.1, units=[8, 4])
    >>> params.parse("rate=1e-3,units=[16]").units
    [16]
    """

    def __init__(self, **values: Any) -> None:
        self._types: dict[str, tuple[type, bool]] = {}
        for name, value in values.items():
            self.add_hparam(name, value)

    def add_hparam(self, name: str, value: object) -> None:
        """Add a hyperparameter.

        Args:
            name: which must be new.
            value: its value, which says the type; None for a value of any type.

        Raises:
            InvalidArgumentError: the name exists, or the list is empty.
        """
        if getattr(self, name, None) is not None:
            raise InvalidArgumentError(
                f"Hyperparameter name is reserved. Received: {name!r}. Choose another."
            )
        if isinstance(value, (list, tuple)):
            if not value:
                raise InvalidArgumentError(
                    f"Multi-valued hyperparameters cannot be empty. Received: {name}={value!r}."
                )
            self._types[name] = (type(value[0]), True)
        else:
            self._types[name] = (type(value), False)
        setattr(self, name, value)

    def set_hparam(self, name: str, value: Any) -> None:
        """Set a hyperparameter that exists.

        Args:
            name: of the hyperparameter.
            value: of its type.

        Raises:
            InvalidArgumentError: there is none of this name, or the value has another type.
        """
        kind, is_list = self._type(name)
        if is_list != isinstance(value, (list, tuple)):
            raise InvalidArgumentError(
                f"Must {'' if is_list else 'not '}pass a list for the parameter {name!r}. Received: "
                f"{value!r}."
            )
        cast = [_cast(name, kind, v) for v in value] if is_list else _cast(name, kind, value)
        setattr(self, name, cast)

    def del_hparam(self, name: str) -> None:
        """Remove a hyperparameter, if it exists.

        Args:
            name: of the hyperparameter.
        """
        if self._types.pop(name, None) is not None:
            delattr(self, name)

    def parse(self, values: str) -> HParams:
        """Set hyperparameters from a text such as `"rate=0.1,units=[8,4],units[1]=2"`.

        Args:
            values: the text.

        Returns:
            This object.

        Raises:
            InvalidArgumentError: the text cannot be read, or a name does not exist.
        """
        at = 0
        while at < len(values):
            assignment = _ASSIGNMENT.match(values, at)
            if assignment is None:
                raise InvalidArgumentError(
                    f"Malformed hyperparameter value. Received: {values[at:]!r}. Write 'name=value'."
                )
            at = assignment.end()
            self._assign(assignment)
        return self

    def _assign(self, match: re.Match[str]) -> None:
        name, index = match["name"], match["index"]
        kind, is_list = self._type(name)
        if match["values"] is not None:
            values = match["values"].split(",")
            self.set_hparam(name, [_read(name, kind, v) for v in values if v.strip()])
        elif index is not None:
            every = list(getattr(self, name)) if is_list else None
            if every is None or int(index) >= len(every):
                raise InvalidArgumentError(
                    f"An index is one of a list's values. Received: {match[0]!r} for {getattr(self, name)!r}."
                )
            every[int(index)] = _read(name, kind, match["value"])
            setattr(self, name, every)
        else:
            self.set_hparam(name, _read(name, kind, match["value"]))

    def override_from_dict(self, values_dict: Mapping[str, Any]) -> HParams:
        """Set hyperparameters by name.

        Args:
            values_dict: names that exist, with their values.

        Returns:
            This object.
        """
        for name, value in values_dict.items():
            self.set_hparam(name, value)
        return self

    def parse_json(self, values_json: str) -> HParams:
        """Set hyperparameters from JSON.

        Args:
            values_json: an object of names and values.

        Returns:
            This object.
        """
        return self.override_from_dict(json.loads(values_json))

    def to_json(
        self,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return the hyperparameters as JSON, without functions.

        Args:
            indent: as of `json.dumps`.
            separators: as of `json.dumps`.
            sort_keys: as of `json.dumps`.
        """
        kept = {name: value for name, value in self.values().items() if not callable(value)}
        return json.dumps(kept, indent=indent, separators=separators, sort_keys=sort_keys)

    def values(self) -> dict[str, Any]:
        """Return the hyperparameters by name."""
        return {name: getattr(self, name) for name in self._types}

    def get(self, key: str, default: object = None) -> Any:
        """Return a hyperparameter, or a default.

        Args:
            key: its name.
            default: for a name that does not exist.
        """
        return getattr(self, key) if key in self._types else default

    def __contains__(self, key: str) -> bool:
        return key in self._types

    def __str__(self) -> str:
        return str(sorted(self.values().items()))

    def __repr__(self) -> str:
        return f"HParams({', '.join(f'{k}={v!r}' for k, v in sorted(self.values().items()))})"

    def _type(self, name: str) -> tuple[type, bool]:
        if name not in self._types:
            raise InvalidArgumentError(
                f"Unknown hyperparameter name. Received: {name!r}; there are {sorted(self._types)}."
            )
        return self._types[name]


def _read(name: str, kind: type, text: str) -> Any:
    if kind is bool:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower())
        if value is None:
            raise InvalidArgumentError(f"A bool is 'true' or 'false'. Received: {name}={text!r}.")
        return value
    try:
        return text if kind in (str, type(None)) else kind(text.strip())
    except ValueError as error:
        raise InvalidArgumentError(
            f"Could not parse hyperparameter {name!r} as {kind.__name__}. Received: {text!r}."
        ) from error


def _cast(name: str, kind: type, value: object) -> Any:
    """Return a value in a type, where nothing is lost."""
    if kind is type(None) or value is None:
        return value
    if kind not in (int, float) and isinstance(value, kind):
        return value
    if kind not in (int, float) or not is_number(value) or (kind is int and int(value) != value):
        raise InvalidArgumentError(
            f"Could not cast hyperparameter {name!r} of type {kind.__name__}. Received: {value!r} of type "
            f"{type(value).__name__}."
        )
    return kind(value)
