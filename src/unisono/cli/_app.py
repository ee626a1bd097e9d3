"""The command line: flags, and what they call. Imports nothing slow before it must.

Tests: tests/cluster/test_launch.py, tests/cluster/test_launch_doctor.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono.cli._engine_flags import add_engine_flags, settings_of
from unisono.cli._foreign_flags import LaunchCommand
from unisono.cli._page_flags import WatchKey, Web, WebAddress, page_address, say
from unisono.launcher._options import LaunchOptions, UserProgram, parse_elastic, parse_spares
from unisono.launcher.engines._engine import Submission, launch_on
from unisono.launcher.engines._settings import ENGINES

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Distributed training with Keras 3 on JAX.",
)

#: Flags after the script belong to the script.
_LAUNCH_SETTINGS = {"allow_interspersed_args": False}

#: By default: of `--wait`, `--lease` and `--server-timeout`.
_CLUSTER_LIMITS = (0.0, 10.0, 300.0)


def _examples(*lines: str) -> str:
    r"""Return the end of a command's help; click breaks no line of a paragraph that begins with `\b`."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


#: The exit code for a command line that cannot be used: typer and click use the same.
_USAGE_ERROR = 2


# What `launch` and `run` have in common.
_Script = Annotated[str, typer.Argument(help="The script to run; with -m, the module.")]
_ScriptArguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
_IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for `python -m`.")]
_Devices = Annotated[int | None, typer.Option(help="Number of virtual CPU devices of each task.")]
_Grace = Annotated[float, typer.Option(help="Seconds between SIGTERM and SIGKILL.")]
_Interface = Annotated[
    str | None, typer.Option(help="Over which workers on CPUs connect: eth0, 10.0.0.0/24 or an IP address.")
]


