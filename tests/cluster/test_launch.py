"""`unisono launch`: one generation, its end, and what it leaves behind."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from tests.cluster.launch_support import LIMIT, WHO, is_alive, launched, until

FOREVER = "\nprint('ready', flush=True)\ntime.sleep(600)\n"


def cli(*args, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "unisono", *args],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=cwd,
    )


def test_a_whole_cluster_runs(tmp_path):
    script = """
print(me, sys.argv[1:], os.environ["TF_CONFIG"], flush=True)
key = os.environ["UNISONO_CLUSTER_KEY_FILE"]
assert len(open(key).read()) == 64 and os.stat(key).st_mode & 0o777 == 0o600
here = os.path.dirname(__file__)
open(os.path.join(here, "wrote-" + me), "w").close()
# The chief's end ends the servers, which have to write their line first.
while me == "chief:0" and sum(name.startswith("wrote-") for name in os.listdir(here)) < 5:
    time.sleep(0.01)
if task["type"] == "ps":
    time.sleep(600)
"""
    flags = ("-n", "2", "--ps", "1", "--chief", "--evaluator", "--grace", "1")
    with launched(tmp_path, script, *flags, args=["--lr", "0.1", "-n", "7"]) as run:
        assert run.end() == 0
        for task in ("chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"):
            assert f"{task} ['--lr', '0.1', '-n', '7'] {{" in run.log(task)
            assert task in run.err
        assert not (tmp_path / "logs" / "cluster_key").exists()
        # The terminal has the chief's lines only, each with its name.
        assert re.fullmatch(r"\[chief:0\] chief:0 .*\n", run.out)
        text = run.log("worker:1").partition("] ")[2]
        cluster = json.loads(text)["cluster"]
        assert {job: len(tasks) for job, tasks in cluster.items()} == {"chief": 1, "worker": 2, "ps": 1}


def test_the_first_traceback_is_the_last_thing_on_the_screen(tmp_path):
    script = """
if me == "worker:1":
    raise ValueError("this one")
written = os.path.join(os.path.dirname(os.environ["UNISONO_FENCE"]), "errors", "g0-worker-1.json")
while not os.path.exists(written):
    time.sleep(0.01)
raise OSError("connection closed by peer")
"""
    with launched(tmp_path, script, "-n", "2") as run:
        assert run.end() == 1
        shown = run.err.rstrip()
        assert shown.endswith("ValueError: this one")
        traceback = shown[shown.rindex("Traceback") :]
        # The program's frames, and none of the launcher's.
        assert re.findall(r'File "(.*?)"', traceback) == [str(tmp_path / "train.py")]
        assert "worker:1 failed: ValueError: this one" in run.err
        assert re.findall(r'File "(.*?)"', run.log("worker:1")) == [str(tmp_path / "train.py")]


def test_a_killed_task_is_the_cause_of_what_its_peers_say(tmp_path):
    script = """
