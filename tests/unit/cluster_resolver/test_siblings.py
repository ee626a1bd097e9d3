"""What shows that a process without a cluster is one of several."""

import logging

import pytest

import unisono
from unisono.cluster._lone_task import find_siblings, find_tasks


@pytest.mark.parametrize(
    ("environ", "sign", "remedy"),
    [
        ({"SLURM_NTASKS": "2"}, "SLURM_NTASKS=2", "srun"),
        # A batch script of `sbatch -N 2`: only `-n` sets the number of tasks.
        ({"SLURM_NNODES": "2", "SLURM_PROCID": "0"}, "SLURM_NNODES=2", "srun"),
        ({"WORLD_SIZE": "4", "RANK": "1"}, "WORLD_SIZE=4", "JAX_PROCESS_ID=$RANK"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2", "mpirun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2", "mpirun"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES=2", "JAX_COORDINATOR_ADDRESS"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
            "JOB_COMPLETION_INDEX=0, which Kubernetes sets",
            "JAX_COORDINATOR_ADDRESS",
        ),
    ],
)
def test_the_variables_of_launchers(environ, sign, remedy):
    found = find_siblings(environ)
    assert found[0].startswith(sign)
    assert remedy in found[1]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "many"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-7d4b9"},
        {"JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_one_process_alone(environ):
    assert find_siblings(environ) is None


def test_the_strategy_says_that_it_is_alone(monkeypatch, caplog):
    for name in ("SLURM_NTASKS", "SLURM_NNODES", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.INFO, "unisono")
    unisono.MultiWorkerMirroredStrategy()
    monkeypatch.setenv("WORLD_SIZE", "2")
    unisono.MultiWorkerMirroredStrategy()
    plain, warning = [r for r in caplog.records if "has found no other worker" in r.message]
    assert (plain.levelname, warning.levelname) == ("INFO", "WARNING")
    assert "\n" not in plain.message
    assert "WORLD_SIZE=2: each of these processes would train a model of its own. Set JAX_" in warning.message


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "8"}, ("SLURM_STEP_NUM_TASKS=8", 8)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, ("OMPI_COMM_WORLD_SIZE=2", 2)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, ("WORLD_SIZE=4", 4)),
        ({"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"}, ("JAX_NUM_PROCESSES=2", 2)),
        # A batch script, and an interactive shell of one task.
        ({"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}, None),
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, None),
        # A job of an array, each of one task.
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1"}, None),
        # `mpirun -n 1` in a job of two nodes: its daemons are a step of two tasks.
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "SLURM_STEP_NODELIST": "n", "SLURM_STEP_NUM_TASKS": "2"}, None),
        ({"WORLD_SIZE": "4"}, None),
        ({}, None),
    ],
)
def test_one_of_several_tasks(environ, found):
    assert find_tasks(environ) == found
