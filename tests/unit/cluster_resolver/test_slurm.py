"""The cluster of a Slurm job step, and each task's GPUs."""

import pytest

from unisono import InvalidArgumentError
from unisono.cluster_resolver import ClusterSpec, SlurmClusterResolver
from unisono.cluster_resolver._slurm import gpu_share, read_slurm


def step(rank=0, nodes="n[1-2]", tasks="2(x2)", count=4, **more):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NUM_TASKS": str(count),
        **{f"SLURM_{key}": str(value) for key, value in more.items()},
    }


@pytest.mark.parametrize(
    ("environ", "where", "addresses"),
    [
        (step(0), (0, 0), ["n1:8", "n1:9", "n2:8", "n2:9"]),
        (step(3), (1, 1), ["n1:8", "n1:9", "n2:8", "n2:9"]),
        (step(2, "n[9-10],m1", "1,2,1"), (1, 1), ["n9:8", "n10:8", "n10:9", "m1:8"]),
        (step(0, "one", "1", 1), (0, 0), ["one:8"]),
        (step(2, NODEID=1, LOCALID=0), (1, 0), ["n1:8", "n1:9", "n2:8", "n2:9"]),
    ],
)
def test_where_tasks_run(environ, where, addresses):
    found = read_slurm(environ)
    assert (found.node, found.local_rank) == where
    assert found.addresses(8) == addresses


def test_the_variables_of_the_job_serve_too():
    job = {
        "SLURM_PROCID": "1",
        "SLURM_JOB_NODELIST": "a,b",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_NTASKS": "2",
    }
    assert SlurmClusterResolver(environ=job).master() == "grpc://b:8888"


@pytest.mark.parametrize("tasks_per_node", [2, {"n1": 2, "n2": 2}])
def test_tasks_per_node_are_given(tasks_per_node):
    environ = step(3)
    del environ["SLURM_STEP_TASKS_PER_NODE"]
    resolver = SlurmClusterResolver(tasks_per_node=tasks_per_node, environ=environ)
    assert resolver.master() == "grpc://n2:8889"


def test_jobs_in_the_order_of_the_tasks():
    resolver = SlurmClusterResolver({"ps": 1, "worker": 3}, port_base=100, rpc_layer=None, environ=step(2))
    assert resolver.cluster_spec() == ClusterSpec(
        {"ps": ["n1:100"], "worker": ["n1:101", "n2:100", "n2:101"]}
    )
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "n2:100"
    assert (resolver.coordinator_address, resolver.num_processes, resolver.process_id) == ("n1:101", 3, 1)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({}, r"in SLURM_PROCID. Received: the Slurm variables \[\].*srun"),
        ({"SLURM_PROCID": "0"}, r"in SLURM_STEP_NODELIST. Received: the Slurm variables \['SLURM_PROCID'\]"),
        (step("x"), "SLURM_PROCID must be an integer from 0. Received: 'x'"),
        (step(4), "Received: 4 tasks, .* SLURM_PROCID=4"),
        (step(count=5), r"Received: 5 tasks, nodes \['n1', 'n2'\], tasks per node \[2, 2\]"),
        (step(tasks="2(x3)"), r"tasks per node \[2, 2, 2\]"),
        (step(nodes="n["), "host list must"),
        (step(tasks="?"), "Tasks per node must"),
        (step(1, NODEID=1, LOCALID=0), "in blocks. Received: SLURM_PROCID=1 with SLURM_NODEID=1.*=block"),
    ],
)
def test_wrong_variables(environ, problem):
    with pytest.raises(InvalidArgumentError, match=problem):
        SlurmClusterResolver(environ=environ)


@pytest.mark.parametrize("jobs", [{"worker": 3}, {}, {"worker": 5, "ps": -1}])
def test_jobs_have_all_tasks(jobs):
    with pytest.raises(
        InvalidArgumentError, match=r"as many tasks as the step. Received: jobs=.* for 4 tasks"
    ):
        SlurmClusterResolver(jobs, environ=step())


