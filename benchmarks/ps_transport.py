"""Pull and push of parameter servers against a raw TCP copy of the same bytes on loopback.

    python benchmarks/ps_transport.py [--rounds 30]

A process of its own holds an array and answers: through Unisono's server, and on a plain TCP socket, whose
ends send and receive into memory that is there already. All four take turns, in a thread that is not the main
one, as in workers. The server behind the server applies nothing: this is the transport alone.
"""

import argparse
import multiprocessing
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from unisono.cluster_resolver._spec import Task
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport._server import RpcServer
from unisono.rpc._transport._client import RpcClient

#: Bytes: the values of the models of `parameter_server.py`.
SIZES = {"mlp": 814_120, "wide": 80_150_568}
CLAIM = 0.7
SECONDS = 60.0


def serve(pipe, size):
    """Answer requests in this process until the pipe says that it is over."""
    values = np.ones(size // 4, np.float32)

    def handle(client, frame):
        return frame.answer(Op.OK, {}, [values] if frame.op is Op.PULL else [])

    rpc_server = RpcServer("127.0.0.1:0", handle)
    rpc_server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((rpc_server.address, listener.getsockname()[1]))
    connected, _ = listener.accept()
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    received = np.empty_like(values)
    while asked := connected.recv(1):
        if asked == b"l":
            connected.sendall(values)
        else:
            receive(connected, received)
            connected.sendall(b"k")
    rpc_server.close()


def receive(connected, array):
    left = memoryview(array).cast("B")
    while left:
        left = left[connected.recv_into(left) :]


def timed(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(size, rounds):
    """Return, for each way, the seconds of each round."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, size))
    process.start()
    address, port = ours.recv()
    rpc_client = RpcClient(Task("ps", 0), address)
    values, received = np.ones(size // 4, np.float32), np.zeros(size // 4, np.float32)
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        numbers = iter(range(1, 10**9))

        def pull():
            answer = rpc_client.call(Frame(Op.PULL, next(numbers)), SECONDS)
            assert answer.arrays[0][-1] == 1

        def push():
            rpc_client.call(Frame(Op.PUSH, next(numbers), arrays=[values]), SECONDS)

        def raw_pull():
            raw.sendall(b"l")
            receive(raw, received)

        def raw_push():
            raw.sendall(b"s")
            raw.sendall(values)
            assert raw.recv(1) == b"k"

        ways = {"pull": pull, "push": push, "TCP, pull": raw_pull, "TCP, push": raw_push}
        seconds = {name: [] for name in ways}
        for i in range(rounds + 3):
            for name, way in ways.items():
                took = timed(way)
                if i >= 3:
                    seconds[name].append(took)
    rpc_client.close()
    process.join(SECONDS)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print("| bytes | way | GB/s, median (lowest to highest) | against raw TCP | claim |")
    print("|---|---|---|---|---|")
    for size in SIZES.values():
        with ThreadPoolExecutor(1) as worker:
            seconds = worker.submit(measure, size, options.rounds).result()
        for name, took in seconds.items():
            rates = sorted(size / s / 1e9 for s in took)
            raw = seconds.get(f"TCP, {name}")
            ratio = f"{statistics.median(raw) / statistics.median(took):.2f}" if raw else ""
            spread = f"{statistics.median(rates):.2f} ({rates[0]:.2f} to {rates[-1]:.2f})"
            print(f"| {size:,} | {name} | {spread} | {ratio} | {f'at least {CLAIM}' if raw else ''} |")


if __name__ == "__main__":
    main()
