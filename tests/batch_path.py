"""The path of one batch through `fit`: which files of the library it passes, in which order.

`python -m tests.batch_path` prints it. A stay is what is called in one file without a call in another file
in between; a return is a stay in a file that was left before. Properties, constructors and functions within
functions do not count.
"""

import dataclasses
import os
import sys

import unisono
from unisono.training.trainer._trainer_function import TrainerFunction

_ROOT = os.path.dirname(unisono.__file__) + os.sep


@dataclasses.dataclass
class Stay:
    """What is called in one file: its path within the package, and the functions in their order."""

    file: str
    calls: list[str]


class BatchPath:
    """The stays of one call of the train function."""

    def __init__(self):
        self.stays = []

    @property
    def num_returns(self):
        """How many stays are in a file that was left before."""
        return len(self.stays) - len({stay.file for stay in self.stays})

    def num_visits(self, file):
        """How many stays are in a file."""
        return sum(stay.file == file for stay in self.stays)

    def record(self, call, *args):
        """Call a function, and note where it passes."""
        sys.setprofile(self._note)
        try:
            return call(*args)
        finally:
            sys.setprofile(None)

    def _note(self, frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_ROOT):
            return
        if "<" in code.co_qualname or code.co_name == "__init__" or _is_property(frame):
            return
        file = code.co_filename.removeprefix(_ROOT)
        if not self.stays or self.stays[-1].file != file:
            self.stays.append(Stay(file, []))
        self.stays[-1].calls.append(code.co_name)


def _is_property(frame):
    owner = type(frame.f_locals.get("self"))
    return isinstance(getattr(owner, frame.f_code.co_name, None), property)


def path_of_last_batch(model, **arguments):
    """Return the path of the last batch of a `fit`.

    Args:
        model: bound to a strategy.
        arguments: of `fit`; the last call of the train function takes one batch.
    """
    original, paths = TrainerFunction.__call__, []

    def recorded(function, state, iterator):
        path = BatchPath()
        result = path.record(original, function, state, iterator)
        paths.append(path)
        return result

    TrainerFunction.__call__ = recorded
    try:
        model.fit(verbose=0, **arguments)
    finally:
        TrainerFunction.__call__ = original
    return paths[-1]


if __name__ == "__main__":
    from tests.virtual.training._digits import crossentropy, digits, mlp

    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        digits_model = mlp()
        digits_model.compile("adam", crossentropy(), metrics=["accuracy"])
    images, labels = digits()
    found = path_of_last_batch(digits_model, x=images[:128], y=labels[:128], batch_size=32)
    for number, one in enumerate(found.stays, 1):
        print(f"{number:3} {one.file}: {', '.join(one.calls)}")
    print(f"{len(found.stays)} stays, {found.num_returns} returns")
