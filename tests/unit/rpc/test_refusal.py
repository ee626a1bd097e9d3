"""A task without a key is found out by those who ask it: at once, and not when their time is over."""

import socket
import threading

import pytest

from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import ClusterSpec, Task, with_port
from unisono.parameter_server.server._client import ServerClient
from unisono.rpc._calls import PeerRejectedError
from unisono.rpc._transport import _server
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._keys import VARIABLE, new_secret, read_keys
from unisono.rpc._transport._local import free_port
from unisono.rpc._transport._server import require_key_or_refuse

PS = Task("ps", 0)


@pytest.fixture
def elsewhere():
    """An address of this machine that is none of the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has the loopback interface alone")
        host = probe.getsockname()[0]
    return with_port(host, free_port())


def test_a_chief_learns_that_a_server_has_no_key(elsewhere, tuned, caplog):
    tuned(_server, _REFUSES_ON=1.0)
    spec = ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": [elsewhere]})
    keys = read_keys({VARIABLE: new_secret()}, Task("chief", 0), spec)
    refused = []

    def serve():
        try:
            require_key_or_refuse(elsewhere, None)
        except ClusterError as error:
            refused.append(str(error))

    serving = threading.Thread(target=serve)
    serving.start()
    # Longer than the test may take: it is the refusal that ends the wait.
    client = ServerClient([RpcClient(PS, elsewhere, keys)], absence_limit=600.0)
    with pytest.raises(PeerRejectedError, match=f"ps:0 at {elsewhere} rejects this task"):
        client.begin_job(0)
    client.close()
    serving.join(60)
    assert "must have the key of its cluster" in refused[0]
    assert "are told so" in caplog.text


def test_a_task_that_has_a_key_or_needs_none_refuses_nothing(elsewhere, monkeypatch):
    monkeypatch.setattr(_server, "_refuse", pytest.fail)
    spec = ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": [elsewhere]})
    require_key_or_refuse(elsewhere, read_keys({VARIABLE: new_secret()}, PS, spec))
    require_key_or_refuse("localhost:1", None)


def test_without_anyone_who_asks_it_ends_by_itself(elsewhere, tuned):
    tuned(_server, _REFUSES=0.1)
    with pytest.raises(ClusterError, match=r"Received: .*, and no key"):
        require_key_or_refuse(elsewhere, None)
    # Its port may be another's.
    with socket.create_server((elsewhere.rpartition(":")[0], int(elsewhere.rpartition(":")[2]))):
        with pytest.raises(ClusterError, match="no key"):
            require_key_or_refuse(elsewhere, None)
