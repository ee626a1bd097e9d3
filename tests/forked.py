"""Starts programs of tests quickly: a process that has imported Keras, JAX and Unisono forks for each.

Their imports cost 2.7 s of CPU a program (November 2026). JAX has not started when it forks; a program
has its own arguments, environment, directory and output, and ends as Python ends. JAX reads its variables at
its import: the process that forks has none of them, and a program's own become settings of `jax.config`.

`python -m tests.forked` is that process: it reads one job a line, and writes the exit codes into files.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
#: What is read when JAX or Keras is imported, and what the tests' own process needs.
NOT_FOR_PROGRAMS = ("PJRT_NPROC", "KERAS_BACKEND", "TF_CONFIG")
#: Seconds between two looks for programs that have ended.
_PAUSE = 0.02
_LIMIT = 400.0


#: The beginning of the names of JAX's variables.
OF_JAX = "JAX_"
#: What Keras reads when it is imported, and the only value that forked programs can have.
OF_KERAS = {"KERAS_BACKEND": "jax", "KERAS_NNX_ENABLED": None, "KERAS_HOME": os.environ.get("KERAS_HOME")}


def environment(**more):
    """The environment of the tests without what is for their own process."""
    return {k: v for k, v in os.environ.items() if k not in NOT_FOR_PROGRAMS} | more


class Program:
    """A program that runs.

    Args:
        command: `script.py argument…`, `-m unisono.tf script.py argument…`, or `-m unisono argument…`,
            whose tasks are forked, too.
        folder: where it runs.
        out: the file for its output.
        err: the file for its messages; None for that of its output.
        env: its environment.
        host: the process that holds the host on which it runs, of `tests.hosts`; None for this machine.
        clock: seconds by which that host's clock, `time.time`, is wrong.
    """

    def __init__(self, command, folder, out, err=None, env=None, host=None, clock=0.0):
        env = environment() if env is None else env
        for name, value in OF_KERAS.items():
            assert env.get(name, value) == value, f"Keras has read {name} already: start a process of its own"
        server, self._files = _server()
        number = len(list(self._files.glob("*.pid")))
        job = {"number": number, "command": command, "folder": str(folder), "out": str(out)}
        job |= {"err": str(err or out), "env": env}
        job |= {"host": host, "clock": clock}
        (self._files / f"{number}.pid").touch()
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        self._number = number
        deadline = time.monotonic() + _LIMIT
        while not (text := (self._files / f"{number}.pid").read_text()):
            assert server.poll() is None, "the process that forks has ended"
            assert time.monotonic() < deadline, "the process that forks does not answer"
            time.sleep(_PAUSE)
        self.pid = int(text)

    def poll(self):
        """The exit code; None while it runs, negative after a signal."""
        path = self._files / f"{self._number}.code"
        return int(path.read_text()) if path.exists() else None

    def wait(self, seconds):
        """Wait for the end, and return the exit code."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked program", seconds)
            time.sleep(_PAUSE)
        return code

    def send_signal(self, number):
        """Send it a signal, if it runs."""
        if self.poll() is None:
            # It may have ended, and its code is not written yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        """End it, if it runs."""
        self.send_signal(signal.SIGKILL)


def run(command, folder, seconds=500.0, env=None):
    """Run a program to its end, in `environment()` if None; return its exit code, output and messages."""
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place) / "out", Path(place) / "err"
        program = Program(command, folder, out, err, env)
        try:
            code = program.wait(seconds)
        finally:
            program.kill()
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


@functools.cache
def _server():
    files = tempfile.TemporaryDirectory(prefix="unisono-forked-")
    env = {name: value for name, value in environment().items() if not name.startswith(OF_JAX)}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", files.name],
        cwd=REPOSITORY, env=env, stdin=subprocess.PIPE, text=True,
    )  # fmt: skip

    def end():
        server.stdin.close()
        server.wait(_LIMIT)
        files.cleanup()

    atexit.register(end)
    return server, Path(files.name)


# --- the process that forks --------------------------------------------------------------------------------


def _write(path, text):
    aside = path.with_suffix(".part")
    aside.write_text(text)
    aside.replace(path)


def _serve(files):
    running = {}
    lines = ""
    while True:
        if select.select([0], [], [], _PAUSE)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                for pid in running:
                    os.kill(pid, 9)
                return
            lines += data.decode()
        while "\n" in lines:
            line, _, lines = lines.partition("\n")
            job = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _become(job)
                return
            running[pid] = job["number"]
            _write(files / f"{job['number']}.pid", str(pid))
        while running and (found := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(found[1])
            _write(files / f"{running.pop(found[0])}.code", str(code))


def _become(job):
    """Run a job's program in this process, which then ends."""
    from soaking import forks

    from unisono.launcher import _task

    if job["host"] is not None:
        forks.enter_host(job["host"])
    if job["clock"]:
        true_time = time.time
        time.time = lambda: true_time() + job["clock"]
    os.chdir(job["folder"])
    os.environ.clear()
    _task.follow_late_variables()
    os.environ.update(job["env"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    out, err = (os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for name in ("out", "err"))
    for source, target in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    if job["env"].get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    command = job["command"]
    if command[:2] == ["-m", "unisono.tf"]:
        from unisono.tf._run import main

        sys.argv = ["unisono.tf", *command[2:]]
        sys.path[0] = ""
        main(command[2:])
    elif command[:2] == ["-m", "unisono"]:
        sys.path[0] = ""
        forks.command(command[2:])
    else:
        sys.argv = command
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        _task._run_script(command[0])


def _import_all():
    import warnings

    import keras  # noqa: F401
    import sklearn.datasets  # noqa: F401
    from orbax.checkpoint import v1  # noqa: F401

    import unisono
    import unisono.cli._app
    import unisono.data
    import unisono.estimator
    import unisono.launcher._task

    # Not all names: TensorFlow's, which saves models in another form, is for programs that ask for it.
    for name in unisono.__all__:
        if name.endswith("Strategy"):
            getattr(unisono, name)
    # JAX warns of forks, which are harmless before it has started.
    warnings.filterwarnings("ignore", category=RuntimeWarning, message=".*fork")
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")


if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "jax"
    sys.path.append(str(REPOSITORY / "benchmarks"))
    _import_all()
    _serve(Path(sys.argv[1]))
