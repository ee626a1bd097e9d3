"""`unisono launch --on ray`: its settings, and the script that it prints."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher.engines._engine import FunctionCall, Submission
from unisono.launcher.engines._settings import RaySettings
from unisono.ray import _engine

pytest.importorskip("ray", reason="the extra `ray` is not installed")

PROGRAM = UserProgram(__file__, ("--lr", "a b"))


def submission(options=None, log_dir=None, **settings):
    return Submission(options or LaunchOptions(), PROGRAM, log_dir, RaySettings(**settings))


def test_the_script_runs_the_same_launch_as_a_job_of_ray(monkeypatch):
    with pytest.raises(InvalidArgumentError, match=rf"below the current directory.*{re.escape(__file__)}"):
        _engine.render(submission())
    monkeypatch.chdir(Path(__file__).parent)
    options = LaunchOptions(workers=4, chief=True, elastic=(2, 4), max_restarts=0)
    settings = {"address": "10.0.0.1:6379", "resource": ("CPU=4", "GPU=1"), "placement": "SPREAD"}
    given = dataclasses.replace(
        submission(options, Path("my logs"), **settings),
        program=UserProgram("test_ray_engine.py", PROGRAM.args),
    )
    text = _engine.render(given)
    command = shlex.split(text.splitlines()[-1])
    assert command == [
        *("exec", "ray", "job", "submit", "--working-dir", ".", "--"),
        *("python", "-m", "unisono", "launch", "--on", "ray"),
        *("--workers=4", "--chief", "--max-restarts=0", "--elastic=2:4"),
        *("--resource=CPU=4", "--resource=GPU=1", "--placement=SPREAD", "--log-dir=my logs"),
        *("test_ray_engine.py", "--lr", "a b"),
    ]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"resource": ("CPU",)}, "`--resource` must be a resource of Ray and an amount above 0.*'CPU'"),
        ({"resource": ("CPU=2", "GPU=-1")}, "an amount above 0.*'GPU=-1'"),
        ({"placement": "near"}, "`placement` must be one of PACK"),
        ({"runtime_env_json": "{"}, "`--runtime-env-json` must be an object in JSON"),
        ({"runtime_env_json": "[]"}, "`--runtime-env-json` must be an object in JSON"),
        ({"runtime_env_json": '{"env_var": {}}'}, "Received: 'env_var'. Write 'env_vars'"),
        (
            {"runtime_env_json": '{"env_vars": {"A": 1}}'},
            "`runtime_env` must be as Ray describes it.*env_vars",
        ),
    ],
)
def test_what_cannot_be_used_is_an_error_before_ray_starts(settings, match):
    with pytest.raises(InvalidArgumentError, match=match):
        _engine.run(submission(**settings))


@pytest.mark.parametrize("address", ["here", "ray://127.0.0.1:9", "127.0.0.1:9"])
def test_without_a_cluster_there_is_an_error_at_once(address):
    with pytest.raises(ClusterError, match="A cluster of Ray must run at the address"):
        _engine.run(submission(address=address))


def test_parameter_servers_get_no_accelerators():
    reservation = _engine._reservation(LaunchOptions(ps=1), RaySettings(resource=("GPU=1", "CPU=3")))
    assert (reservation.worker, reservation.ps) == ({"GPU": 1, "CPU": 3}, {"CPU": 3})


def test_variables_of_the_shell_travel_but_for_those_of_this_machine(monkeypatch):
    travel = {"KERAS_BACKEND": "jax", "XLA_FLAGS": "--a", "AWS_REGION": "eu", "UNISONO_PORTS": "1-9"}
    stay = [
        "PATH",
        "HOME",
        "LD_PRELOAD",
        "SSH_AUTH_SOCK",
        "TF_CONFIG",
        "UNISONO_CLUSTER_KEY",
        "UNISONO_LAUNCH",
    ]
    stay += ["SLURM_JOB_ID", "PMIX_RANK", "RAY_ADDRESS", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES", "GIVEN"]
    environ = travel | dict.fromkeys(stay, "here")
    monkeypatch.setattr(_engine, "process_environ", lambda: environ)
    settings = RaySettings(runtime_env_json='{"env_vars": {"GIVEN": "there"}}')
    reservation = _engine._reservation(LaunchOptions(), settings)
    assert reservation.variables == travel
    # Messages do not show values.
    assert "AWS_REGION" not in repr(reservation)


def test_a_function_has_no_log_directory():
    with pytest.raises(InvalidArgumentError, match="`log_dir` is for engines whose nodes share a folder"):
        _engine.call(submission(log_dir=Path("logs")), FunctionCall(print))