@pytest.mark.parametrize("tasks_per_node", [0, 1, 3, {"n1": 1}])
def test_wrong_tasks_per_node(tasks_per_node):
    with pytest.raises(InvalidArgumentError, match="tasks on all nodes must be the tasks of the step"):
        SlurmClusterResolver(tasks_per_node=tasks_per_node, environ=step())


def test_a_wrong_port():
    with pytest.raises(InvalidArgumentError, match="port is not between 1 and 65535"):
        SlurmClusterResolver(port_base=65535, environ=step())


@pytest.mark.parametrize(
    ("visible", "per_node", "per_task", "local", "share"),
    [
        (None, 0, 0, 0, None),
        (None, 4, 2, 0, "0,1"),
        (None, 4, 2, 1, "2,3"),
        (None, 4, 1, 3, "3"),
        (None, 4, 0, 1, ""),
        ("4,5,6,7", 4, 2, 1, "6,7"),
        ("GPU-a,GPU-b", 2, 1, 1, "GPU-b"),
        ("6,7", 4, 2, 1, "6,7"),
        ("3", 4, 1, 3, "3"),
        ("", 4, 0, 1, ""),
    ],
)
def test_shares_of_gpus(visible, per_node, per_task, local, share):
    assert gpu_share(visible, per_node, per_task, local) == share
    assert gpu_share(share if share is not None else visible, per_node, per_task, local) == share


def test_too_few_gpus_are_visible():
    with pytest.raises(
        InvalidArgumentError, match=r"4 GPUs.*own 2. Received: CUDA_VISIBLE_DEVICES='1'.*=False"
    ):
        gpu_share("1", 4, 2, 0)


@pytest.mark.parametrize(
    ("more", "arguments", "visible", "count"),
    [
        ({}, {}, None, {}),
        ({"GPUS_ON_NODE": 4}, {}, "2,3", {"GPU": 2}),
        ({"GPUS_ON_NODE": "a100:4"}, {}, "2,3", {"GPU": 2}),
        ({"GPUS_ON_NODE": 5}, {}, "2,3", {"GPU": 2}),
        ({"GPUS_ON_NODE": 4}, {"gpus_per_task": 1}, "1", {"GPU": 1}),
        ({"GPUS_ON_NODE": 4}, {"gpus_per_node": 2}, "1", {"GPU": 1}),
        ({}, {"gpus_per_node": 8}, "4,5,6,7", {"GPU": 4}),
        ({"GPUS_ON_NODE": 0}, {}, None, {}),
    ],
)
def test_gpus_are_shared(monkeypatch, more, arguments, visible, count):
    monkeypatch.setattr("unisono.cluster_resolver._base._local_accelerators", dict)
    environ = step(3, **more)
    resolver = SlurmClusterResolver(environ=environ, **arguments)
    assert resolver.visible_gpus == environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert resolver.num_accelerators() == count
    again = SlurmClusterResolver(environ=environ, **arguments)
    assert again.visible_gpus == visible


def test_gpus_are_set_only_when_asked():
    environ = step(3, GPUS_ON_NODE=4)
    assert SlurmClusterResolver(auto_set_gpu=False, environ=environ).visible_gpus == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in environ


@pytest.mark.parametrize(
    ("gpus", "arguments"),
    [
        (1, {}),
        (4, {"gpus_per_task": 3}),
        (4, {"gpus_per_task": -1}),
        (4, {"gpus_per_node": -1}),
        (0, {"gpus_per_task": 1}),
    ],
)
def test_too_few_gpus(gpus, arguments):
    with pytest.raises(
        InvalidArgumentError, match=r"A node must have GPUs.*Received: .* for 2 tasks.*gpus_per"
    ):
        SlurmClusterResolver(environ=step(GPUS_ON_NODE=gpus), **arguments)
