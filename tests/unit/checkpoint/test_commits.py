"""Commits survive what disks and kills do to files."""

import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from unisono._errors import CheckpointError
from unisono.checkpoint.commits import _commits, _manifests
from unisono.checkpoint.commits._manifests import MANIFEST


def is_dir(folder):
    return folder.is_dir()


def write(text):
    def fill(folder):
        (folder / "inner").mkdir()
        (folder / "inner" / "a.bin").write_bytes(text * 1000)
        (folder / "b.txt").write_text("b")

    return fill


def made(directory, *numbers):
    return [_commits.write_commit(directory, f"ckpt-{n}", write(b"%d" % n)) for n in numbers]


def check_commit(path):
    _commits.read_commit(path, is_dir)


def test_a_commit_holds_what_was_written_and_nothing_is_left_beside_it(tmp_path):
    (path,) = made(tmp_path, 1)
    check_commit(path)
    assert (path / "inner" / "a.bin").read_bytes() == b"1" * 1000
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt-1"]


def test_commits_are_found_in_the_order_of_their_numbers(tmp_path):
    made(tmp_path, 10, 9, 2)
    (tmp_path / "ckpt-x").mkdir()
    assert [n for n, _ in _commits.commits(tmp_path, "ckpt")] == [2, 9, 10]
    assert _commits.commits(tmp_path / "absent", "ckpt") == []