@app.command(
    cls=LaunchCommand,
    context_settings=_LAUNCH_SETTINGS,
    no_args_is_help=True,
    epilog=_examples(
        "unisono launch -n 2 train.py --epochs 3",
        "unisono launch -n 4 --max-restarts 3 train.py",
        "unisono launch -n 2 --ps 1 --chief train.py",
        "unisono launch --elastic 2:4 -m package.train",
        "unisono launch -n 2 --web train.py",
        "unisono launch --on slurm -N 2 --gpus-per-node 4 --print train.py",
        "unisono launch --cluster host1:2222,host2:2222 train.py",
    ),
)
@add_engine_flags
def launch(
    script: _Script,
    args: _ScriptArguments = None,
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", help="Number of tasks of the job 'worker'.")
    ] = None,
    ps: Annotated[int, typer.Option(help="Number of tasks of the job 'ps'.")] = 0,
    chief: Annotated[bool, typer.Option("--chief", help="Add a chief.")] = False,
    evaluator: Annotated[bool, typer.Option("--evaluator", help="Add an evaluator.")] = False,
    module: _IsModule = False,
    devices_per_worker: _Devices = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            help="Restarts that failures may cause within 10 minutes: of all tasks, with --ps of the one "
            "that failed. [default: 0; with --ps or --elastic 10]"
        ),
    ] = None,
    spares: Annotated[
        str,
        typer.Option(
            help="Number of standby processes with JAX and Keras imported; 'auto': one per task if restarts "
            "are allowed, with --ps and --max-restarts one."
        ),
    ] = "auto",
    elastic: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Continue with fewer workers after failures, and grow again."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Directory for logs and history. [default: a new temporary one]")
    ] = None,
    grace: _Grace = 30.0,
    stall_timeout: Annotated[
        float,
        typer.Option(help="Seconds without a step after which a task has failed; 0 disables the limit."),
    ] = 300.0,
    cool_down: Annotated[
        float, typer.Option(help="Seconds that a generation runs before an elastic launch resizes.")
    ] = 60.0,
    interface: _Interface = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="[JOB=]HOST:PORT,…",
            help="Run on these servers (`unisono serve`), in place of -n, --ps and so on.",
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(help="With --cluster: a file or folder that travels with the script; may be repeated."),
    ] = None,
    wait: Annotated[
        float, typer.Option(help="With --cluster: seconds for servers that train for another client.")
    ] = _CLUSTER_LIMITS[0],
    lease: Annotated[
        float,
        typer.Option(help="With --cluster: seconds without this client after which the training ends."),
    ] = _CLUSTER_LIMITS[1],
    server_timeout: Annotated[
        float, typer.Option(help="With --cluster: seconds to wait for a server that was lost.")
    ] = _CLUSTER_LIMITS[2],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the environment of each task and exit.")
    ] = False,
    web: Web = False,
    web_address: WebAddress = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help=f"Submit to an engine, and follow: {', '.join(ENGINES)}."),
    ] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="With --on: print the file to submit and exit.")
    ] = False,
    **flags: Any,
) -> None:
    """Run a script as a cluster of processes, here or elsewhere. Each gets its TF_CONFIG."""
    from unisono.launcher import _launch

    if workers is None and not ps and elastic is None and cluster is None:
        _warn_of_flags_behind(script, args or [])
    size = None if elastic is None else parse_elastic(elastic)
    what = UserProgram(script, tuple(args or ()), module)
    settings = settings_of(on, flags, print_only, dry_run)
    everywhere: dict[str, Any] = {
        "devices_per_worker": devices_per_worker, "max_restarts": max_restarts, "elastic": size,
        "grace": grace, "stall_timeout": stall_timeout, "cool_down": cool_down, "interface": interface,
    }  # fmt: skip
    page = page_address(web, web_address, bool(cluster or on or dry_run))
    if cluster is None:
        _reject_flags_of_cluster(bool(files), (wait, lease, server_timeout))
    if cluster is not None:
        if workers is not None or ps or chief or evaluator or dry_run or on:
            raise InvalidArgumentError(
                "`--cluster` says which tasks there are. Received: -n, --ps, --chief, --evaluator, --on or "
                "--dry-run. Write `--cluster host1:2222,ps=host2:2222`."
            )
        from unisono.standalone import _client
        from unisono.standalone._slots import parse_cluster

        code = _client.run_program_on_cluster(
            parse_cluster(cluster),
            what,
            _client.ClusterRun(wait, lease, server_timeout),
            log_dir,
            files or (),
            **everywhere,
        )
        raise typer.Exit(code)
    if workers is None:
        others = ps + chief + evaluator
        workers = size[1] if size else 1 if settings is None else settings.default_workers(others)
    options = LaunchOptions(
        workers=workers,
        ps=ps,
        chief=chief,
        evaluator=evaluator,
        spares=parse_spares(spares),
        **everywhere,
    )
    if on is not None:
        text, code = launch_on(on, Submission(options, what, log_dir, settings), print_only)
        typer.echo(text, nl=False)
        raise typer.Exit(code)
    if dry_run:
        typer.echo(_launch.dry_run(options, what, log_dir), nl=False)
        return
    if page is not None:
        from unisono.watch.web._job_page import launch_with_page

        raise typer.Exit(launch_with_page(options, what, log_dir, page, say))
    raise typer.Exit(_launch.run_program(options, what, log_dir))


@app.command(
    context_settings=_LAUNCH_SETTINGS,
    no_args_is_help=True,
    epilog=_examples(
        "mpirun -n 4 unisono run train.py",
        "srun unisono run --ps 1 --chief train.py",
    ),
)
def run(
    script: _Script,
    args: _ScriptArguments = None,
    ps: Annotated[int, typer.Option(help="How many of the tasks are parameter servers.")] = 0,
    chief: Annotated[bool, typer.Option("--chief", help="Task 0 is the chief.")] = False,
    evaluator: Annotated[bool, typer.Option("--evaluator", help="The last task is the evaluator.")] = False,
    module: _IsModule = False,
    call: Annotated[bool, typer.Option("--call", hidden=True)] = False,
    devices_per_worker: _Devices = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="Restarts by the engine; 0 keeps no cache.")
    ] = None,
    grace: _Grace = 30.0,
    interface: _Interface = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Directory for a log of each task. [default: the terminal]")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="Hosts of MPI's ranks: n1,n1,n2,n2. [default: asked through mpi4py]"),
    ] = None,
) -> None:
    """Run a script as a task that `srun` or `mpirun` starts. Such as `mpirun -n 4 unisono run train.py`."""
    from unisono.launcher.engines import _engine_task

    options = LaunchOptions(
        ps=ps,
        chief=chief,
        evaluator=evaluator,
        devices_per_worker=devices_per_worker,
        max_restarts=max_restarts,
        grace=grace,
        interface=interface,
    )
    _engine_task.run_task(options, UserProgram(script, tuple(args or ()), module, call), log_dir, hosts)


