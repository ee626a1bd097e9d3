"""TF_CONFIG of a server, and what it refuses before anything starts."""

import json
import os
import platform

import pytest

import unisono
from unisono.rpc._transport._local import free_port
from unisono.standalone._server import (
    StandardServer,
    address_of_tf_config,
    run_standard_server,
    serve,
    shown_name,
)
from unisono.standalone._server_machine import ServerMachine, server_directory

CLUSTER = {"worker": ["a:1", "b:2"], "ps": ["c:3"]}


def config(**fields):
    return json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, **fields})


def test_the_address_of_the_task():
    assert address_of_tf_config(config()) == "b:2"
    assert address_of_tf_config(config(task={"type": "ps"})) == "c:3"
    assert address_of_tf_config(config(task={"type": "worker", "index": "1"}, rpc_layer="grpc")) == "b:2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", '"cluster"'),
        (json.dumps({"cluster": CLUSTER}), '"task"'),
        (config(task={"index": 0}), 'must have a "type"'),
        (config(task=3), 'must have a "type"'),
        (config(cluster={"ps": ["c:3"]}, task={"type": "ps"}), 'the job "chief" or "worker"'),
        (config(rpc_layer="grpc+verbs"), '"rpc_layer"'),
        (config(task={"type": "worker", "index": 2}), "task must be in the cluster"),
        (config(task={"type": "worker", "index": "x"}), '"index"'),
        ("[]", "a JSON object"),
        ("{", "must be JSON"),
    ],
)
def test_what_tensorflow_refuses_is_a_value_error(text, message, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=message):
        run_standard_server()


def test_without_a_key_a_server_is_for_this_machine_alone(monkeypatch):
    monkeypatch.delenv("UNISONO_CLUSTER_KEY", raising=False)
    monkeypatch.delenv("UNISONO_CLUSTER_KEY_FILE", raising=False)
    with pytest.raises(unisono.ClusterError, match="must have the key of its cluster"):
        StandardServer("0.0.0.0:2222")


def test_a_server_of_all_interfaces_has_the_name_of_its_machine():
    assert shown_name("0.0.0.0:2222") == shown_name("[::]:2222") == f"{platform.node()}:2222"
    assert shown_name("10.0.0.1:2222") == "10.0.0.1:2222"


def test_a_server_must_be_started_before_it_is_joined():
    with pytest.raises(unisono.ClusterError, match="`join` before `start`"):
        StandardServer("localhost:0").join()


def test_a_server_of_tf_config_listens_until_it_is_stopped(monkeypatch, tmp_path):
    own = f"localhost:{free_port()}"
    cluster = {"worker": [own, "b:2"]}
    monkeypatch.setenv("TF_CONFIG", config(cluster=cluster, task={"type": "worker", "index": 0}))
    server = run_standard_server(directory=tmp_path, spares=0)
    try:
        assert server.target == f"zmq://{own}"
        assert server.status()["client"] is None
        server.start()
        with pytest.raises(unisono.ClusterError, match="the only one at its address"):
            run_standard_server(directory=tmp_path / "other", spares=0)
    finally:
        server.stop()
    server.join()


def test_the_directory_of_a_server_is_its_users_alone(tmp_path):
    path = server_directory("localhost:1", tmp_path / "made" / "here")
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o777)
    with pytest.raises(unisono.InvalidArgumentError, match="its mode is 0777"):
        server_directory("localhost:1", path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(unisono.InvalidArgumentError, match="not a directory"):
        server_directory("localhost:1", tmp_path / "link")


def test_a_new_job_removes_the_files_of_others_and_finds_its_own(tmp_path):
    machine = ServerMachine(tmp_path, dict(os.environ), spares=0)
    try:
        own = machine.job_directory("a")
        (own / "state").write_text("1")
        assert (machine.job_directory("a") / "state").exists()
        machine.job_directory("b")
        assert not own.exists()
    finally:
        machine.close()


def test_processes_have_the_mark_of_their_server_and_no_key(tmp_path):
    environ = {**os.environ, "UNISONO_CLUSTER_KEY": "5e" * 32, "TF_CONFIG": "{}"}
    machine = ServerMachine(tmp_path, environ, spares=0)
    try:
        made = machine._environment(unisono.standalone._protocol.ProcessShape())
        assert "UNISONO_CLUSTER_KEY" not in made
        assert "TF_CONFIG" not in made
        assert made["UNISONO_LAUNCH"].endswith(machine._mark)
    finally:
        machine.close()


@pytest.mark.parametrize("address", ["localhost", ":2222", "localhost:65536", "localhost:²", "localhost:"])
def test_what_is_no_address_of_serve(address):
    with pytest.raises(unisono.InvalidArgumentError, match="must be HOST:PORT, the port below 65536"):
        serve(address, None, None, None, 0)
