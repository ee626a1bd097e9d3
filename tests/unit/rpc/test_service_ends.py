"""The end of a process whose service was never joined."""

import subprocess
import sys

#: A parameter server that computes when its program ends.
PROGRAM = """
import sys, threading, time, types
import jax, numpy as np
from unisono.cluster_resolver._spec import ClusterSpec, Task
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport._local import free_port
from unisono.rpc._transport._client import RpcClient
from unisono.parameter_server.strategy._serve import service_of

address = f"127.0.0.1:{free_port()}"
me = Task("ps", 0)
spec = ClusterSpec({"ps": [address]})
roles = types.SimpleNamespace(task=me, workers=(), accepted=(me,), addresses={me: address}, spec=spec)
service = service_of(roles)
step = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda i, y: jax.numpy.tanh(y @ y), x))
given = np.ones((500, 500), "float32")
step(given)
began = threading.Event()

def handle(client, frame):
    began.set()
    np.asarray(step(given))
    return frame.answer(Op.OK)

service._rpc_server._handler = handle
RpcClient(me, address).send(Frame(Op.PULL, 1))
began.wait()
print("ends", flush=True)

class Slow:
    def __del__(self, sleep=time.sleep):
        # Where the interpreter has ended already, a thread comes back from the program.
        sleep(0.7)

slow = Slow()
"""


def test_a_process_that_ends_while_its_server_computes_does_so_without_a_signal():
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "ends" in ended.stdout
