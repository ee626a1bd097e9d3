"""Names of `tf.io.gfile`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from os import (
    mkdir as mkdir,
    remove as remove,
    stat as stat,
    walk as walk,
)
from os.path import (
    exists as exists,
    isdir as isdir,
)
from shutil import (
    rmtree as rmtree,
)
from unisono.tf.adapters._files import (
    GFile as GFile,
    copy as copy,
    glob as glob,
    listdir as listdir,
    makedirs as makedirs,
    rename as rename,
)