def test_numbers_go_on_after_whatever_has_such_a_name(tmp_path):
    assert _commits.newest_number(tmp_path / "absent", "ckpt") == 0
    made(tmp_path, 2)
    (tmp_path / "ckpt-7").symlink_to("nowhere")
    (tmp_path / "ckpt-9").write_text("a file")
    assert _commits.newest_number(tmp_path, "ckpt") == 9
    assert [n for n, _ in _commits.commits(tmp_path, "ckpt")] == [2]


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "cut": (cut, "has 999 bytes instead of 1000"),
    "flipped": (flip, "has other contents"),
    "gone": (os.remove, "is missing"),
    "empty": (lambda file: file.write_bytes(b""), "has 0 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_and_named_and_the_one_before_serves(tmp_path, caplog, damage):
    first, second = made(tmp_path, 1, 2)
    harm, message = DAMAGE[damage]
    harm(second / "inner" / "a.bin")
    with pytest.raises(CheckpointError, match=rf"inner/a.bin {message}"):
        check_commit(second)
    with caplog.at_level(logging.WARNING, logger="unisono"):
        assert _commits.newest_good(tmp_path, "ckpt", is_dir) == (first, True)
    assert "inner/a.bin" in caplog.text
    assert "ckpt-1, the newest checkpoint that is as it was written" in caplog.text


def test_what_is_replaced_while_it_is_read_is_read_again(tmp_path):
    """Two files of one commit must be of one moment, whatever another process writes over it meanwhile."""
    path = _commits.write_commit(tmp_path, "best", write(b"1"))
    seen = []

    def replace(text):
        _commits.write_commit(tmp_path, "best", write(text), replaces=True)

    def read(folder):
        first = (folder / "inner" / "a.bin").read_bytes()[:1]
        seen.append(first)
        if first < b"3":
            replace(b"%d" % (int(first) + 1))
        if first == b"2":
            # Its file is gone, or is another's: no damage.
            raise CheckpointError("ends early")
        return first, (folder / "inner" / "a.bin").read_bytes()[:1]

    assert _commits.read_commit(path, read) == (b"3", b"3")
    assert seen == [b"1", b"2", b"3"]


def test_what_is_replaced_all_the_time_is_an_error(tmp_path):
    path = _commits.write_commit(tmp_path, "best", write(b"0"))
    texts = iter(range(1, 100))

    def read(folder):
        _commits.write_commit(tmp_path, "best", write(b"%d" % next(texts)), replaces=True)

    with pytest.raises(CheckpointError, match="replaced 10 times meanwhile"):
        _commits.read_commit(path, read)


def test_what_is_replaced_and_gone_while_it_is_read_is_not_taken(tmp_path):
    """Another process may be in the middle of the next replacement: what was read may be of two moments."""
    path = _commits.write_commit(tmp_path, "best", write(b"1"))

    def read(folder):
        first = (folder / "inner" / "a.bin").read_bytes()
        _commits.write_commit(tmp_path, "best", write(b"2"), replaces=True)
        second = (folder / "inner" / "a.bin").read_bytes()
        path.rename(tmp_path / "aside")
        return first, second

    with pytest.raises(CheckpointError, match="best"):
        _commits.read_commit(path, read)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_is_noticed(tmp_path, damage):
    (path,) = made(tmp_path, 1)
    DAMAGE[damage][0](path / MANIFEST)
    with pytest.raises(
        CheckpointError, match=r"MANIFEST.json (is missing|cannot be read|has other contents)"
    ):
        check_commit(path)


def as_pipe(file):
    file.unlink()
    os.mkfifo(file)


def as_loop(file):
    file.unlink()
    file.symlink_to(file.name)


def as_directory(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("name", [MANIFEST, "b.txt"])
@pytest.mark.parametrize("harm", [as_pipe, as_loop, as_directory])
def test_what_is_not_a_file_is_damage(tmp_path, harm, name):
    """Reading a pipe would wait for ever."""
    first, second = made(tmp_path, 1, 2)
    harm(second / name)
    with pytest.raises(CheckpointError, match=rf"{name} (is not a file|cannot be read)"):
        check_commit(second)
    assert _commits.newest_good(tmp_path, "ckpt", is_dir) == (first, True)


@pytest.mark.parametrize("text", ["[]", "null", "1", '"x"', '{"sha256": 1}', "[" * 100_000])
def test_a_manifest_of_another_kind_is_damage(tmp_path, text):
    (path,) = made(tmp_path, 1)
    (path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"MANIFEST.json (cannot be read|has other contents)"):
        check_commit(path)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    (path,) = made(tmp_path, 1)
    manifest = path / MANIFEST
    good = manifest.read_bytes()
    for i in range(0, len(good), 7):
        for bit in (0, 4):
            data = bytearray(good)
            data[i] ^= 1 << bit
            manifest.write_bytes(data)
            if _same_meaning(bytes(data), good):
                continue
            with pytest.raises(CheckpointError):
                check_commit(path)


def _same_meaning(data, good):
    """White space of another kind means the same."""
    try:
        return json.loads(data) == json.loads(good)
    except ValueError:
        return False


def test_all_damaged_is_an_error_not_a_new_beginning(tmp_path):
    for path in made(tmp_path, 1, 2):
        flip(path / "inner" / "a.bin")
    with pytest.raises(CheckpointError, match=r"2, all damaged; the newest: .*ckpt-2"):
        _commits.newest_good(tmp_path, "ckpt", is_dir)


@pytest.mark.parametrize("when", ["between two looks", "while they are read"])
def test_another_process_replaces_all_that_were_listed(tmp_path, monkeypatch, when):
    """Of a machine that was lost, it may write and delete until it sees the fence."""
    (first,) = made(tmp_path, 1)

    def replace():
        made(tmp_path, 2)
        _commits.delete_commit(first)

    def read(folder):
        if folder == first:
            replace()
            raise CheckpointError("it is missing")
        return True

    if when == "between two looks":
        listed = _commits._entries(tmp_path)
        answers = [listed]
        monkeypatch.setattr(
            _commits, "_entries", lambda folder: answers.pop() if answers else listdir(folder)
        )
        replace()
    assert _commits.newest_good(tmp_path, "ckpt", read) == (tmp_path / "ckpt-2", True)


def listdir(folder):
    return [*folder.iterdir()]


def test_a_newer_format_is_refused(tmp_path, monkeypatch, tuned):
    tuned(_manifests, FORMAT=2)
    (path,) = made(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="Install a newer unisono"):
        check_commit(path)


def test_an_absent_commit_and_a_name_twice(tmp_path):
    with pytest.raises(CheckpointError, match="there is no directory"):
        check_commit(tmp_path / "ckpt-1")
    made(tmp_path, 1)
    with pytest.raises(CheckpointError, match="which exists"):
        made(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt-1"]


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (KeyError("a"), KeyError, "a"),
        (OSError(errno.EIO, "broken"), CheckpointError, "completely. Received: .*broken at .*ckpt-1"),
        (OSError(errno.EDQUOT, "quota"), CheckpointError, "needs room on the disk"),
    ],
)
def test_what_raises_while_writing_leaves_nothing(tmp_path, raised, error, message):
    def fill(folder):
        (folder / "a").write_text("a")
        raise raised

    with pytest.raises(error, match=message):
        _commits.write_commit(tmp_path, "ckpt-1", fill)
    assert list(tmp_path.iterdir()) == []


#: When a process that writes a commit ends itself with SIGKILL.
MOMENTS = ["writing", "flushing", "before the rename", "after the rename"]

#: Writes commit 2 in each directory of its arguments, in a process of its own that is killed at this moment.
KILLED = """
import os, pathlib, signal, sys
from unisono.checkpoint.commits import _commits

def write(directory, moment):
    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)
    def fill(folder):
        (folder / "a.bin").write_bytes(b"2" * 1000)
        if moment == "writing":
            die()
    if moment == "flushing":
        _commits.flush_tree = die
    if moment == "before the rename":
        os.rename = die
    if moment == "after the rename":
        _commits.flush = lambda path: die() if path == directory else None
    _commits.write_commit(directory, "ckpt-2", fill)

for path in map(pathlib.Path, sys.argv[1:]):
    child = os.fork()
    if not child:
        write(path, path.name)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A directory for each moment, in which commit 1 is whole."""
    root = tmp_path_factory.mktemp("killed")
    for moment in MOMENTS:
        made(root / moment, 1)
    command = [sys.executable, "-c", KILLED, *(str(root / moment) for moment in MOMENTS)]
    done = subprocess.run(command, check=False, timeout=120, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["-9"] * len(MOMENTS)
    return root


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_saving_leaves_the_old_or_the_new_whole(killed, moment):
    folder = killed / moment
    path, _ = _commits.newest_good(folder, "ckpt", is_dir)
    number = int(path.name.removeprefix("ckpt-"))
    assert number == (2 if moment == "after the rename" else 1)
    check_commit(path)
    assert len(_commits.sweep(folder)) == (0 if moment == "after the rename" else 1)
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    made(folder, 3)


KILLED_REPLACING = """
import os, pathlib, signal, sys
from unisono.checkpoint.commits import _commits

rename, calls = os.rename, []

def die_second(*names):
    calls.append(names)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*names)

os.rename = die_second
folder = pathlib.Path(sys.argv[1])
_commits.write_commit(folder, "ckpt-1", lambda aside: (aside / "a.bin").write_bytes(b"2"), replaces=True)
"""


def test_a_kill_while_replacing_leaves_the_old_one(tmp_path):
    (path,) = made(tmp_path, 1)
    done = subprocess.run([sys.executable, "-c", KILLED_REPLACING, str(tmp_path)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(_commits.sweep(tmp_path)) == 1
    check_commit(path)
    assert (path / "inner" / "a.bin").read_bytes() == b"1" * 1000
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt-1"]


def test_one_is_replaced_only_where_that_is_wanted(tmp_path):
    (path,) = made(tmp_path, 1)
    with pytest.raises(CheckpointError, match="must have a new name"):
        made(tmp_path, 1)
    _commits.write_commit(tmp_path, "ckpt-1", write(b"2"), replaces=True)
    assert (path / "inner" / "a.bin").read_bytes() == b"2" * 1000
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt-1"]


def test_names_are_flushed_before_and_after_what_a_sweep_deletes(tmp_path, monkeypatch):
    """A power loss must neither undo the dead process' renames, nor bring back a half-deleted commit."""
    order, flush, remove = [], _commits.flush, _commits._remove
    monkeypatch.setattr(_commits, "flush", lambda path: (order.append(f"flush {path.name}"), flush(path)))
    monkeypatch.setattr(_commits, "_remove", lambda path: (order.append("delete"), remove(path)))
    (tmp_path / "run").mkdir()
    for kind in ("partial", "replaced"):
        (tmp_path / "run" / f".best.{socket.gethostname()}@{2**30}.00000000.{kind}").mkdir()
    (tmp_path / "run" / "best").mkdir()
    assert len(_commits.sweep(tmp_path / "run")) == 2
    assert order == ["flush run", "delete", "delete", "flush run"]
    order.clear()
    _commits.sweep(tmp_path / "run")
    assert order == []


def test_what_a_living_process_writes_is_not_swept(tmp_path):
    aside = tmp_path / f".ckpt-2.{os.uname().nodename}@{os.getpid()}.0a1b2c3d.partial"
    aside.mkdir()
    assert _commits.sweep(tmp_path) == []
    assert aside.exists()


def small_disk_works():
    """Whether this user may mount a file system of its own."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
    return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0


@pytest.mark.skipif(not small_disk_works(), reason="needs user namespaces: `unshare -rm` with a tmpfs")
def test_a_full_disk_says_so_and_keeps_what_was_there(tmp_path):
    """A real file system of 1 MiB: the second commit does not fit."""
    program = textwrap.dedent(f"""
        import pathlib
        from unisono._errors import CheckpointError
        from unisono.checkpoint.commits import _commits
        disk = pathlib.Path({str(tmp_path)!r})
        def fill(folder):
            (folder / "a.bin").write_bytes(bytes(600_000))
        _commits.write_commit(disk, "ckpt-1", fill)
        try:
            _commits.write_commit(disk, "ckpt-2", fill)
        except CheckpointError as error:
            print(error)
        print([p.name for p in disk.iterdir()], _commits.newest_good(disk, "ckpt", str)[0].name)
    """)
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -c "$3"', "sh",
         str(tmp_path), sys.executable, program],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Received: a full one" in done.stdout
    assert "['ckpt-1'] ckpt-1" in done.stdout


def test_of_a_commit_that_is_a_link_the_link_is_deleted(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("x")
    directory = tmp_path / "backups"
    directory.mkdir()
    (directory / "backup-1").symlink_to(elsewhere)
    assert [number for number, _ in _commits.commits(directory, "backup")] == [1]
    _commits.delete_commit(directory / "backup-1")
    assert list(directory.iterdir()) == []
    # One that another process had set aside when it was killed.
    (directory / f".backup-2.{socket.gethostname()}@{2**30}.00000000.partial").symlink_to(elsewhere)
    assert len(_commits.sweep(directory)) == 1
    assert list(directory.iterdir()) == []
    assert (elsewhere / "data").read_text() == "x"


@pytest.mark.parametrize("name", ["file", "file/below", "dangling", "x" * 300, "null\0byte"])
@pytest.mark.parametrize("writes", [True, False])
def test_a_place_that_is_no_directory_is_an_error(tmp_path, name, writes):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "file" / "absent")
    with pytest.raises(CheckpointError, match=r"need a directory that can be read and written. Received: '/"):
        _commits.check_place(tmp_path / name, writes=writes)


@pytest.mark.parametrize("name", ["file", "file/below", "dangling"])
def test_a_commit_at_a_wrong_place_is_one_error(tmp_path, name):
    """And not a chain of the system's errors."""
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "file" / "absent")
    with pytest.raises(CheckpointError, match=r"can be read and written. Received: '/.* \(.*\)") as raised:
        _commits.write_commit(tmp_path / name, "backup-1", lambda folder: None)
    assert raised.value.__suppress_context__
    assert raised.value.__cause__ is None


def test_a_directory_of_commits_is_no_commit(tmp_path):
    for number in (1, 2):
        _commits.write_commit(tmp_path, f"ck-{number}", lambda folder: (folder / "data").write_text("x"))
    text = r"must be named. Received: .*, a directory of 2. Write .*latest_checkpoint\(.*/ck-2'"
    with pytest.raises(CheckpointError, match=text):
        check_commit(tmp_path)


def test_a_file_of_keras_is_no_commit(tmp_path):
    (tmp_path / "model.keras").write_text("")
    with pytest.raises(CheckpointError, match=r"a file of Keras. Write `keras.models.load_model\('/"):
        check_commit(tmp_path / "model.keras")


def test_a_place_without_permission_is_an_error(tmp_path, monkeypatch):
    # The superuser, who runs some suites, may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match="files cannot be made there"):
        _commits.check_place(tmp_path, writes=True)
    _commits.check_place(tmp_path, writes=False)


def test_a_place_is_made_where_it_is_written(tmp_path):
    _commits.check_place(tmp_path / "a" / "b", writes=False)
    assert not (tmp_path / "a").exists()
    _commits.check_place(tmp_path / "a" / "b", writes=True)
    assert (tmp_path / "a" / "b").is_dir()


def test_what_another_process_has_deleted_is_deleted(tmp_path):
    """Two that sweep at the same time find the same files."""
    _commits._remove(tmp_path / "gone")
    _commits.delete_commit(tmp_path / "gone")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_in_a_folder_that_may_not_be_entered_is_no_error_of_the_system(tmp_path, monkeypatch):
    def denied(path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(type(tmp_path), "stat", denied)
    # Python 3.14 asks in another way, and sees no directory.
    with pytest.raises(CheckpointError, match=r"ckpt-1, where .*(Permission denied|no directory)"):
        _manifests.read_manifest(tmp_path / "ckpt-1")
