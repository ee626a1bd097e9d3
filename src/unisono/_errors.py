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
    ├── BackendError (RuntimeError)           JAX or Keras runs in a state that cannot serve
    ├── ClusterError (RuntimeError)           processes could not be started, or work together
    ├── CheckpointError (OSError)             a checkpoint is absent, damaged, or cannot be written
    │   ├── CheckpointMismatchError           a checkpoint of something else than what is restored
    │   ├── CheckpointUnmatchedError (AssertionError)   `assert_consumed` and its like fail
    │   └── CheckpointUnreadableError         a checkpoint that was just written cannot be read
    ├── MissingPackageError (ImportError)     an optional feature's package is not installed
    ├── OutOfRangeError (IndexError)          a distributed iterator has no next batch
    ├── UnsupportedError (NotImplementedError)  an option or operation that has no meaning at this place
    └── TapeError (RuntimeError)              a GradientTape used where it cannot work

Messages say what must hold, what was received, and what to write instead.
"""


class UnisonoError(Exception):
    """Base of all errors that Unisono raises on purpose."""

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            # Tracebacks name an error as programs do: `unisono.ScopeError`.
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
    """Objects of two different strategies met."""


class BackendError(UnisonoError, RuntimeError):
    """JAX or Keras is in a state in which Unisono cannot work."""


class ClusterError(UnisonoError, RuntimeError):
    """Processes of a cluster could not be started, or could not work together."""


class CheckpointError(UnisonoError, OSError):
    """A checkpoint is absent or damaged, or cannot be written."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit what it is restored into."""


class CheckpointUnmatchedError(CheckpointError, AssertionError):
    """A checkpoint and the objects that it was restored into do not hold the same."""


class CheckpointUnreadableError(CheckpointError):
    """A checkpoint that was just written cannot be read."""


class MissingPackageError(UnisonoError, ImportError):
    """A package that an optional feature needs is not installed."""


class OutOfRangeError(UnisonoError, IndexError):
    """A distributed iterator has no next batch."""


class UnsupportedError(UnisonoError, NotImplementedError):
    """An option or operation was used where it has no meaning."""


class TapeError(UnisonoError, RuntimeError):
    """A `GradientTape` was used where it cannot differentiate."""