def _reject_flags_of_cluster(has_files: bool, limits: tuple[float, float, float]) -> None:
    if has_files or limits != _CLUSTER_LIMITS:
        raise InvalidArgumentError(
            "--files, --wait, --lease and --server-timeout belong to `--cluster`. Received: one of them "
            "without it. Leave it out, or write `--cluster host1:2222,host2:2222`."
        )


def _warn_of_flags_behind(script: str, args: list[str]) -> None:
    """Warn of flags of `launch` that stand behind the script, which receives them."""
    flags = [a for a in args if a in ("-n", "--workers", "--ps", "--chief", "--evaluator", "--elastic")]
    if flags:
        typer.echo(
            f"unisono: flags after the script belong to the script: {script} receives {flags[0]}, and one "
            f"worker runs. Write `unisono launch {flags[0]} … {script}` to start a cluster.",
            err=True,
        )


@app.command(
    epilog=_examples(
        "unisono serve",
        "unisono serve --port 2222 --key-file cluster_key",
    )
)
def serve(
    address: Annotated[
        str,
        typer.Option(help="HOST:PORT to listen at. Other machines need a key; without one: loopback."),
    ] = "localhost:2222",
    port: Annotated[
        int | None, typer.Option(help="In place of --address: all interfaces with a key, else loopback.")
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File of mode 0600 with the cluster's key. [default: UNISONO_CLUSTER_KEY_FILE]"),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory for the files of jobs. [default: a temporary one]")
    ] = None,
    spares: Annotated[
        int, typer.Option(help="Number of standby processes with JAX and Keras imported.", min=0)
    ] = 1,
) -> None:
    """Train for clients of `unisono launch --cluster`, one at a time. Also `unisono.launch(cluster=…)`."""
    from unisono.standalone._server import serve

    raise typer.Exit(serve(address, port, key_file, directory, spares))


@app.command(
    epilog=_examples(
        "unisono doctor",
        "unisono doctor --dir /shared/backups --json",
        "unisono doctor -n 2 --model 400",
        "unisono doctor --hosts node1,node2",
    )
)
def doctor(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory for the file system check. [default: a temporary one]"),
    ] = None,
    machine: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    workers: Annotated[
        int | None,
        typer.Option("-n", "--workers", help="Measure all-reduces between so many processes here."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT],…", help="Measure them between hosts that run `unisono serve` (port 2222)."
        ),
    ] = None,
    model: Annotated[
        float, typer.Option(help="With -n and --hosts: megabytes of the weights of a model.")
    ] = 100.0,
) -> None:
    """Print what is installed and whether it works. To be pasted into an issue; or measure links."""
    import tempfile

    from unisono.cli import _doctor

    if workers is not None and hosts is not None:
        raise InvalidArgumentError("Links are of one kind. Received: -n and --hosts. Leave one out.")
    given = hosts.split(",") if hosts else []
    folder = directory or Path(tempfile.gettempdir())
    raise typer.Exit(_doctor.main(folder, machine, workers, given, model))


@app.command(epilog=_examples("unisono launch -n 2 --log-dir logs train.py", "unisono timeline logs"))
def timeline(
    log_dir: Annotated[Path, typer.Argument(help="The log directory of a launch, which may still run.")],
) -> None:
    """Write a page of a launch: what each task did, and when. Also a trace for Perfetto."""
    from unisono.cli import _timeline_page

    typer.echo(_timeline_page.main(log_dir))


@app.command(
    epilog=_examples(
        "unisono watch",
        "unisono watch logs",
        "unisono watch --once logs",
        "unisono watch --web logs",
        "unisono watch --key watch.key host1:2222",
        "unisono watch --metrics 9100 logs",
    )
)
def watch(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[LOGDIR | HOST:PORT,… | JOB]",
            help="A log directory, workers or servers, a job's name, k8s:NAME. [default: newest directory]",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once, as without a terminal.")] = False,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve its numbers to Prometheus, by default on loopback."),
    ] = None,
    web: Web = False,
    web_address: WebAddress = None,
    key: WatchKey = None,
) -> None:
    """Show a running job: speed, loss, memory, faults, time left."""
    from unisono.watch import _places, _terminal

    source = _places.find_job(job, key)
    if (page := page_address(web, web_address)) is not None:
        from unisono.watch.web._job_page import watch_on_page

        watch_on_page(source, page, say)
    elif metrics is not None:
        from unisono.watch import _prometheus

        _prometheus.serve_metrics(source, metrics, typer.echo)
    else:
        _terminal.watch(source, once)


