"""Mistakes in what a parameter server keeps on its disk; the first seven were found in the project itself."""

from tests.simulation._mistakes import Mistake

_DURABLE = "parameter_server.server._durable:DurableStore"
_JOURNAL = "parameter_server.state._journal:FileJournal"
_RECORDS = "parameter_server.state._records"
_CONTAINER = "parameter_server.state._container"
_ACKNOWLEDGED = "parameter_server.state._acknowledged"
_RENAME = "_system._files:rename_durably"

MISTAKES = (
    Mistake(
        "a server that was killed before its first note counts as damaged",
        ("logs",), f"{_DURABLE}._from_log", "if noted is None and self._journal.is_new:", "if False:",
    ),
    Mistake(
        "a server's folder is not flushed in the one above",
        ("snapshots",), f"{_DURABLE}.__init__", "make_folder(self._directory, 0o700)",
        "self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)",
    ),
    Mistake(
        "parts of snapshots of killed servers stay",
        ("snapshots",), f"{_DURABLE}._recover", "self._sweep_partial()", "pass",
    ),
    Mistake(
        "the part of a snapshot that a full disk has refused stays",
        ("snapshots",), f"{_CONTAINER}:SnapshotWriter.__exit__",
        "finally:\n            self._aside.unlink(missing_ok=True)",
        "except ValueError:\n            pass\n        self._aside.unlink(missing_ok=True)",
    ),
    Mistake(
        "behind a damaged note numbers begin again",
        ("damaged_logs",), f"{_DURABLE}._damaged", "(highest // _NUMBERS + 1) * _NUMBERS",
        "1 + max(known.number, found.number)",
    ),
    Mistake(
        "records of an earlier boot belong to the log",
        ("reboots",), f"{_RECORDS}:RecordFile.commit", "zlib.crc32(header, self._file)",
        "zlib.crc32(header)",
        ((f"{_RECORDS}:_read_record", "zlib.crc32(raw[:-4], file)", "zlib.crc32(raw[:-4])"),),
    ),
    Mistake(
        "snapshots behind a damaged one are older than it",
        ("snapshots",), f"{_DURABLE}._recover",
        "number = max([recovery.changes, *(int(name.rpartition(\"-\")[2]) for name in names)])",
        "number = recovery.changes",
    ),
    Mistake(
        "a log of another boot is read",
        ("logs",), f"{_RECORDS}:read_records", "if boot.decode(\"ascii\", \"replace\") != boot_id():",
        "if False:",
        ((f"{_JOURNAL}.read_image", "if container.boot == boot_id():", "if True:"),),
    ),
    Mistake(
        "arrays of records are not compared with their checksum",
        ("damaged_logs",), f"{_RECORDS}:_read_record",
        "if checksum(content[begin + ALIGNMENT : begin + meta_at]) != arrays_checksum:", "if False:",
    ),
    Mistake(
        "a log that ends early is taken as it is",
        ("damaged_logs",), f"{_DURABLE}._from_log", "if found.number < acknowledged.number:", "if False:",
    ),
    Mistake(
        "rows of tables are not compared with their checksums",
        ("damaged_logs",), f"{_DURABLE}._replayed",
        "if isinstance(table, Table) and len(rows := table.damaged_rows()):", "if False:",
    ),
    Mistake(
        "arrays of an image are not compared with their checksums",
        ("damaged_logs",), f"{_CONTAINER}:_arrays", "if checksum(raw) != place[\"checksum\"]:", "if False:",
    ),
    Mistake(
        "a snapshot is renamed before it is flushed",
        ("snapshots",), f"{_CONTAINER}:SnapshotWriter.finish", "rename_durably(self._aside, self._path)",
        "self._aside.replace(self._path)",
    ),
    Mistake(
        "the newest snapshot is deleted",
        ("snapshots",), f"{_DURABLE}.snapshot", "self._snapshots()[_KEPT:]", "self._snapshots()[:-1]",
    ),
    Mistake(
        "the log begins again without an image",
        ("logs",), f"{_JOURNAL}.begin_log",
        "self._images[self._turn].write(self.position.number, state, arrays)", "pass",
    ),
    Mistake(
        "a change for which there is no room is applied",
        ("logs",), f"{_JOURNAL}.begin_log", "            raise ClusterError(",
        "            return\n            raise ClusterError(",
    ),
    # --- notes
    Mistake(
        "the older of two notes counts",
        ("damaged_logs",), f"{_ACKNOWLEDGED}:AcknowledgedFile.read", "max(found)[1:]", "min(found)[1:]",
    ),
    Mistake(
        "notes of what was acknowledged have one place",
        ("logs",), f"{_ACKNOWLEDGED}:AcknowledgedFile.note", "_PLACE * (position.number % 2)", "0",
    ),
    Mistake(
        "a note is not compared with its checksum",
        ("damaged_logs",), f"{_ACKNOWLEDGED}:AcknowledgedFile.read", "if checksum(raw[:-8]) == own:",
        "if True:",
    ),
    Mistake(
        "a note that was never completed counts as damaged",
        ("logs",), f"{_ACKNOWLEDGED}:AcknowledgedFile.is_empty", "content[_NOTE.size - 1 :]", "content",
    ),
    Mistake(
        "updates of the job before count",
        ("damaged_logs",), f"{_ACKNOWLEDGED}:LogPosition.after", "0 if kind == \"reset\" else ", "",
    ),
    Mistake(
        "the first image is written before the first note",
        ("logs",), f"{_JOURNAL}.begin_log",
        "self.acknowledged.note(self.position)\n"
        "            self._images[self._turn].write(self.position.number, state, arrays)",
        "self._images[self._turn].write(self.position.number, state, arrays)\n"
        "            self.acknowledged.note(self.position)",
    ),
    # --- logs and images
    Mistake(
        "the image that was read is written over first",
        ("logs",), f"{_JOURNAL}.read_image", "self._turn = 1 - turn", "self._turn = turn",
    ),
    Mistake(
        "a table that is just made is swept",
        ("logs",), f"{_JOURNAL}.begin_log", " or int(number) >= state[\"next\"]", "",
    ),
    Mistake(
        "descriptions of records are not compared with their checksum",
        ("damaged_logs",), f"{_RECORDS}:_read_record", "if zlib.crc32(body) != meta_checksum:", "if False:",
    ),
    Mistake(
        "the description of an image is not compared with its checksum",
        ("damaged_logs",), f"{_CONTAINER}:read_container", "if zlib.crc32(body) != body_checksum:",
        "if False:",
    ),
    Mistake(
        "the header of an image is not compared with its checksum",
        ("damaged_logs",), f"{_CONTAINER}:read_container",
        "if magic != _MAGIC or zlib.crc32(raw[:-4]) != own:", "if magic != _MAGIC:",
    ),
    # --- snapshots
    Mistake(
        "numbers of snapshots are compared as texts",
        ("snapshots",), f"{_DURABLE}.snapshot", "{self.number:020d}", "{self.number}",
    ),
    Mistake(
        "the end of a snapshot waits in a buffer",
        ("snapshots",), f"{_CONTAINER}:SnapshotWriter.finish", "file.flush()\n", "pass\n",
    ),
    Mistake(
        "older snapshots are deleted before the new one is written",
        ("snapshots",), f"{_DURABLE}.snapshot",
        "number = self._write_snapshot(self._directory / name, tables)",
        "[path.unlink() for path in self._snapshots()]\n"
        "                number = self._write_snapshot(self._directory / name, tables)",
    ),
    Mistake(
        "the name of a snapshot is not flushed",
        ("snapshots",), _RENAME, "flush(path.parent)", "pass",
    ),
    Mistake(
        "the content of a snapshot is not flushed",
        ("snapshots",), _RENAME, "flush(aside)", "pass",
    ),
)  # fmt: skip
