"""Every strategy of several processes on hosts whose own names are 127.0.1.1, as on Debian."""

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import unisono
from tests.cluster.host_tasks import LIMIT, PORT, PROGRAM, Tasks, single_device_weights, weights
from tests.cluster.standalone_support import KEY, until
from tests.hosts import DEBIAN, Hosts, require_hosts

#: What a firewall lets through besides `PORT` itself.
OPEN = 40_000, 40_099

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def hosts():
    require_hosts()
    others = "".join(f"10.88.0.{i + 1} h{i}\n" for i in range(3))
    with Hosts(3, switches=2, etc_hosts=DEBIAN + others) as found:
        yield found


@pytest.fixture(scope="module")
def expected():
    return single_device_weights()


def addresses(hosts, count=2, switch=0, version=4):
    """Of the first tasks, one on each host."""
    every = [hosts.address(i, switch, version) for i in range(count)]
    return [f"[{each}]:{PORT + i}" if version == 6 else f"{each}:{PORT + i}" for i, each in enumerate(every)]


def traffic(hosts):
    """The bytes that host 0 has received on each switch."""
    return np.array([hosts.traffic(0, n)[0] for n in range(2)])


def test_workers_listen_at_their_addresses_of_the_cluster(hosts, expected, tmp_path):
    """On a second network, which no name knows: gradients take it, and the first one stays unused."""
    before = traffic(hosts)
    tasks = Tasks(hosts, tmp_path, {"worker": addresses(hosts, switch=1)})
    assert tasks.wait() == [0, 0], tasks.text
    assert weights(tasks.text) == pytest.approx([expected] * 2, rel=1e-5)
    unused, used = traffic(hosts) - before
    # 2 epochs of 40 steps, with gradients of 580 numbers.
    assert used > 80 * 580 * 4
    assert unused < 10_000


def test_an_interface_is_chosen_where_names_are_of_another_network(hosts, expected, tmp_path):
    """Over IPv6; the chief's name is 127.0.1.1 on its own host."""
    before = traffic(hosts)
    cluster = {"worker": [f"h0:{PORT}", f"h1:{PORT + 1}"]}
    tasks = Tasks(hosts, tmp_path, cluster, ["--interface", "fd88:1::/64"])
    assert tasks.wait() == [0, 0], tasks.text
    assert weights(tasks.text) == pytest.approx([expected] * 2, rel=1e-5)
    assert (traffic(hosts) - before)[1] > 80 * 580 * 4


def test_an_address_that_the_others_do_not_reach_is_named(hosts, tmp_path):
    cluster = {"worker": [f"h0:{PORT}", f"h1:{PORT + 1}"]}
    tasks = Tasks(hosts, tmp_path, cluster, UNISONO_INTERFACE="lo")
    assert tasks.wait() == [1, 1], tasks.text
    for log in tasks.logs.values():
        text = log.read_text()
        for i in range(2):
            published = rf"127\.0\.0\.1:\d+, which worker {i} at h{i}:{PORT + i} has published"
            assert re.search(published + ": the connection is refused", text), text
        assert "UNISONO_INTERFACE=eth0" in text


@contextlib.contextmanager
def firewalls(hosts):
    """Only `PORT` and those of `OPEN` can be reached, from which each host takes its own ports, too."""
    first, last = OPEN
    path = "/proc/sys/net/ipv4/ip_local_port_range"
    closed = (f"1-{PORT - 1}", f"{PORT + 1}-{first - 1}", f"{last + 1}-65534")
    pairs = [(i, j) for i in range(len(hosts)) for j in range(len(hosts)) if i != j]
    with contextlib.ExitStack() as stack:
        for i in range(len(hosts)):
            before = hosts.run(i, "cat", path).strip()
            stack.callback(hosts.run, i, "sh", "-c", f"echo {before} >{path}")
            hosts.run(i, "sh", "-c", f"echo {first} {last} >{path}")
        for i, j in pairs:
            for ports in closed:
                stack.enter_context(hosts.dropped(i, j, ports))
        yield


def test_three_hosts_over_ipv6_behind_firewalls(hosts, expected, tmp_path):
    """The status servers' ports are those of UNISONO_PORTS, Gloo's those of the system."""
    cluster = {"worker": addresses(hosts, 3, version=6)}
    with firewalls(hosts):
        tasks = Tasks(hosts, tmp_path, cluster, UNISONO_PORTS="{}-{}".format(*OPEN))
        assert tasks.wait() == [0, 0, 0], tasks.text
    assert weights(tasks.text) == pytest.approx([expected] * 3, rel=1e-5)


@pytest.mark.exhaustive
def test_a_port_outside_of_what_a_firewall_lets_through_is_named(hosts, tmp_path):
    with firewalls(hosts):
        cluster = {"worker": addresses(hosts)}
        tasks = Tasks(hosts, tmp_path, cluster, UNISONO_PORTS="50000-50099")
        assert tasks.wait() == [1, 1], tasks.text
    for log in tasks.logs.values():
        assert re.search(
            r"does not reach 10\.88\.0\.2:500\d\d, which worker 1 .*cannot be reached", log.read_text()
        )


