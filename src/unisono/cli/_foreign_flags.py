"""Flags of other launchers: what is said of those that `unisono launch` names otherwise.

Tests: tests/unit/launcher/test_command_line.py.
"""

from __future__ import annotations

import itertools
import re

import typer
import typer.core

from unisono._errors import InvalidArgumentError

#: The flags by which torchrun, accelerate, horovodrun and mpirun are told how many processes there are.
_WORKERS = frozenset({
    "--nproc", "--nproc-per-node", "--nprocs", "--np", "-np", "--num-proc", "--num-processes", "--processes",
    "--num-workers", "--n-workers", "--nworkers", "--world-size",
})  # fmt: skip
_NODES = frozenset({
    "--nnodes", "--num-machines", "--node-rank", "--machine-rank", "--master-addr", "--master-port",
    "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--hosts",
})  # fmt: skip
_GPUS = frozenset({"--gpus", "--gpu", "--num-gpus", "--gpus-per-worker", "--gpu-ids"})


#: typer's own class of click's, or click's itself: which one depends on typer's version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class LaunchCommand(typer.core.TyperCommand):
    """The command `launch`, which knows the flags of other launchers."""

    # The class of a context is typer's own, or click's, as above.
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the command line; as typer's method does."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if (found := foreign_flag(error, given)) is not None:
                raise found from None
            raise


def foreign_flag(error: Exception, args: list[str]) -> InvalidArgumentError | None:
    """Return the error for a flag that has another name here; None where that is not what was wrong.

    Args:
        error: of the parser.
        args: that were given behind `launch`.
    """
    named = getattr(error, "option_name", "")
    for flag, value in itertools.pairwise([*args, ""]):
        name, _, own = flag.partition("=")
        plain = name.replace("_", "-").lower()
        is_wrong = name == named or (not named and plain == "-np")
        count = next((v for v in (own, value) if re.fullmatch("[0-9]{1,6}", v)), "2")
        if is_wrong and plain in _WORKERS:
            return _error("The number of workers is `-n`", name, f"`unisono launch -n {count} train.py`")
        if is_wrong and plain in _NODES:
            return _error(
                "`unisono launch` starts the tasks of one machine, and with an engine of several",
                name,
                "`unisono launch -n 2 train.py`; for several machines `--on slurm -N 2`, or `--cluster "
                "host1:2222,host2:2222` where `unisono serve` runs on each",
            )
        if is_wrong and plain in _GPUS:
            return _error(
                "The workers of a machine share its GPUs, or those in CUDA_VISIBLE_DEVICES",
                name,
                "`CUDA_VISIBLE_DEVICES=0,1 unisono launch -n 2 train.py` for one GPU each",
            )
        if not named and name in ("-n", "--workers") and re.fullmatch("[0-9]{1,6}", own or value) is None:
            return _error(
                "`-n` takes the number of workers", f"{name} {own or value}", "`unisono launch -n 2 train.py`"
            )
    return None


def _error(rule: str, received: str, write: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{rule}. Received: {received}. Write {write}.")
