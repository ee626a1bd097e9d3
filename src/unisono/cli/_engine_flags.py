"""The flags of engines, as options of `unisono launch`: made of the fields of their settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from unisono._errors import InvalidArgumentError
from unisono.launcher.engines._engine import find_engine
from unisono.launcher.engines._settings import ENGINES, EngineSettings, Flag

F = TypeVar("F", bound=Callable[..., None])


def add_engine_flags(command: F) -> F:
    """Give a command, which takes further keyword arguments, the flags of all engines in their place."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    every = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
    every += _parameters()
    # Typer reads both.
    command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in every}
    return command


def settings_of(
    on: str | None, flags: Mapping[str, Any], print_only: bool = False, dry_run: bool = False
) -> EngineSettings | None:
    """Return an engine's settings; None on this machine.

    Raises:
        InvalidArgumentError: there is no such engine, or a flag is not one of it.
    """
    if on is not None:
        find_engine(on)
    names = {field.name for field in dataclasses.fields(ENGINES[on])} if on else set()
    given = {name: value for name, value in flags.items() if _is_given(value)}
    for name in given.keys() - names:
        flag, of = "--" + name.replace("_", "-"), " or ".join(_engines_with(name))
        where = f"with `--on {on}`" if on else "without `--on`"
        raise InvalidArgumentError(
            f"`{flag}` belongs to `--on {of}`. Received: {given[name]!r} {where}. "
            f"Write `unisono launch --on {of} {flag} …`."
        )
    if on is None and print_only:
        raise InvalidArgumentError(
            "`--print` prints the file for an engine. Received: no `--on`. Write `--on slurm --print`, or "
            "`--dry-run` for a launch on this machine."
        )
    if on is None:
        return None
    if dry_run:
        raise InvalidArgumentError(
            "`--dry-run` is for a launch on this machine. Received: `--on`. Write `--print`."
        )
    return ENGINES[on](**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})


def _is_given(value: Any) -> bool:
    # Not `value in (None, False)`: 0 is given.
    return value is not None and value is not False and value != []


def _engines_with(name: str) -> list[str]:
    return [
        engine
        for engine, settings in ENGINES.items()
        if name in {field.name for field in dataclasses.fields(settings)}
    ]


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield the flags of all engines, shared ones once."""
    seen = set()
    for settings in ENGINES.values():
        for name, hint in get_type_hints(settings, include_extras=True).items():
            if name not in seen:
                seen.add(name)
                yield _parameter(name, hint)


def _parameter(name: str, hint: Any) -> inspect.Parameter:
    kind: Any
    flag: Flag
    kind, flag = get_args(hint)
    names = [flag.short] * bool(flag.short) + ["--" + name.replace("_", "-")]
    option = typer.Option(*names, help=f"With --on {' or '.join(_engines_with(name))}: {flag.help}")
    several = kind == tuple[str, ...]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind is bool else None,
        annotation=Annotated[list[str] | None if several else kind, option],
    )
