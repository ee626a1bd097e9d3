"""Mistakes where a place of checkpoints cannot be read or written, or is another one than was meant."""

from tests.simulation._planted import Mistake

_COMMITS = "unisono.checkpoint.commits._commits"
_UPLOADS = "unisono.checkpoint.commits._uploads"

MISTAKES = (
    Mistake(
        "a directory that cannot be read is an empty one",
        f"{_COMMITS}:_entries",
        "except (FileNotFoundError, NotADirectoryError):",
        "except OSError:",
        "places",
    ),
    Mistake(
        "an error of the disk is the system's own",
        f"{_COMMITS}:translated_errors",
        "raise _translated(error, target) from error",
        "raise",
        "places",
    ),
    Mistake(
        "a manifest that may not be read is an error of the system",
        "unisono.checkpoint.commits._manifests:read_manifest",
        "except (OSError, ValueError) as error:",
        "except ValueError as error:",
        "places",
    ),
    Mistake(
        "a file has no number",
        f"{_COMMITS}:newest_number",
        "for path in _entries(directory)}",
        "for path in _entries(directory) if path.is_dir()}",
        "places",
    ),
    Mistake(
        "a process that was replaced deletes its successor's claim",
        f"{_UPLOADS}:leave",
        "if other_writer(directory) is None:",
        "if True:",
        "places_in_store",
    ),
    Mistake(
        "objects of others are no reason to refuse a name",
        f"{_UPLOADS}:upload_commit",
        "if not replaces if MANIFEST in before else is_other:",
        "if not replaces and MANIFEST in before:",
        "places_in_store",
    ),
)