ready = os.path.join(os.path.dirname(__file__), "ready")
if me == "worker:1":
    with open(ready + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.replace(ready + ".part", ready)
    time.sleep(600)
while not os.path.exists(ready):
    time.sleep(0.01)
# It dies after this one raised, but nobody else had a reason to kill it.
sys.excepthook = lambda *_: os.kill(int(open(ready).read()), signal.SIGKILL)
raise OSError("Connection closed by peer")
"""
    with launched(tmp_path, script, "-n", "2") as run:
        assert run.end() == 137
        # The cause stands once: where it was not seen at once, behind the closing line.
        cause, closing = sorted(run.err.splitlines()[-2:], key=lambda line: "unisono: 2 tasks, " in line)
        assert "worker:1 was killed by SIGKILL" in cause
        assert run.err.count("worker:1 was killed by SIGKILL") == 1
        assert closing.startswith("unisono: 2 tasks, ")


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(7)", 7, "worker:1 failed with exit code 7"),
        ("sys.exit('no data')", 1, "no data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "worker:1 was killed by SIGKILL"),
        ("os.abort()", 134, "Fatal Python error: Aborted"),
        ("1 +* 1", 1, "SyntaxError"),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(tmp_path, ending, code, words):
    (tmp_path / "bad.py").write_text(ending if "*" in ending else f"import os, signal, sys\n{ending}\n")
    script = f"""
import runpy
if me == "worker:1":
    runpy.run_path({str(tmp_path / "bad.py")!r})
time.sleep(600)
"""
    with launched(tmp_path, script, "-n", "2") as run:
        assert run.end() == code
        assert words in run.err
        assert not any(is_alive(pid) for pid in run.everyone())


def test_a_module_runs_as_with_python_m(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    done = cli("launch", "-n", "1", "-m", "package.train", "--x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[worker:0] __main__ package ['--x']\n"


AS_WITH_PYTHON = """
import atexit, shutil, threading
import __main__
assert __main__.__file__ == __file__ == sys.argv[0], __file__
value = 3
def late():
    threading.main_thread().join()
    import __main__
    os.write(1, f"late {__main__.value}\\n".encode())
threading.Thread(target=late).start()
if os.fork() == 0:
    raise ValueError("of the child")
atexit.register(lambda: os.write(1, f"exit {sys.modules['__main__'].value} {sys.argv[1:]}\\n".encode()))
print("child", os.waitstatus_to_exitcode(os.wait()[1]), repr(sys.stdin.read()), flush=True)
sys.stdout.buffer.write(b"\\xff\\n")
shutil.rmtree(os.getcwd())
sys.stdout.close()
"""


@pytest.mark.parametrize("module", [False, True])
def test_a_program_runs_as_with_python(tmp_path, module):
    folder = tmp_path / "a b [1] *\u00e9"
    folder.mkdir()
    name = "train" if module else "tr ain [2].py"
    (folder / ("train.py" if module else name)).write_text(WHO + AS_WITH_PYTHON)
    what = ["-m", name] if module else [str(folder / name)]
    done = cli("launch", "--log-dir", str(tmp_path / "[l] *"), *what, "x y", "[z]", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix("[worker:0] ") for line in done.stdout.splitlines()]
    assert "ValueError: of the child" in lines
    shown = ["child 1 ''", "\ufffd", "late 3", "exit 3 ['x y', '[z]']"]
    assert [line for line in lines if line in shown] == shown, done.stdout


def test_a_held_terminal_holds_nothing_else(tmp_path):
    script = """
print("x" * 1_000_000, flush=True)
if generation == 0:
    sys.exit(7)
"""
    (tmp_path / "train.py").write_text(WHO + script)
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "unisono", "launch", "--max-restarts", "1", "--spares", "0"]
    with subprocess.Popen(
        [*command, "--log-dir", str(logs), str(tmp_path / "train.py")], stdout=subprocess.PIPE
    ) as run:
        history = logs / "history.jsonl"
        # Nobody reads what the first generation has printed.
        until(
            lambda: history.exists() and '"quit"' in history.read_text(), "the end of the second generation"
        )
        out = run.stdout.read().decode()
    assert run.returncode == 0
    assert out.count("x") == 2_000_000


def test_tasks_that_hang_are_killed_after_the_grace(tmp_path):
    script = """
if me == "worker:1":
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    raise ValueError("x")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(600)
"""
    with launched(tmp_path, script, "-n", "2", "--grace", "0.2", args=[str(tmp_path / "go")]) as run:
        assert run.end() == 1
        assert run.history("ended", task="worker:0")[0]["exit_code"] == 137


CHILDREN = r"""
import subprocess
sleeps = "import os, time; os.write(1, b'child %d\\n' % os.getpid()); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", sleeps])
subprocess.Popen([sys.executable, "-S", "-c", sleeps], start_new_session=True)
# As a daemon: of another session, and nobody's child.
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, b"child %d\n" % os.getpid())  # in one piece: three processes write to one file
        time.sleep(600)
    os._exit(0)
