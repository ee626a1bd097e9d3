"""Names of `tf.gfile`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from os import (
    mkdir as _os_mkdir,
    remove as _os_remove,
    stat as _os_stat,
    walk as _os_walk,
)
from os.path import (
    exists as _os_path_exists,
    isdir as _os_path_isdir,
)
from shutil import (
    rmtree as _shutil_rmtree,
)
from unisono.tf.adapters._files import (
    GFile as GFile,
    GFile as _unisono_tf_adapters__files_GFile,
    copy as _unisono_tf_adapters__files_copy,
    glob as _unisono_tf_adapters__files_glob,
    listdir as _unisono_tf_adapters__files_listdir,
    makedirs as _unisono_tf_adapters__files_makedirs,
    rename as _unisono_tf_adapters__files_rename,
)

Copy = _unisono_tf_adapters__files_copy
DeleteRecursively = _shutil_rmtree
Exists = _os_path_exists
FastGFile = _unisono_tf_adapters__files_GFile
Glob = _unisono_tf_adapters__files_glob
IsDirectory = _os_path_isdir
ListDirectory = _unisono_tf_adapters__files_listdir
MakeDirs = _unisono_tf_adapters__files_makedirs
MkDir = _os_mkdir
Open = _unisono_tf_adapters__files_GFile
Remove = _os_remove
Rename = _unisono_tf_adapters__files_rename
Stat = _os_stat
Walk = _os_walk