def test_compressed_gradients_are_fewer_bytes_at_the_interface(hosts, tmp_path):
    """Of 65,920 numbers, all but 384 in two kernels; each worker holds its own errors in a checkpoint.

    Replicas that train apart send weights after each tenth step, and nothing else. In two fragments an epoch
    of three phases sends the first of them once more, which has five steps since its last exchange. Beside
    the steps the same is sent, on devices of its own; the losses are those of replicas in one process.
    """
    program = Path(__file__).parent / "programs" / "compressed.py"
    tasks = Tasks(hosts, tmp_path, {"worker": addresses(hosts)}, [tmp_path], program=program)
    assert tasks.wait() == [0, 0], tasks.text
    assert tasks.text.count("resumed with the same bits True") == 4
    lines = re.findall(r"(\w+) loss (\S+) sent (\d+)", tasks.text)
    found = {name: (float(loss), int(count)) for name, loss, count in lines}
    exact, kernels = 4 * 384, 2 * 128 * 256
    wanted = {
        "exact": exact + 4 * kernels,
        "bfloat16": exact + 2 * kernels,
        "float16": exact + 2 * kernels,
        "int8": exact + kernels * (1 + 4 / 256),
        "power_sgd": exact + 4 * 4 * 2 * (128 + 256),
        "top_k": exact + 8 * 0.01 * kernels,
        "local": (exact + 4 * kernels) / 10,
        "fragments": (exact + 4 * kernels) / 10 * 3.5 / 3,
        "overlap": (exact + 4 * kernels) / 10 * 3.5 / 3,
    }
    # Headers of packets, acknowledgements and heartbeats on top.
    for name, nbytes in wanted.items():
        assert nbytes < found[name][1] < 1.1 * nbytes + 3000, (name, found)
    losses = {name: loss for name, (loss, _) in found.items()}
    for name in ("bfloat16", "float16", "int8"):
        assert losses[name] == pytest.approx(losses["exact"], rel=1e-3)
    # Programs of steps, of what is sent and of what has arrived send nothing; that of an epoch's end does.
    assert tasks.text.count("replicas 2 programs") == 2
    for line in re.findall(r"replicas 2 programs (.*)", tasks.text):
        found_programs = ast.literal_eval(line)
        assert sum(exchanges for trains, exchanges in found_programs if trains) == 1
        assert [exchanges for trains, exchanges in found_programs if not trains] == [True]
        assert len(found_programs) == 8
    assert losses["overlap"] == pytest.approx(loss_of_replicas(), rel=1e-5)


def loss_of_replicas():
    """The last loss of `programs/compressed.py` with an overlap, by two replicas of this process."""
    outer = lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)  # noqa: E731
    sync = unisono.LocalUpdates(10, outer, fragments=2, overlap=2)
    x = np.random.default_rng(0).normal(size=(30 * 12, 128)).astype("float32")
    keras.utils.set_random_seed(1)
    with unisono.MirroredStrategy(["cpu:0", "cpu:1"], sync=sync).scope():
        model = keras.Sequential([keras.Input((128,)), keras.layers.Dense(256), keras.layers.Dense(128)])
        model.compile(keras.optimizers.SGD(1.0), "mse")
    for epochs in (1, 2):
        history = model.fit(x, x, batch_size=12, epochs=epochs, shuffle=False, verbose=0).history
    return history["loss"][-1]


def test_parameter_servers(hosts, expected, tmp_path):
    """Over IPv6, with a key file: a chief and a server on host 0, a worker and a server on host 1."""
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    (chief, server), (worker, other) = (
        [f"[{hosts.address(i, version=6)}]:{port}" for port in (PORT, PORT + 1)] for i in range(2)
    )
    cluster = {"chief": [chief], "worker": [worker], "ps": [server, other]}
    tasks = Tasks(hosts, tmp_path, cluster, UNISONO_CLUSTER_KEY="", UNISONO_CLUSTER_KEY_FILE=str(key))
    assert tasks.wait() == [0, 0, 0, 0], tasks.text
    assert weights(tasks.log("chief", 0)) == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize(
    ("jobs", "task"),
    [
        (("worker",), ("worker", 1)),
        (("chief", "worker", "ps"), ("worker", 0)),
        pytest.param(("chief", "worker", "ps"), ("ps", 0), marks=pytest.mark.exhaustive),
    ],
)
def test_another_version_of_unisono_on_one_host_is_named(hosts, tmp_path, jobs, task):
    every = addresses(hosts, 3)
    cluster = (
        {job: [each] for job, each in zip(jobs, every, strict=False)}
        if len(jobs) > 1
        else {"worker": every[:2]}
    )
    tasks = Tasks(hosts, tmp_path, cluster, own={task: {"args": ["--version", "0.0.9"]}})
    assert set(tasks.wait()) == {1}, tasks.text
    text = tasks.log(jobs[0], 0)
    assert "unisono" in text, text
    assert "0.0.9" in text, text
    assert not weights(tasks.text)


