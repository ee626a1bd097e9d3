"""Functions as bytes, for other processes: `cloudpickle`, with the names of the files that they are from.

From version 3.1.3 on, `cloudpickle` replaces these names by `<dynamic-code>`, so that a traceback of another
process would show no line of the user's program.

Tests: tests/unit/system/test_pickling.py, tests/cluster/test_launch_function.py.
"""

from __future__ import annotations

import io
import types
from collections import ChainMap
from typing import Any, ClassVar

_NO_FILE = "<dynamic-code>"


def pickle_by_value(value: object) -> bytes:
    """Return a function, or anything with functions in it, as bytes that `pickle.loads` reads.

    >>> import pickle
    >>> pickle.loads(pickle_by_value(lambda: 7))()
    7
    """
    import cloudpickle

    reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]

    def with_its_file(code: types.CodeType) -> tuple[Any, ...]:
        make, args, *others = reduce_code(code)
        return make, tuple(code.co_filename if arg == _NO_FILE else arg for arg in args), *others

    own: dict[type, Any] = {types.CodeType: with_its_file}

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(own, cloudpickle.Pickler.dispatch_table)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