@app.command(
    no_args_is_help=True,
    epilog=_examples(
        "unisono plan model.py --devices 8 --link 10gbit",
        "unisono plan model.py:make_large --devices 64 --batch 8 --memory 80gb --step-ms 120",
        "unisono plan model.py --devices 8 --devices-per-replica 4 --state-layout sharded",
    ),
)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:FUNCTION]",
            help="A Python file whose function `make_model` returns a compiled model. A function "
            "`make_batch(rows)` there returns `(x, y)`, if it does not follow from the model.",
        ),
    ],
    devices: Annotated[int, typer.Option(help="How many devices train together.")] = 8,
    batch: Annotated[int, typer.Option(help="Rows of each device in a step.")] = 32,
    ps: Annotated[int, typer.Option(help="Number of parameter servers; 0 leaves them out.")] = 1,
    link: Annotated[
        str, typer.Option(help="The rate of a device's link, in each direction: 100mbit, 10gbit, 1.6tbit.")
    ] = "10gbit",
    memory: Annotated[str | None, typer.Option(help="Memory of a device, such as 80gb: what fits.")] = None,
    step_ms: Annotated[
        float | None, typer.Option(help="Milliseconds of a step of one device. [default: measured here]")
    ] = None,
    device_kind: Annotated[
        str | None, typer.Option(help="Kind of the devices, such as 'NVIDIA H200': their peak, and MFU.")
    ] = None,
    devices_per_replica: Annotated[int, typer.Option(help="From 2 on: how they share each weight.")] = 1,
    layout: Annotated[str, typer.Option(help="auto, auto:3 (and 3 others), or a name in FILE.")] = "auto",
    state_layout: Annotated[str, typer.Option(help="With `--devices-per-replica`.")] = "mirrored",
) -> None:
    """Print the memory and the exchanges of each way to train a model."""
    from unisono.cli import _model_plan, _replica_plan

    room = None if memory is None else _model_plan.parse_memory(memory)
    if devices_per_replica != 1:
        given: Any = model, devices, devices_per_replica, batch, layout, room, state_layout
        typer.echo(_replica_plan.main(_replica_plan.ReplicaPlanOptions(*given)))
        return
    rate = _model_plan.parse_rate(link)
    seconds = None if step_ms is None else step_ms / 1e3
    options = _model_plan.PlanOptions(model, devices, batch, ps, rate, room, seconds, device_kind)
    typer.echo(_model_plan.main(options))


@app.command(
    no_args_is_help=True,
    epilog=_examples("unisono explain model.py", "unisono explain model.py:make_large --devices 8"),
)
def explain(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:FUNCTION]",
            help="A Python file whose function `make_model` returns a compiled model. A function "
            "`make_batch(rows)` there returns `(x, y)`, if it does not follow from the model.",
        ),
    ],
    devices: Annotated[int, typer.Option(help="How many replicas train together.")] = 2,
) -> None:
    """Print how each part of a model runs on several replicas. Also what differs from one device."""
    from unisono.cli import _model_plan

    typer.echo(_model_plan.explain(model, devices))


@app.command(epilog=_examples("unisono migrate train.py models/", "unisono migrate --json models/"))
def migrate(
    programs: Annotated[
        list[Path], typer.Argument(help="Programs that were written for TensorFlow, and folders of them.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list with an object for each program.")
    ] = False,
) -> None:
    """Print which lines of TensorFlow programs must change. Each with its reason."""
    from unisono.tf import _migrate

    examined = _migrate.examine(programs)
    typer.echo(_migrate.as_json(examined) if as_json else _migrate.as_text(examined))
    raise typer.Exit(1 if any(program.errors for program in examined) else 0)


@app.callback(invoke_without_command=True)
def unisono(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Distributed training with Keras 3 on JAX."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(installed("unisono"))
        raise typer.Exit(0)


def main() -> None:
    """Run the command line; print a user's error as one line on standard error."""
    try:
        app()
    except UnisonoError as error:
        from unisono.launcher.terminal._printable import as_message

        # It may hold what a task has printed.
        print(f"unisono: {as_message(str(error))}", file=sys.stderr)
        sys.exit(_USAGE_ERROR)
