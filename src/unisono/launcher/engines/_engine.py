"""The interface of engines: `unisono launch --on NAME`.

Tests: tests/unit/launcher/engines/test_engine_flags.py.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher.engines._settings import ENGINES, MODULES, EngineSettings

S = TypeVar("S", bound=EngineSettings)


@dataclasses.dataclass(frozen=True)
class Submission(Generic[S]):
    """A launch to run on an engine."""

    options: LaunchOptions
    program: UserProgram
    log_dir: Path | None
    settings: S


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A function that is to be called in the tasks, in place of a program.

    Args:
        timeout: seconds after which all tasks are killed; None for no limit.
    """

    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    timeout: float | None = None


class Engine(Protocol[S]):
    """A module of `_settings.MODULES`: what starts, restarts and ends the tasks elsewhere."""

    #: The fields of `LaunchOptions` with a meaning there, besides `ALWAYS_HONOURED`.
    HONOURED: frozenset[str]

    def render(self, submission: Submission[S]) -> str:
        """Return the complete file to submit, for `--print`; what cannot be submitted is an error.

        It reads nothing of the engine, so that it works on a machine without it.

        Raises:
            InvalidArgumentError: the submission cannot be right; the message names the flag.
        """

    def run(self, submission: Submission[S]) -> int:
        """Check what can be checked before anything starts, submit, and follow until the end.

        The terminal shows the state, the chief's output and last the root cause of a failure. Ctrl-C ends
        what was submitted.

        Returns:
            The exit code, with the meanings of `unisono launch` on this machine.

        Raises:
            InvalidArgumentError: the engine would refuse the submission, or is not there.
        """

    def call(self, submission: Submission[S], function: FunctionCall) -> list[Any]:
        """Call a function in the tasks; return the values of the chief and the workers.

        Raises:
            InvalidArgumentError: the engine cannot bring a function to its tasks.
            Exception: from the function in the task that failed first.
        """


#: The options that each engine must honour.
ALWAYS_HONOURED = frozenset({"workers", "ps", "chief", "evaluator", "max_restarts", "elastic", "grace"})


def find_engine(name: str) -> Engine[Any]:
    """Import an engine."""
    if name not in ENGINES:
        raise InvalidArgumentError(
            f"`--on` must be one of {', '.join(ENGINES)}. Received: {name!r}. Leave it out to run on this "
            "machine."
        )
    return cast(Engine[Any], importlib.import_module(MODULES[name]))


def check_honoured(options: LaunchOptions, honoured: frozenset[str], name: str) -> None:
    """Refuse what has no meaning on an engine.

    >>> check_honoured(LaunchOptions(workers=2, interface="eth0"), frozenset({"interface"}), "slurm")
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name not in ALWAYS_HONOURED | honoured:
            flag = "--" + field.name.replace("_", "-")
            raise InvalidArgumentError(
                f"`{flag}` is for a launch on this machine. Received: {value!r} with `--on {name}`. "
                f"Leave `{flag}` out."
            )


def launch_on(name: str, submission: Submission[Any], print_only: bool) -> tuple[str, int]:
    """Submit to an engine, and follow until the end."""
    engine = find_engine(name)
    check_honoured(submission.options, engine.HONOURED, name)
    if print_only:
        return engine.render(submission), 0
    return "", engine.run(submission)


def call_on(name: str, function: FunctionCall, given: Mapping[str, Any]) -> list[Any]:
    """Call a function in the tasks of an engine; return the values of the chief and the workers.

    Raises:
        InvalidTypeError: a name is no flag of this engine.
        InvalidArgumentError: a value cannot be used, or the engine cannot bring a function to its tasks.
        Exception: from the function in the task that failed first.
    """
    engine = find_engine(name)
    given = {each: value for each, value in given.items() if value is not None}
    general = {field.name for field in dataclasses.fields(LaunchOptions)}
    own = {field.name: field for field in dataclasses.fields(ENGINES[name])}
    names = (ALWAYS_HONOURED | engine.HONOURED) & general | own.keys() | {"log_dir"}
    if unknown := [each for each in given if each not in names]:
        raise InvalidTypeError(
            f"The options of a launch on {name} must be among {', '.join(sorted(names))}. Received: "
            f"{unknown[0]}={given[unknown[0]]!r}."
        )
    values: dict[str, Any] = {n: _plain_setting(given[n], own[n].default) for n in own if n in given}
    settings = ENGINES[name](**values)
    others = sum(int(given.get(job, 0)) for job in ("ps", "chief", "evaluator"))
    elastic = given.get("elastic")
    workers = elastic[1] if elastic else settings.default_workers(others)
    values = {"workers": workers} | {n: v for n, v in given.items() if n in general}
    options = LaunchOptions(**values)
    folder = Path(given["log_dir"]) if "log_dir" in given else None
    return engine.call(Submission(options, UserProgram(""), folder, settings), function)


def _plain_setting(value: Any, default: Any) -> Any:
    """Return a setting as its flag would give it: several texts are a tuple, also where there is one."""
    if default == ():
        return (value,) if isinstance(value, str) else tuple(value)
    return value
