"""Hostile messages to a standalone server while it trains for a client: nothing may change.

    python benchmarks/standalone_hostile.py                          # a million frames: some minutes
    python benchmarks/standalone_hostile.py --frames 20000 --seed 7

A process runs `unisono serve` with a key. A client trains there until the attack is over, and knows what
must come out, bit for bit. Meanwhile others send what `ps_hostile` makes (random, malformed, truncated,
oversize frames; bytes and frames over connections that are not admitted; messages on direct sockets),
requests of other jobs, of this job with fields that are wrong, and what the client itself has sent before.
The server must live, its memory must stay, and all output must arrive once.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import ps_hostile
from ps_hostile import SECONDS, Admitted, Attack, Direct, attack_unauthenticated

from unisono.rpc._calls import PeerLostError, RequestNumbers
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport._client import RpcClient
from unisono.standalone import run_on_cluster
from unisono.standalone._protocol import CLIENT, LIMIT, SERVER, read_standalone_keys

SECRET = "5eed" * 16
EVERY = 10
NUMBERS = RequestNumbers()
#: What a client sends that a repetition would end: the operating system lets its own user do that.
ENDING = (Op.END, Op.SWEEP, Op.SIGNAL)


def train(stop):
    """Take steps until a file exists; return their number, and the result."""
    import os
    import time

    import numpy as np

    value, steps = np.zeros(1000), 0
    while not os.path.exists(stop):
        value = value + np.cos(value + steps)
        steps += 1
        if steps % EVERY == 0:
            # More output would make the answers to replayed requests larger, which wait in the server.
            print("step", steps, flush=True)
        time.sleep(0.005)
    return steps, value


def expected(steps):
    """What `train` must return after so many steps."""
    value = np.zeros(1000)
    for step in range(steps):
        value = value + np.cos(value + step)
    return value


class Recorder:
    """Keeps what the client sends, to be replayed."""

    def __init__(self):
        self.frames, self.job = [], None
        self._send = RpcClient.send

    def __enter__(self):
        recorder = self

        def send(rpc_client, frame, timeout=None):
            if frame.op not in ENDING and frame.op is not Op.STATUS:
                recorder.job = frame.meta.get("job", recorder.job)
                recorder.frames.append([bytes(part) for part in frame.parts()])
                del recorder.frames[100:-100]
            return recorder._send(rpc_client, frame, timeout)

        RpcClient.send = send
        return self

    def __exit__(self, *error):
        RpcClient.send = self._send


class OddRequests:
    """Makes requests that are messages, and make no sense.

    Args:
        seed: of all of them.
        recorder: knows the client's job.
    """

    def __init__(self, seed, recorder):
        self.random, self.recorder = Attack(seed).random, recorder

    def frame(self):
        """The parts of a request."""
        names = ["client", "lease", "count", "avoid", "name", "offset", "key", "task", "generation", "shape",
                 "description", "seen", "number"]  # fmt: skip
        meta = {name: self._value() for name in self.random.sample(names, self.random.randrange(len(names)))}
        job = self.random.choice([self.recorder.job or "x", "other", "../x", "", None, 5])
        op = self.random.choice([op for op in Op if job != self.recorder.job or op not in ENDING])
        arrays = [np.zeros(self.random.randrange(50), np.uint8)] * self.random.choice([0, 0, 1, 2])
        parts = Frame(op, self.random.getrandbits(64), 0, {**meta, "job": job}, arrays).parts()
        return [bytes(part) for part in parts]

    def _value(self):
        texts = ["", "x" * 5000, "../../etc/passwd", "/etc/passwd", "worker:0", "\u202e", "a\0b"]
        others = [-1, 0, 1e300, True, None, [], {}, [[]], {"k": [1, ""]}, {"k": 3}, {"tasks": -1}, 1 << 62]
        return self.random.choice([*texts, *others])


def serve(root):
    """Return the process of a server, and its address."""
    environ = {**os.environ, "UNISONO_CLUSTER_KEY": SECRET}
    command = [sys.executable, "-m", "unisono", "serve", "--address", "localhost:0", "--spares", "0"]
    with (root / "serve.log").open("w") as log:
        process = subprocess.Popen([*command, "--dir", str(root / "files")], stderr=log, env=environ)
    deadline = time.monotonic() + SECONDS
    while not (found := re.search(r"serving at (\S+);", (root / "serve.log").read_text())):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((root / "serve.log").read_text())
        time.sleep(0.05)
    return process, found[1]


class Training(threading.Thread):
    """Trains on the server, as a client does.

    Args:
        address: of the server.
        stop: the file that ends it.
    """

    def __init__(self, address, stop):
        super().__init__()
        self.address, self.stop = address, stop
        self.output, self.result, self.error = io.StringIO(), None, None

    def run(self):
        """Train."""
        try:
            with contextlib.redirect_stdout(self.output):
                # A lease beyond everything: other work on this machine may stop this process for long.
                self.result = run_on_cluster({"worker": [self.address]}, train, str(self.stop), lease=600.0)
        except BaseException as error:
            self.error = error

    def problems(self):
        """What is wrong with the result and the output."""
        if self.error is not None:
            return [f"{type(self.error).__name__}: {self.error}"]
        steps, value = self.result
        found = [] if np.array_equal(value, expected(steps)) else ["another value"]
        lines = [line for line in self.output.getvalue().splitlines() if "step" in line]
        if lines != [f"[worker:0] step {n}" for n in range(EVERY, steps + 1, EVERY)]:
            found.append(f"{len(lines)} lines of {steps // EVERY}")
        return found


def run(frames, seed):
    """Attack a server; return what was seen as a dict."""
    os.environ["UNISONO_CLUSTER_KEY"] = SECRET
    with tempfile.TemporaryDirectory() as folder, Recorder() as recorder:
        root = Path(folder)
        process, address = serve(root)
        training = Training(address, root / "stop")
        training.start()
        result = {}
        try:
            with mock.patch.multiple(ps_hostile, PS=SERVER, SECRET=SECRET):
                result = _attack(training, recorder, frames, seed)
        finally:
            (root / "stop").write_text("")
            training.join(SECONDS)
            process.terminate()
            process.wait(SECONDS)
            print((root / "serve.log").read_text()[-20_000:], file=sys.stderr)
        steps = 0 if training.result is None else training.result[0]
        return result | {"exit code": process.returncode, "steps": steps, "wrong": training.problems()}


def _attack(training, recorder, frames, seed):
    address = training.address
    attack, odd, admitted = Attack(seed), OddRequests(seed + 3, recorder), Admitted(address)
    keys = read_standalone_keys({"UNISONO_CLUSTER_KEY": SECRET}, CLIENT)
    status = RpcClient(SERVER, address, keys, LIMIT)
    # The function imports its modules first: on a busy machine that took as long as 10,000 frames.
    deadline = time.monotonic() + SECONDS
    while "step" not in training.output.getvalue() and training.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    began = time.monotonic()
    outside = max(20, frames // 500)
    others = [
        threading.Thread(target=attack_unauthenticated, args=(address, Attack(seed + 1), outside)),
        threading.Thread(target=Direct(address, Attack(seed + 2)).run, args=(frames // 2,)),
    ]
    for other in others:
        other.start()
    sizes, replays = [], 0
    for number in range(frames):
        if number % 50 == 49:
            admitted.send(attack.random.choice(recorder.frames))
            replays += 1
        elif number % 20_000 == 19_999:
            admitted.socket.send(bytes(LIMIT + 1))
            admitted.renew()
        elif number % 2:
            admitted.send(odd.frame())
        else:
            admitted.send(attack.frame())
        if number % 5000 == 4999 and number + 1 < frames:
            # It takes no answers: those of a connection wait in the server, up to a limit. What waits to be
            # sent is lost with the connection.
            admitted.renew()
        if number % max(1, frames // 20) == 0:
            sizes.append(_bytes(status))
            print(f"{number} frames, {sizes[-1] >> 20} MiB", file=sys.stderr)
    for other in others:
        other.join()
    told = _settled(status)
    admitted.close()
    status.close()
    warm = sizes[len(sizes) // 4 :]
    return {
        "frames": frames + frames // 2 + outside,
        "seconds": round(time.monotonic() - began, 1),
        "sent replays": replays,
        "rejected": told["rejected"],
        "refused": told["counts"].get("errors", 0),
        "processes": told["processes"],
        "growth": max(warm) - warm[0],
    }


def _settled(status):
    """The server's numbers when it has handled what was sent: they stand still over ten answers."""
    seen = []
    while len(seen) < 10 or len({_handled(told) for told in seen[-10:]}) > 1:
        time.sleep(0.02)
        seen.append(status.call(Frame(Op.STATUS, NUMBERS.next()), SECONDS).meta)
    return seen[-1]


def _handled(told):
    """How many frames a server has handled, without those of its client and these questions."""
    return told["rejected"] + told["counts"].get("errors", 0)


def _bytes(status):
    while True:
        try:
            return status.call(Frame(Op.STATUS, NUMBERS.next()), SECONDS).meta["bytes"]
        except PeerLostError:
            continue


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=700_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = run(options.frames, options.seed)
    print(json.dumps({"seed": options.seed, **result}, indent=1))
    sound = not result["wrong"] and not result["exit code"] and result["processes"] == 1
    sys.exit(not (sound and result["growth"] < 32 << 20))


if __name__ == "__main__":
    main()
