"""`unisono launch --on`: engines, their flags, and what they refuse."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unisono
from unisono import InvalidArgumentError, InvalidTypeError
from unisono.cli._app import app
from unisono.cli._engine_flags import settings_of
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher.engines._engine import Submission, check_honoured, find_engine, launch_on
from unisono.launcher.engines._settings import ENGINES, SlurmSettings

NO_FLAGS = {field.name: None for settings in ENGINES.values() for field in dataclasses.fields(settings)}


def launch(*args):
    return CliRunner().invoke(app, ["launch", *args])


@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_is_a_module_with_the_functions_of_the_protocol(name):
    engine = find_engine(name)
    assert callable(engine.render)
    assert callable(engine.run)
    assert {field.name for field in dataclasses.fields(LaunchOptions)} > engine.HONOURED


@pytest.mark.parametrize("name", ENGINES)
def test_fields_have_the_defaults_of_flags_that_are_not_given(name):
    assert all(f.default in (None, False, ()) for f in dataclasses.fields(ENGINES[name]))


def test_flags_become_the_settings_of_the_engine():
    given = {**NO_FLAGS, "nodes": 2, "sbatch": ["--mem=8G", "--exclusive"]}
    assert settings_of("slurm", given) == SlurmSettings(nodes=2, sbatch=("--mem=8G", "--exclusive"))
    assert settings_of(None, NO_FLAGS) is None


def test_a_flag_needs_its_engine():
    with pytest.raises(InvalidArgumentError, match=r"`--nodes` belongs to `--on slurm`.*without `--on`"):
        settings_of(None, {**NO_FLAGS, "nodes": 0})


def test_an_unknown_engine():
    with pytest.raises(InvalidArgumentError, match=r"`--on` must be one of slurm.*'slrm'"):
        find_engine("slrm")


@pytest.mark.parametrize(("name", "value"), [("spares", 2), ("stall_timeout", 0.0), ("cool_down", 1.0)])
def test_what_an_engine_cannot_do_is_named(name, value):
    options = dataclasses.replace(LaunchOptions(), **{name: value})
    flag = "--" + name.replace("_", "-")
    submission = Submission(options, UserProgram(__file__), None, SlurmSettings())
    with pytest.raises(InvalidArgumentError, match=f"`{flag}` is for a launch on this machine"):
        launch_on("slurm", submission, print_only=True)
    check_honoured(options, frozenset({name}), "slurm")


def test_the_command_line_prints_what_would_be_submitted():
    done = launch(
        "--on", "slurm", "-N", "2", "--log-dir", "logs", "--print", __file__, "-N", "3", "--on", "x"
    )
    assert done.exit_code == 0, done.output
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks=2\n" in done.stdout
    assert f" {Path(__file__)} -N 3 --on x 2>" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--print"], "`--print` prints the file for an engine"),
        (["--on", "slurm", "--dry-run"], "Write `--print`"),
        (["--on", "slurm", "--cluster", "a:1"], "`--cluster` says which tasks there are"),
        (["--on", "ray", "--files", "data"], "belong to `--cluster`"),
        (["-n", "2", "--lease", "5"], "belong to `--cluster`"),
    ],
)
def test_flags_that_contradict_each_other(args, message):
    done = launch(*args, __file__)
    assert isinstance(done.exception, InvalidArgumentError)
    assert message in str(done.exception)


def launched(name, **options):
    """What `unisono.launch(on=...)` gives an engine."""
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find_engine(name), "call", lambda submission, function: given.append(submission))
        unisono.launch(print, on=name, **options)
    return given[0]


def test_options_of_a_function_are_the_flags_of_the_engine():
    found = launched("slurm", nodes=2, ntasks_per_node=2, ps=1, sbatch="--mem=8G", devices_per_worker=3)
    assert found.settings == SlurmSettings(nodes=2, ntasks_per_node=2, sbatch=("--mem=8G",))
    assert found.options == LaunchOptions(workers=3, ps=1, devices_per_worker=3)
    found = launched("ray", elastic=(1, 3))
    assert found.options == LaunchOptions(workers=3, elastic=(1, 3))
    assert launched("mpi", workers=4, log_dir="logs").log_dir == Path("logs")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"on": "slurm", "node": 2}, "The options of a launch on slurm must be among .*nodes.*: node=2"),
        ({"on": "mpi", "stall_timeout": 3.0}, "The options of a launch on mpi must be among"),
        ({"on": "slurm", "array": "0-3"}, "A function must be called in one job"),
        ({"on": "slurm", "timeout": 3.0}, 'Received: timeout=3.0. Write `time="0:10:00"`'),
        ({"on": "kubernetes", "image": "i"}, "Kubernetes must find a program in the image"),
        ({"on": "slurm", "cluster": {"worker": ["a:1"]}}, "The processes must run in one place"),
        ({"on": "here"}, "`--on` must be one of slurm"),
        ({"nodes": 2}, "These options need `cluster` or `on`"),
    ],
)
def test_what_a_function_cannot_be_launched_with(options, match):
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match=match):
        unisono.launch(print, **options)


def test_the_help_names_the_engine_of_a_flag():
    assert "With --on slurm: The partition." in " ".join(launch("--help").stdout.split())
