"""The exceptions of Unisono.

Every error that the library raises on purpose is a `UnisonoError`, and also the
builtin that a user of `tf.distribute` would catch::

    UnisonoError
    ├── InvalidArgumentError (ValueError)     an argument cannot be used
    │   ├── DeviceError                       a device is absent, repeated or unreadable
    │   └── ScopeError                        a variable was made outside the strategy's scope
    ├── InvalidTypeError (TypeError)          an argument has the wrong type
    ├── ContextError (RuntimeError)           a call from the wrong context
    │   └── MixedStrategyError                two strategies where one must be
    ├── BackendError (RuntimeError)           JAX or Keras is in a state that Unisono cannot use
    ├── ClusterError (RuntimeError)           processes failed to start or to work together
    ├── CheckpointError (OSError)             a checkpoint is missing, damaged, or cannot be written
    │   ├── CheckpointMismatchError           a checkpoint does not fit the objects to restore
    │   ├── CheckpointUnmatchedError (AssertionError)   `assert_consumed` or a similar check failed
    │   └── CheckpointUnreadableError         a checkpoint that was just written cannot be read
    ├── MissingPackageError (ImportError)     an optional feature's package is not installed
    ├── OutOfRangeError (IndexError)          a distributed iterator has no next batch
    ├── CancelledError (concurrent.futures.CancelledError)   a scheduled function was dropped
    ├── UnsupportedError (NotImplementedError)  an option or operation that is not supported here
    └── TapeError (RuntimeError)              a GradientTape used where it cannot differentiate

Messages state what must hold, what was received, and what to write instead.

Tests: tests/unit/test_public_names.py, and those of the modules that raise them.
"""

import concurrent.futures


class UnisonoError(Exception):
    """Base class of all errors that Unisono raises on purpose."""

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            # Tracebacks then show the public name: `unisono.ScopeError`, not `unisono._errors.ScopeError`.
            cls.__module__ = "unisono"


UnisonoError.__module__ = "unisono"


class InvalidArgumentError(UnisonoError, ValueError):
    """An argument cannot be used as given."""


class DeviceError(InvalidArgumentError):
    """A device is absent, repeated, or its name cannot be read."""


class ScopeError(InvalidArgumentError):
    """A variable was created outside the scope of the strategy that should hold it."""


class InvalidTypeError(UnisonoError, TypeError):
    """An argument has a type that cannot be used."""


class ContextError(UnisonoError, RuntimeError):
    """A function was called from a context where it has no meaning."""


class MixedStrategyError(ContextError):
    """Objects of two different strategies were used together."""


class BackendError(UnisonoError, RuntimeError):
    """JAX or Keras is in a state that Unisono cannot use."""


class ClusterError(UnisonoError, RuntimeError):
    """Processes of a cluster failed to start, or to work together."""


class CheckpointError(UnisonoError, OSError):
    """A checkpoint is missing or damaged, or cannot be written."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the objects that it is restored into."""


class CheckpointUnmatchedError(CheckpointError, AssertionError):
    """A checkpoint holds values for which there is no object, or lacks values of an object."""


class CheckpointUnreadableError(CheckpointError):
    """A checkpoint that was just written cannot be read."""


class MissingPackageError(UnisonoError, ImportError):
    """A package that an optional feature needs is not installed."""


class OutOfRangeError(UnisonoError, IndexError):
    """A distributed iterator has no next batch."""


class CancelledError(UnisonoError, concurrent.futures.CancelledError):
    """A scheduled function was dropped, because another one failed before it."""


class UnsupportedError(UnisonoError, NotImplementedError):
    """An option or operation is not supported here."""


class NeedsValueError(UnsupportedError):
    """Code of a step needs the value of what is traced."""


class TapeError(UnisonoError, RuntimeError):
    """A `GradientTape` was used where it cannot differentiate."""
