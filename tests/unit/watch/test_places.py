"""Where a job is that somebody wants to see."""

import json
import os

import pytest

from unisono._errors import InvalidArgumentError
from unisono.watch import _ray_folder
from unisono.watch._places import find_job, log_folders


def log_folder(path, at, title="train.py"):
    path.mkdir(parents=True)
    (path / "launch.json").write_text(json.dumps({"title": title}))
    (path / "history.jsonl").write_text("")
    for name in ("launch.json", "history.jsonl"):
        os.utime(path / name, (at, at))
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path


def test_the_newest_log_folder_here_or_of_launches_without_one_is_shown(here):
    with pytest.raises(InvalidArgumentError, match=r"Received: none in .*here and .*tmp"):
        find_job(None)
    old = log_folder(here / "here" / "logs", 1000)
    (here / "here" / "data").mkdir()
    assert find_job(None).name == str(old)
    new = log_folder(here / "tmp" / "unisono-abc", 2000)
    log_folder(here / "tmp" / "other", 3000)
    assert find_job(None).name == str(new)
    assert log_folders(here / "here") == [new, old]


def test_a_folder_or_a_name_is_looked_for(here, monkeypatch):
    monkeypatch.setattr(_ray_folder, "_has_ray", lambda: False)
    logs = log_folder(here / "here" / "logs", 1000)
    log_folder(here / "here" / "more", 2000, "other.py")
    assert find_job("logs").name == "logs"
    assert find_job("train.py").name == str(logs)
    # The title has the arguments, too; the job on Ray is the script.
    servers = {"kind": "ray", "launch": "on_ray.py/01", "address": "auto"}
    record = {"title": "on_ray.py --lr 1", "servers": servers}
    (logs / "launch.json").write_text(json.dumps(record))
    assert find_job("on_ray.py").name == str(logs)
    with pytest.raises(InvalidArgumentError, match="neither"):
        find_job(str(here))
    with pytest.raises(InvalidArgumentError, match="no job has this name"):
        find_job("nothing.py")
