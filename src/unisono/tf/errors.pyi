"""Names of `tf.errors`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from builtins import (
    FileExistsError as _builtins_FileExistsError,
    FileNotFoundError as _builtins_FileNotFoundError,
    PermissionError as _builtins_PermissionError,
)
from unisono import (
    CancelledError as CancelledError,
    InvalidArgumentError as InvalidArgumentError,
    OutOfRangeError as OutOfRangeError,
    ClusterError as _unisono_ClusterError,
    ContextError as _unisono_ContextError,
    UnisonoError as _unisono_UnisonoError,
    UnsupportedError as _unisono_UnsupportedError,
)

AbortedError = _unisono_ClusterError
AlreadyExistsError = _builtins_FileExistsError
FailedPreconditionError = _unisono_ContextError
NotFoundError = _builtins_FileNotFoundError
OpError = _unisono_UnisonoError
PermissionDeniedError = _builtins_PermissionError
UnavailableError = _unisono_ClusterError
UnimplementedError = _unisono_UnsupportedError
