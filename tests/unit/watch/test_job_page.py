"""The page beside a launch and beside a log folder: what is printed, how it ends, and what is left."""

import json
import re
import threading
import time
import urllib.request

import pytest
from tests.unit.watch.test_page import data_in
from tests.unit.watch.test_page_timeline import LaunchFiles, killed
from typer.testing import CliRunner

from unisono._errors import InvalidArgumentError
from unisono.cli import _page_flags
from unisono.cli._app import app
from unisono.watch._job_reader import JobReader
from unisono.watch._log_folder import LocalFolder
from unisono.watch.web import _job_page
from unisono.watch.web._job_page import watch_on_page

LIMIT = 240.0


def until(condition, what):
    deadline = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)
    return value


class Watcher:
    """`unisono watch --web` in a thread of this process."""

    def __init__(self, folder):
        self.lines = []
        self.thread = threading.Thread(
            target=watch_on_page, args=(JobReader(LocalFolder(folder)), "127.0.0.1:0", self.lines.append)
        )
        self.thread.start()
        until(lambda: len(self.lines) >= 2, "the address")

    @property
    def address(self):
        return re.search(r"http://\S+/", self.lines[0])[0]


def test_a_page_beside_a_folder_ends_with_the_job_and_leaves_a_copy(tmp_path, tuned):
    tuned(_job_page, _LOOK=0.05)
    files = LaunchFiles(tmp_path)
    (tmp_path / "worker-0.log").write_text("the log\n")
    parts = killed(files)
    next(parts)
    watcher = Watcher(tmp_path)
    with urllib.request.urlopen(watcher.address + "events", timeout=LIMIT) as events:
        assert b"retry" in events.readline()
        for _ in parts:
            pass
        watcher.thread.join(LIMIT)
        seen = events.read().decode()
    assert seen.rstrip().rpartition("\n\n")[2].startswith("event: end")
    port = re.search(r":(\d+)/", watcher.address)[1]
    assert re.search(rf"`ssh -L {port}:127\.0\.0\.1:{port} \S+`", watcher.lines[1])
    assert watcher.lines[2:] == [f"unisono: the page is kept in {tmp_path}/timeline.html"]
    copy = data_in((tmp_path / "timeline.html").read_text())
    assert copy["job"]["state"] == "ended"
    assert copy["logs"]["worker:0"] == "the log\n"
    assert copy == json.loads(seen.rstrip().rpartition("data: ")[2])


def test_the_page_of_a_job_that_has_ended_is_served_until_ctrl_c(tmp_path, monkeypatch):
    files = LaunchFiles(tmp_path)
    for _ in killed(files):
        pass
    looks, lines = [], []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(_job_page.time, "sleep", sleep)
    watch_on_page(JobReader(LocalFolder(tmp_path)), "127.0.0.1:0", lines.append)
    assert (len(looks), len(lines)) == (3, 2)
    # Whoever asks for a copy of a job that runs, or has ended, has `unisono timeline`.
    assert not (tmp_path / "timeline.html").exists()


@pytest.mark.parametrize("flags", [["--on", "slurm"], ["--cluster", "localhost:1"], ["--dry-run"]])
def test_launches_elsewhere_have_no_page_here(tmp_path, flags):
    (tmp_path / "train.py").touch()
    result = CliRunner().invoke(app, ["launch", "--web", *flags, str(tmp_path / "train.py")])
    assert isinstance(result.exception, InvalidArgumentError)
    assert "unisono watch --web LOGDIR" in str(result.exception)


def test_an_address_without_a_page_is_an_error():
    assert _page_flags.page_address(False, None) is None
    assert _page_flags.page_address(True, None) == "127.0.0.1:0"
    assert _page_flags.page_address(True, "localhost:8080") == "localhost:8080"
    with pytest.raises(InvalidArgumentError, match="Write `--web --web-address localhost:8080`"):
        _page_flags.page_address(False, "localhost:8080")


def test_an_address_in_use_ends_the_launch_before_it_begins(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    flags = ["--log-dir", str(tmp_path / "logs"), "--web", "--web-address", "192.0.2.1:0"]
    result = CliRunner().invoke(app, ["launch", *flags, str(tmp_path / "train.py")])
    assert isinstance(result.exception, InvalidArgumentError)
    assert "must be one of this machine" in str(result.exception)
    assert not (tmp_path / "logs" / "history.jsonl").exists()
