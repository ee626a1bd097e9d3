"""The sources that travel with a job: the user's own modules, which servers do not have."""

from __future__ import annotations

import functools
import modulefinder
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from unisono._errors import InvalidArgumentError

#: Bytes of all sources together.
_MOST_BYTES = 64 << 20
#: The folder on a server.
FOLDER = "program"


def loaded_sources(modules: Mapping[str, ModuleType]) -> dict[str, bytes]:
    """Return the sources of the modules that are neither installed nor Python's own.

    Returns:
        The content of each file, by its name in the folder of the job's modules.
    """
    files = {}
    is_installed = _installed_folders()
    for name, module in list(modules.items()):
        path = _source_of(module)
        if path is None or name == "__main__" or is_installed(path.parent) or not _is_at_its_name(name, path):
            continue
        folder = name.replace(".", "/")
        target = f"{folder}/__init__.py" if path.name == "__init__.py" else f"{folder}.py"
        files[f"{FOLDER}/{target}"] = path.read_bytes()
    return _checked(files)


def _source_of(module: object) -> Path | None:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    path = Path(file)
    return path if path.is_file() else None


def _is_at_its_name(name: str, path: Path) -> bool:
    # A module that was loaded by a path alone cannot be imported by its name.
    stem = path.parent.name if path.name == "__init__.py" else path.stem
    return name.rpartition(".")[2] == stem


def _installed_folders() -> Callable[[Path], bool]:
    """Return a function that says whether a folder belongs to Python or to what is installed.

    It looks at each folder once: with Keras and JAX imported there are 3084 modules in 425 folders: a
    launch spent 0.96 s of CPU time on all their paths, and spends 0.05 s now (2026-11-22).
    """
    own = Path(__file__).resolve().parents[1]
    places = {own, *(Path(p).resolve() for p in sysconfig.get_paths().values())}
    names = {"site-packages", "dist-packages"}

    @functools.cache
    def is_installed(folder: Path) -> bool:
        resolved = folder.resolve()
        return bool(names & {*folder.parts, *resolved.parts} or places & {resolved, *resolved.parents})

    return is_installed


def script_sources(script: Path) -> dict[str, bytes]:
    """Return a script and the modules beside it that it imports."""
    try:
        files = {f"{FOLDER}/{script.name}": script.read_bytes()}
    except OSError as error:
        raise InvalidArgumentError(
            f"The script must be a file that can be read. Received: {str(script)!r} ({error.strerror})."
        ) from None
    root = script.resolve().parent
    # It looks in this folder alone: other modules are installed on the servers.
    finder = modulefinder.ModuleFinder(path=[str(root)])
    try:
        finder.run_script(str(script))
    except SyntaxError:  # the task shows it
        return files
    for module in finder.modules.values():
        path = _source_of(module)
        if path is not None and root in path.resolve().parents:
            files[f"{FOLDER}/{path.resolve().relative_to(root).as_posix()}"] = path.read_bytes()
    return _checked(files)


def given_files(paths: Sequence[Path]) -> dict[str, bytes]:
    """Return files and folders that the user names, by their names relative to this process' directory."""
    files: dict[str, bytes] = {}
    for path in paths:
        is_readable = path.is_dir() or path.is_file()  # not a pipe, which would wait for a writer
        if path.is_absolute() or ".." in path.parts or not is_readable:
            raise InvalidArgumentError(
                "A file that travels with a job must be below the current directory. "
                f"Received: {str(path)!r}. Write a relative name, such as `--files data/vocabulary.txt`."
            )
        every = [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]
        files |= {f"{FOLDER}/{each.as_posix()}": each.read_bytes() for each in every}
    return _checked(files)


def _checked(files: dict[str, bytes]) -> dict[str, bytes]:
    size = sum(map(len, files.values()))
    if size > _MOST_BYTES:
        largest = max(files, key=lambda name: len(files[name]))
        raise InvalidArgumentError(
            f"The files that travel with a job must have at most {_MOST_BYTES >> 20} MiB. Received: "
            f"{size >> 20} MiB in {len(files)} files, the largest {largest}. Put data where the servers "
            "find them."
        )
    return files
