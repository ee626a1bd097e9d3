"""The tasks of a generation and their environment."""

import json
import shlex
from pathlib import Path

import pytest

from unisono.cluster_resolver._base import TFConfigClusterResolver
from unisono.cluster_resolver._spec import Task
from unisono.launcher._launch import visible_gpus
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher._plan import (
    RunPaths,
    base_environment,
    make_plan,
    shell_lines,
    start_up_block,
    tasks_of,
)

PLACE = RunPaths(Path("/logs"))


def plan_of(generation=0, **arguments):
    options = LaunchOptions(**arguments)
    workers = options.worker_range[1]
    ports = range(2222, 2222 + len(tasks_of(options, workers)))
    return make_plan(options, generation, workers, list(ports), PLACE)


def test_every_task_knows_all_and_itself():
    plan = plan_of(workers=2, ps=1, chief=True, evaluator=True)
    assert [str(t) for t in plan.tasks] == ["chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"]
    for task in plan.tasks:
        resolver = TFConfigClusterResolver(environ=plan.environment(task))
        assert resolver.task == task
        assert resolver.cluster_spec() == {
            "chief": ["127.0.0.1:2222"],
            "worker": ["127.0.0.1:2223", "127.0.0.1:2224"],
            "ps": ["127.0.0.1:2225"],
        }


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [({"workers": 2}, "worker:0"), ({"workers": 2, "chief": True}, "chief:0"), ({"ps": 1}, "worker:0")],
)
def test_the_chief_is_shown(arguments, shown):
    assert str(plan_of(**arguments).shown) == shown


def test_tasks_with_servers_have_the_key_of_their_cluster():
    plans = [plan_of(generation=generation, workers=1, ps=1, chief=True) for generation in (0, 1)]
    files = {plan.environment(task)["UNISONO_CLUSTER_KEY_FILE"] for plan in plans for task in plan.tasks}
    assert files == {"/logs/cluster_key"}
    assert "UNISONO_CLUSTER_KEY_FILE" not in plan_of(workers=2).environment(Task("worker", 0))


def test_a_task_knows_its_generation_and_files():
    variables = plan_of(generation=3, workers=2, grace=5.0).environment(Task("worker", 1))
    assert variables["UNISONO_GENERATION"] == "3"
    assert variables["UNISONO_FENCE"] == "/logs/fence"
    assert variables["UNISONO_FINISHED"] == "/logs/finished"
    assert variables["UNISONO_PROGRESS"] == "/logs/progress/g3-worker-1"
    assert variables["UNISONO_GRACE"] == "5"
    assert "UNISONO_DEVICES_PER_WORKER" not in variables


def test_devices_are_for_those_that_compute():
    plan = plan_of(workers=1, ps=1, devices_per_worker=3)
    assert plan.environment(Task("worker", 0))["UNISONO_DEVICES_PER_WORKER"] == "3"
    assert "UNISONO_DEVICES_PER_WORKER" not in plan.environment(Task("ps", 0))


def test_the_interface_is_the_option_s_or_the_program_s():
    assert plan_of(workers=2, interface="eth1").environment(Task("worker", 1))["UNISONO_INTERFACE"] == "eth1"
    assert "UNISONO_INTERFACE" not in plan_of(workers=2).environment(Task("worker", 1))


def test_gpus_are_divided_among_those_that_compute(tmp_path):
    options = LaunchOptions(workers=2, ps=1)
    plan = make_plan(options, 0, 2, [1, 2, 3], PLACE, gpus=("4", "5", "6", "7"))
    shares = [plan.environment(task)["CUDA_VISIBLE_DEVICES"] for task in plan.tasks]
    assert shares == ["4,5", "6,7", ""]
    assert "worker:1  127.0.0.1:2  GPU 6,7" in start_up_block(plan, {}, UserProgram("t.py"))
    assert "CUDA_VISIBLE_DEVICES" not in plan_of(workers=2).environment(Task("worker", 0))