os.wait()
"""


def children_of(run, task):
    """The numbers of the three processes that a task has started."""
    return until(
        lambda: len(p := re.findall(r"child (\d+)\n", run.log(task))) == 3 and [*map(int, p)], "children"
    )


def test_children_of_tasks_end_with_them(tmp_path):
    script = """
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(3)
"""
    with launched(tmp_path, CHILDREN + script, "-n", "1", args=[str(tmp_path / "go")]) as run:
        children = children_of(run, "worker:0")
        assert all(map(is_alive, children))
        (tmp_path / "go").write_text("")
        assert run.end() == 3
        until(lambda: not any(map(is_alive, children)), "the end of the task's children")


def test_no_orphan_when_the_launcher_is_killed(tmp_path):
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" + CHILDREN + "time.sleep(600)\n"
    with launched(tmp_path, script, "-n", "2", "--spares", "1") as run:
        children = {*children_of(run, "worker:0"), *children_of(run, "worker:1")}
        pids = run.everyone() | children
        assert all(map(is_alive, pids))
        run.send(signal.SIGKILL)
        until(lambda: not any(map(is_alive, pids)), "the end of all tasks and their children")


SAVES = """
def save(number, frame):
    print("saved", flush=True)
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, save)
"""


@pytest.mark.parametrize(
    ("number", "task_code", "code"),
    [(signal.SIGTERM, 42, 42), (signal.SIGTERM, 0, 143), (signal.SIGINT, 42, 130)],
)
def test_tasks_save_when_the_launcher_is_stopped(tmp_path, number, task_code, code):
    with launched(tmp_path, SAVES + FOREVER, "-n", "2", args=[str(task_code)]) as run:
        run.wait_for_log("worker:0", "ready")
        run.wait_for_log("worker:1", "ready")
        run.send(number)
        assert run.end() == code
        assert "saved" in run.log("worker:0")
        assert "saved" in run.log("worker:1")


def test_a_second_signal_does_not_wait(tmp_path):
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" + FOREVER
    with launched(tmp_path, script, "-n", "1", "--grace", "600") as run:
        run.wait_for_log("worker:0", "ready")
        run.send(signal.SIGINT)
        run.wait_for("ending")
        run.send(signal.SIGINT)
        assert run.end() == 130


def test_a_stopped_task_is_named(tmp_path):
    with launched(tmp_path, FOREVER, "-n", "2") as run:
        run.wait_for_log("worker:1", "ready")
        pid = run.history("started", task="worker:1")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        assert run.wait_for("stopped")["task"] == "worker:1"
        until(lambda: f"worker:1 is stopped; `kill -CONT {pid}`" in run.err, "the message")


def test_a_task_without_progress_shows_its_stack_and_fails(tmp_path):
    script = """
def stuck():
    time.sleep(600)
# Worker 1 is behind, and not only for the moment in which the other has started and it has not.
other = os.environ["UNISONO_PROGRESS"][:-1] + "1"
while task["index"] == 0 and not (os.path.exists(other) and os.path.getsize(other)):
    time.sleep(0.01)
progress(5 - task["index"])
stuck()
"""
    with launched(tmp_path, script, "-n", "2", "--stall-timeout", "1") as run:
        assert run.end() == 124
        assert "worker:1 made no progress for 1 s after step 4" in run.err
        assert re.search(r"in stuck\n", run.log("worker:1"))


def test_dry_run_starts_nothing_and_can_be_pasted(tmp_path):
    (tmp_path / "train.py").write_text(WHO + "print(me, sys.argv[1:], os.environ['OMP_NUM_THREADS'])\n")
    done = cli("launch", "-n", "2", "--dry-run", "--log-dir", "logs", "train.py", "a b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "logs").exists()
    block = done.stdout.split("\n\n")[1]
    shell = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}\n'
    pasted = subprocess.run(
        ["sh", "-c", shell + block], capture_output=True, text=True, timeout=LIMIT, check=False, cwd=tmp_path
    )
    assert re.fullmatch(r"worker:1 \['a b'\] \d+\n", pasted.stdout), pasted.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["launch", "--workes", "2", "train.py"], "No such option"),
        (["launch", "-n", "two", "train.py"], "`-n` takes the number of workers. Received: -n two"),
        (["launch", "-n", "0", "train.py"], "`-n` must be at least 1"),
        (["launch", "-n", "2", "absent.py"], "absent.py"),
        (["launch", "--elastic", "3", "absent.py"], "--elastic 2:4"),
        (["launch", "-n", "2"], "Missing argument"),
        (["launhc"], "No such command"),
    ],
)
def test_what_cannot_be_used_is_an_error(args, words):
    done = cli(*args)
    assert done.returncode == 2, done.stdout
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_one_launcher_per_directory(tmp_path):
    with launched(tmp_path, FOREVER, "-n", "1") as run:
        run.wait_for_log("worker:0", "ready")
        done = cli("launch", "--log-dir", str(run.logs), str(tmp_path / "train.py"))
        assert done.returncode == 2
        assert "one launcher at a time" in done.stderr


def test_help_imports_nothing_slow():
    code = (
        "import sys\nfrom unisono.cli._app import app\n"
        "try:\n    app(['launch', '--help'])\nexcept SystemExit:\n    pass\n"
        "import unisono.launcher._launch\n"
        "print({'jax', 'keras', 'numpy', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr


def test_workers_that_compute_apart_are_told_so(tmp_path):
    script = "import jax\njax.numpy.ones(1)\nsys.exit(0)\n"
    with launched(tmp_path, script, "-n", "2") as run:
        assert run.end() == 0
        for task in ("worker:0", "worker:1"):
            assert "alone, and TF_CONFIG names 2 workers" in run.log(task)
