"""`unisono run`: which task a process is, and what it gets."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from unisono import InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher.engines import _engine_task
from unisono.launcher.engines._engine_task import place, run_command, task_job, task_plan

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
}
ADDRESSES, RANK = place(SLURM)
PROGRAM = UserProgram("train.py")
LOGS = Path("logs").absolute()


def environ_of(task, options, **variables):
    plan = task_plan(options, ADDRESSES, {**SLURM, **variables}, LOGS)
    return task_job(plan, task, PROGRAM, {**SLURM, **variables})["environ"]


def test_jobs_have_ports_of_their_own():
    assert ADDRESSES == ["n1:10448", "n1:10449", "n2:10448", "n2:10449"]
    assert RANK == 2
    others = {place({**SLURM, "SLURM_JOB_ID": str(job)})[0][0] for job in range(340)}
    assert len(others) == 340
    assert max(int(address.partition(":")[2]) + 64 for address in others) < 32768


def test_a_step_of_one_task_is_a_cluster():
    one = {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert place({**SLURM, **one, "SLURM_STEP_NODELIST": "n1"}) == (["n1:10448"], 0)


def test_mpi_with_hosts():
    ranks = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "1@1"}
    addresses, rank = place(ranks, "a,b")
    assert ([address[0] for address in addresses], rank) == (["a", "b"], 1)


def test_outside_of_an_engine():
    with pytest.raises(InvalidArgumentError, match=r"`unisono run` must be started by `srun`"):
        place({"SLURM_JOB_ID": "7"})


def test_the_number_of_a_task_says_its_job():
    options = LaunchOptions(ps=1, chief=True, evaluator=True)
    tasks = task_plan(options, ADDRESSES, SLURM, None).tasks
    assert tasks == (Task("chief", 0), Task("worker", 0), Task("ps", 0), Task("evaluator", 0))


def test_too_few_tasks():
    with pytest.raises(InvalidArgumentError, match=r"chief:0, worker:0, ps:0, ps:1, ps:2, ps:3.*4 tasks"):
        task_plan(LaunchOptions(ps=4, chief=True), ADDRESSES, SLURM, None)


def test_a_task_has_what_the_launcher_gives_but_for_a_supervisor():
    environ = environ_of(Task("worker", 0), LaunchOptions(interface="eth0"), UNISONO_GENERATION="3")
    assert environ["UNISONO_GENERATION"] == "3"
    assert environ["UNISONO_FENCE"] == str(LOGS / "fence")
    assert environ["UNISONO_INTERFACE"] == "eth0"
    assert not {"UNISONO_EVENTS", "UNISONO_FINISHED", "UNISONO_PROGRESS", "UNISONO_LAUNCH"} & set(environ)


def test_a_key_that_is_given_by_hand_is_kept():
    environ = environ_of(Task("ps", 0), LaunchOptions(ps=1), UNISONO_CLUSTER_KEY="ab")
    assert environ["UNISONO_CLUSTER_KEY"] == "ab"
    assert "UNISONO_CLUSTER_KEY_FILE" not in environ


@pytest.mark.parametrize(
    ("task", "visible", "of_node", "expected"),
    [
        (Task("worker", 1), "0,1,2,3", "4", "2,3"),
        (Task("worker", 2), "0,1,2,3", "4", "0,1,2,3"),  # a parameter server has no GPU
        (Task("ps", 0), "0,1,2,3", "4", ""),
        (Task("worker", 1), "3", "4", None),  # Slurm has given it one
        (Task("worker", 1), None, "gpu:4", "2,3"),  # Slurm says how many, and sets no variable of CUDA
    ],
)
def test_the_gpus_of_a_node_are_divided(task, visible, of_node, expected):
    given = {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}
    given["SLURM_GPUS_ON_NODE"] = of_node
    environ = environ_of(task, LaunchOptions(ps=1), **given)
    assert environ.get("CUDA_VISIBLE_DEVICES") == expected


@pytest.mark.parametrize(("own", "engine", "cores"), [(8, 8, 8), (2, 8, 8)])
def test_cores_that_an_engine_has_bound_are_the_tasks_own(monkeypatch, own, engine, cores):
    monkeypatch.setattr(_engine_task, "cores", lambda: own)
    monkeypatch.setattr(_engine_task.os, "sched_getaffinity", lambda pid: set(range(engine)))
    assert _engine_task._cores_of(4) == cores


def test_the_command_of_a_task():
    options = LaunchOptions(workers=2, ps=1, chief=True, devices_per_worker=2, grace=5)
    command = run_command(options, '"$logs"', UserProgram("pkg.train", ("a b",), is_module=True))
    assert find_spec("unisono.__main__"), "`python -m unisono` must work"
    assert command.endswith(
        " -m unisono run --chief --ps=1 --max-restarts=10 --grace=5 --devices-per-worker=2 "
        """--log-dir="$logs" -m pkg.train 'a b'"""
    )