def test_tasks_that_share_a_gpu_leave_each_other_memory():
    def fraction(environ, gpus, **options):
        options = LaunchOptions(**options)
        tasks = options.workers + options.ps
        return base_environment(environ, options, tasks, 8, PLACE, gpus).get(name)

    name = "XLA_CLIENT_MEM_FRACTION"
    assert fraction({}, 4, workers=4) is None
    assert fraction({}, 2, workers=2, ps=2) is None
    assert fraction({}, 0, workers=2) is None
    assert fraction({}, 2, workers=3) == "0.38"
    assert fraction({name: "0.2"}, 1, workers=2) == "0.2"
    assert fraction({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}, 1, workers=2) is None
    assert fraction({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 1, workers=2) is None
    plan = make_plan(LaunchOptions(workers=2), 0, 2, [1, 2], PLACE, gpus=("0",))
    assert "workers share GPUs: MultiWorker" in start_up_block(plan, {}, UserProgram("t.py"))


def test_the_gpus_of_a_machine(tmp_path):
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("2", "10")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,0"}, tmp_path) == ("1", "0")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


def test_threads_for_the_devices_that_the_environment_asks_for():
    flags = {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=4"}
    for environ, pool in [
        (flags, "8"),
        ({"JAX_NUM_CPU_DEVICES": "3"}, "6"),
        (flags | {"PJRT_NPROC": "5"}, "5"),
    ]:
        assert base_environment(environ, LaunchOptions(workers=2), 2, 2, PLACE)["PJRT_NPROC"] == pool


@pytest.mark.parametrize(
    ("options", "tasks", "cores", "threads", "pool"),
    [
        (LaunchOptions(workers=2), 2, 8, "4", "4"),
        (LaunchOptions(workers=4), 4, 2, "1", "2"),
        (LaunchOptions(workers=2, devices_per_worker=4), 2, 2, "1", "8"),
        (LaunchOptions(workers=2, ps=1), 3, 2, "1", "1"),
        (LaunchOptions(workers=2, ps=1), 3, 8, "2", "2"),
        (LaunchOptions(workers=2, ps=1, devices_per_worker=2), 3, 2, "1", "4"),
    ],
)
def test_threads_are_divided(options, tasks, cores, threads, pool):
    base = base_environment({}, options, tasks, cores, PLACE)
    assert base["OMP_NUM_THREADS"] == base["OPENBLAS_NUM_THREADS"] == threads
    assert base["PJRT_NPROC"] == pool
    assert base["PYTHONUNBUFFERED"] == "1"
    tunables = base["GLIBC_TUNABLES"].split(":")
    assert tunables[0] == "glibc.malloc.hugetlb=1"
    # Whole models are allocated and copied at each step with parameter servers alone.
    names = {t.partition("=")[0].rpartition(".")[2] for t in tunables[1:]}
    large = {"x86_non_temporal_threshold", "mmap_threshold", "trim_threshold", "arena_max"}
    assert names == (large if options.ps else set())


def test_what_the_user_set_stays_and_other_clusters_do_not():
    environ = {
        "OMP_NUM_THREADS": "7",
        "TF_CONFIG": "x",
        "JAX_PROCESS_ID": "1",
        "UNISONO_GENERATION": "4",
        "UNISONO_CONVOLUTIONS": "xla",
        "JAX_COMPILATION_CACHE_DIR": "/mine",
    }
    base = base_environment(environ, LaunchOptions(workers=2, max_restarts=1), 2, 2, PLACE)
    assert base["OMP_NUM_THREADS"] == "7"
    assert base["JAX_COMPILATION_CACHE_DIR"] == "/mine"
    assert base["UNISONO_CONVOLUTIONS"] == "xla"
    assert not {"TF_CONFIG", "JAX_PROCESS_ID", "UNISONO_GENERATION"} & set(base)


def test_only_restarts_need_a_cache_of_compilations():
    assert "JAX_COMPILATION_CACHE_DIR" not in base_environment({}, LaunchOptions(workers=2), 2, 2, PLACE)
    base = base_environment({}, LaunchOptions(workers=2, max_restarts=1), 2, 2, PLACE)
    assert base["JAX_COMPILATION_CACHE_DIR"] == "/logs/compilation_cache"


def test_shell_lines_can_be_pasted():
    plan = plan_of(workers=2)
    base = {"OMP_NUM_THREADS": "1", "HOME": "/h"}
    text = shell_lines(plan, base, {"HOME": "/h"}, UserProgram("my train.py", ("--x", "a b")))
    blocks = text.split("\n\n")
    assert len(blocks) == 2
    for index, block in enumerate(blocks):
        lines = block.strip().split("\n")
        assert lines[0] == f"# worker:{index}"
        exports = dict(shlex.split(line)[1].split("=", 1) for line in lines[1:-1])
        assert json.loads(exports["TF_CONFIG"])["task"] == {"type": "worker", "index": index}
        assert exports["OMP_NUM_THREADS"] == "1"
        assert not {"HOME", "UNISONO_FENCE"} & set(exports)
        assert shlex.split(lines[-1]) == ["python", "my train.py", "--x", "a b"]


def test_the_start_up_block_says_what_runs_where():
    plan = plan_of(workers=2, ps=1, devices_per_worker=2, max_restarts=3)
    text = start_up_block(plan, {"OMP_NUM_THREADS": "4"}, UserProgram("train.py", ("--lr", "1")))
    assert text == (
        "unisono: 3 tasks run train.py --lr 1\n"
        "  worker:0  127.0.0.1:2222  2 virtual devices  worker-0.log  shown here\n"
        "  worker:1  127.0.0.1:2223  2 virtual devices  worker-1.log\n"
        "  ps:0      127.0.0.1:2224                     ps-0.log\n"
        "  threads per task: 4; logs and history: /logs\n"
        "  a task that fails starts again, the others go on: at most 3 restarts in 10 minutes, 1 warm spare"
    )