@pytest.mark.exhaustive
def test_an_evaluator_on_a_third_host_whose_clock_is_wrong(hosts, expected, tmp_path):
    every, folder = addresses(hosts, 3), tmp_path / "checkpoints"
    tasks = Tasks(
        hosts, tmp_path, {"worker": every[:2], "evaluator": every[2:]}, ["--evaluate", folder],
        own={("evaluator", 0): {"clock": 600.0}, ("worker", 1): {"clock": -600.0}},
    )  # fmt: skip
    assert tasks.wait() == [0, 0, 0], tasks.text
    assert weights(tasks.text) == pytest.approx([expected] * 3, rel=1e-5)
    assert re.search(r"evaluated [12]\b", tasks.log("evaluator", 0)), tasks.text


@pytest.fixture
def forwarded(hosts):
    """Connections to 198.51.100.2 reach host 1, which has only another address, on a network of its own."""
    if not shutil.which("nft"):
        pytest.skip("address translation needs nft")
    inside, public = hosts.address(1, 1), "198.51.100.2"
    hosts.run(0, "ip", "link", "set", "eth1", "down")
    hosts.run(0, "ip", "route", "add", public, "via", hosts.address(1))
    for words in (
        "add table ip hosts",
        "add chain ip hosts pre { type nat hook prerouting priority -100 ; }",
        f"add rule ip hosts pre ip daddr {public} dnat to {inside}",
    ):
        hosts.run(1, "nft", words)
    yield public
    hosts.run(1, "nft", "delete table ip hosts")
    hosts.run(0, "ip", "route", "del", public)
    hosts.run(0, "ip", "link", "set", "eth1", "up")


@pytest.mark.exhaustive
def test_a_parameter_server_behind_a_forwarded_address(hosts, forwarded, expected, tmp_path):
    chief, worker = (f"{hosts.address(0)}:{PORT + n}" for n in range(2))
    cluster = {"chief": [chief], "worker": [worker], "ps": [f"{forwarded}:{PORT}"]}
    tasks = Tasks(hosts, tmp_path, cluster, own={("ps", 0): {"host": 1}})
    assert tasks.wait() == [0, 0, 0], tasks.text
    assert weights(tasks.text) == pytest.approx([expected], rel=1e-5)


@pytest.mark.exhaustive
def test_a_worker_behind_a_forwarded_address_is_named(hosts, forwarded, tmp_path):
    """Gloo publishes the address to which it is bound."""
    inside = hosts.address(1, 1)
    own = {("worker", 1): {"host": 1, "args": ["--interface", inside]}}
    cluster = {"worker": [f"{hosts.address(0)}:{PORT}", f"{forwarded}:{PORT}"]}
    tasks = Tasks(hosts, tmp_path, cluster, own=own)
    assert tasks.wait() == [1, 1], tasks.text
    for log in tasks.logs.values():
        assert re.search(
            f"worker 0 at .* does not reach {inside}:[0-9]+, which worker 1 at {forwarded}:{PORT} has "
            "published: its machine cannot be reached .network is unreachable",
            log.read_text(),
        ), tasks.text


@pytest.fixture(scope="module")
def servers(hosts, tmp_path_factory):
    """`unisono serve` on both hosts."""
    root, processes = tmp_path_factory.mktemp("servers"), []
    every = [f"[{hosts.address(i, version=6)}]:{PORT + 10}" for i in range(2)]
    for i, address in enumerate(every):
        with (root / f"{i}.log").open("w") as log:
            processes.append(hosts.start(
                i, sys.executable, "-m", "unisono", "serve", "--dir", root / f"files-{i}",
                "--address", address, cwd=root,
                env={**os.environ, "UNISONO_CLUSTER_KEY": KEY}, stdout=log, stderr=log,
            ))  # fmt: skip
    until(lambda: all("serving at" in (root / f"{i}.log").read_text() for i in range(2)))
    yield every
    for process in processes:
        process.terminate()
        process.wait(LIMIT)


@pytest.mark.parametrize("jobs", ["{0},{1}", "chief={0},worker={1},ps={1}"])
def test_servers_train_for_a_client_on_another_host(hosts, servers, expected, tmp_path, jobs):
    """Over IPv6; workers' gradients take the second network."""
    before = traffic(hosts)
    command = [sys.executable, "-m", "unisono", "launch", "--cluster", jobs.format(*servers)]
    command += ["--interface", "eth1"]
    client = hosts.start(
        2, *command, PROGRAM, cwd=tmp_path, env={**os.environ, "UNISONO_CLUSTER_KEY": KEY},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    text = client.communicate(timeout=LIMIT)[0]
    assert client.returncode == 0, text
    assert weights(text) == pytest.approx([expected] * (1 if "ps" in jobs else 2), rel=1e-5)
    assert ((traffic(hosts) - before)[1] > 80 * 580 * 4) == ("ps" not in jobs)
