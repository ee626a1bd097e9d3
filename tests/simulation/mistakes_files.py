"""Mistakes in how files are written, each one that somebody has made somewhere."""

from tests.simulation._planted import Mistake

_COMMITS = "unisono.checkpoint.commits._commits"
_UPLOADS = "unisono.checkpoint.commits._uploads"
_MANIFESTS = "unisono.checkpoint.commits._manifests"
_FILES = "unisono._system._files"
_SERIES = "unisono.checkpoint._series"

MISTAKES = (
    Mistake(
        "files are not flushed before the rename",
        f"{_COMMITS}:_rename_commit",
        "flush_tree(aside)",
        "pass",
        "disk",
    ),
    Mistake(
        "the rename is not flushed", f"{_COMMITS}:_rename_commit", "\n        flush(directory)", "", "disk"
    ),
    Mistake(
        "files are flushed, their names are not",
        f"{_FILES}:flush_tree",
        "\n    flush(path)",
        "\n    pass",
        "disk",
    ),
    Mistake(
        "the folder is flushed, its files are not",
        f"{_FILES}:flush_tree",
        "for inner in",
        "for inner in () and",
        "disk",
    ),
    Mistake(
        "the folder of checkpoints is not flushed in the one above",
        f"{_FILES}:make_folder",
        "flush(folder)",
        "pass",
        "disk",
    ),
    Mistake("fsync is left out", f"{_FILES}:flush", "os.fsync(descriptor)", "pass", "disk"),
    Mistake(
        "the rename is before the manifest",
        f"{_COMMITS}:_rename_commit",
        "(aside / MANIFEST).write_text(make_manifest(aside)[1])",
        "text = make_manifest(aside)[1]; target.exists() or os.rename(aside, target); "
        "aside = target; (aside / MANIFEST).write_text(text)",
        "disk",
    ),
    Mistake(
        "a checkpoint is written in place",
        f"{_COMMITS}:_rename_commit",
        "aside = _aside(target)",
        "aside = target",
        "disk",
    ),
    Mistake(
        "a checkpoint is deleted in place",
        f"{_COMMITS}:delete_commit",
        "os.rename(path, aside)",
        "aside = path",
        "disk",
    ),
    Mistake(
        "the replaced one is deleted before the rename",
        f"{_COMMITS}:_rename_commit",
        'swap_folder(aside, target, aside.with_suffix(".replaced"))',
        "_remove(target); os.rename(aside, target)",
        "disk",
    ),
    Mistake(
        "a name is not flushed before what it named is deleted",
        f"{_COMMITS}:delete_commit",
        "flush(path.parent)",
        "pass",
        "disk",
    ),
    Mistake(
        "names are not flushed before the old one is deleted",
        f"{_COMMITS}:_rename_commit",
        "flush(directory)\n            _remove",
        "_remove",
        "disk",
    ),
    Mistake("remains of dead processes are not swept", f"{_COMMITS}:sweep", "_remove(path)", "pass", "disk"),
    Mistake(
        "remains of living processes are swept",
        f"{_COMMITS}:sweep",
        'not _is_alive(int(match["pid"]))',
        "True",
        "rivals",
    ),
    Mistake(
        "the manifest is not compared",
        f"{_MANIFESTS}:check_files",
        'if _hash(file) != entry["sha256"]:',
        "if False:",
        "damage",
    ),
    Mistake("the newest is taken, damaged or not", f"{_COMMITS}:_first_good", "continue", "raise", "damage"),
    Mistake(
        "a checkpoint of a newer version is read",
        f"{_MANIFESTS}:parse_manifest",
        "if version is not None and version > FORMAT:",
        "if False:",
        "damage",
    ),
    Mistake(
        "files of a manifest may lie elsewhere",
        f"{_MANIFESTS}:_problem_of",
        "names_problem(files) or ",
        "",
        "damage",
    ),
    Mistake(
        "the folder of a manifest may lie elsewhere",
        f"{_MANIFESTS}:_problem_of",
        "None if folder is None else name_problem(folder)",
        "None",
        "damage",
    ),
    Mistake(
        "numbers are compared as texts",
        f"{_COMMITS}:_numbered",
        "(int(match[1]), match[0])",
        "(match[1], match[0])",
        "disk",
    ),
    Mistake(
        "the number of a damaged one is used again",
        f"{_COMMITS}:newest_number",
        "names = {path.name for path in _entries(directory)}",
        "names = {path.name for path in _entries(directory) if (path / MANIFEST).is_file()}",
        "damage",
    ),
    Mistake(
        "old ones are deleted before the new one is complete",
        f"{_SERIES}:CommitSeries.write",
        'name = f"{self._name}-{number}"',
        'name = f"{self._name}-{number}"; self.delete(self.paths())',
        "disk",
    ),
    Mistake(
        "the newest one is deleted, too",
        f"{_SERIES}:CommitSeries.trim",
        "[: -self._keep]",
        "[-self._keep :]",
        "disk",
    ),
    Mistake(
        "one too many is kept",
        f"{_SERIES}:CommitSeries.trim",
        "[: -self._keep]",
        "[: -self._keep - 1]",
        "disk",
    ),
    Mistake(
        "names that are being written are seen",
        f"{_COMMITS}:manifests",
        'if not path.name.startswith("."):',
        "if True:",
        "disk",
    ),
    # in an object store
    Mistake(
        "the manifest is uploaded first",
        f"{_UPLOADS}:upload_commit",
        'for name in manifest["files"]:',
        '(target / MANIFEST).write_bytes(text.encode())\n            for name in manifest["files"]:',
        "object_store",
    ),
    Mistake(
        "two uploads share a folder",
        f"{_UPLOADS}:upload_commit",
        'folder = f"data-{secrets.token_hex(4)}"',
        'folder = "data-00000000"',
        "rivals_in_store",
    ),
    Mistake(
        "the claim is not read again",
        f"{_UPLOADS}:upload_commit",
        "_require_claim(directory)\n        except",
        "pass\n        except",
        "rivals_in_store",
    ),
    Mistake(
        "a lost answer is an error",
        f"{_UPLOADS}:_write_manifest",
        "if path.read_bytes() == text:",
        "if False:",
        "object_store",
    ),
    Mistake(
        "files of a commit and of its replacement are read as one",
        f"{_COMMITS}:read_commit",
        "if not _is_replaced(path, manifest):\n            return content",
        "if True:\n            return content",
        "disk",
    ),
    Mistake(
        "a commit is not taken back",
        f"{_UPLOADS}:_withdraw_if_replaced",
        "if not set(names) <= target.find().keys():",
        "if False:",
        "rivals_in_store",
    ),
    Mistake(
        "a process that was replaced sweeps what its successor uploads",
        f"{_UPLOADS}:_sweep",
        "_require_claim(directory)",
        "pass",
        "rivals_in_store",
    ),
    Mistake(
        "remains in the store are not swept",
        f"{_UPLOADS}:_sweep",
        "_delete(directory / commit, left[commit])",
        "pass",
        "object_store",
    ),
    Mistake(
        "complete ones are swept, too",
        f"{_UPLOADS}:_sweep",
        "left.keys() - complete",
        "left.keys()",
        "object_store",
    ),
    Mistake(
        "the old data stays",
        f"{_UPLOADS}:upload_commit",
        "_delete(target, filter(_DATA.match, before))",
        "pass",
        "object_store",
    ),
    Mistake(
        "an unfinished upload is taken", f"{_UPLOADS}:commits_of", "if rest == MANIFEST", "", "object_store"
    ),
)
