"""Mistakes in what is done with messages and requests that are wrong."""

from tests.simulation._mistakes import Mistake

_FRAMES = "rpc._frames"
_FIELDS = "rpc._fields"
_STATE = "parameter_server.state"
_STORE = "parameter_server.server._store:VariableStore"
_SERVER = "parameter_server.server._server:VariableServer"


def _of_messages(name, place, old, new):
    return Mistake(name, ("messages",), f"{_FRAMES}:{place}", old, new)


def _of_requests(name, place, old, new):
    return Mistake(name, ("wrong_requests",), place, old, new)


MISTAKES = (
    _of_messages(
        "a header is not compared with its checksum",
        "_read_header", 'if checksum != int.from_bytes(computed, "little"):', "if False:",
    ),
    _of_messages("a checksum leaves out `meta`", "_checksum", "zlib.crc32(meta, ", "(lambda crc: crc)("),
    _of_messages(
        "a message of another version is taken", "_read_header", "if version != VERSION:", "if False:"
    ),
    _of_messages(
        "arrays are not counted", "_read_header", "if count > MAX_ARRAYS or count != arrays:", "if False:"
    ),
    _of_messages("an array may be cut", "Frame.parse", "if len(view) != length:", "if False:"),
    _of_messages(
        "what follows the arrays is passed over", "_read_shapes", "if at != len(header):", "if False:"
    ),
    _of_messages(
        "a header may end early", "_read_shapes", "if len(header) < at + 2 + numbers.size:", "if False:"
    ),
    _of_messages(
        "numbers that JSON does not have are sent",
        "_pack_meta", "_ENCODER.encode(meta).encode()", "json.dumps(meta).encode()",
    ),
    _of_messages(
        "keys that are no texts become texts", "_pack_meta",
        "if not isinstance(meta, dict) or not all(isinstance(key, str) for key in meta):", "if False:",
    ),
    _of_requests(
        "rows are counted from the end, too", f"{_STATE}._variables:Table.check_rows",
        "indices.min() >= 0 and ", "",
    ),
    _of_requests(
        "a value of another shape is broadcast", f"{_STATE}._update:check_value",
        "tuple(array.shape) != tuple(variable.shape) or ", "",
    ),
    _of_requests(
        "new values are checked, sums are not", f"{_STATE}._update:check_push", '("adds", push.adds), ', ""
    ),
    _of_requests(
        "new rows may name a row twice", f"{_STATE}._update:_check_row_write",
        "if len(np.unique(indices)) < len(indices):", "if False:",
    ),
    _of_requests(
        "two updates of a push change one table", f"{_STATE}._update:check_push",
        "if touched & tables:", "if False:",
    ),
    _of_requests(
        "a push may be behind its own watermark", f"{_SERVER}._push",
        "if push.watermark > push.closure:", "if False:",
    ),
    _of_requests(
        "a closure of a chief that is not known is applied", f"{_SERVER}._push",
        "if generation > self.store.generation:", "if False:",
    ),
    _of_requests(
        "whoever names no generation may write", f"{_SERVER}._check",
        "if frame.op not in _OF_CHIEF:", "if frame.op not in _OF_CHIEF or not frame.generation:",
    ),
    _of_requests(
        "variables are dropped up to the one that is not there", f"{_STORE}.drop",
        "names = [find(self.variables, number).spec.name for number in numbers]",
        "names = [(find(self.variables, n), self.variables.pop(n))[0].spec.name for n in numbers]",
    ),
    _of_requests(
        "variables are created up to the one that is wrong", f"{_STORE}.create",
        "                n: missing[name].make(self._key(n), self.programs, self.journal)\n",
        "                n: self.variables.setdefault(\n"
        "                    n, missing[name].make(self._key(n), self.programs, self.journal))\n",
    ),
    _of_requests("a truth value is a number", f"{_FIELDS}:ints", "<= {int}", "<= {int, bool}"),
    _of_requests(
        "arrays that a push does not name are left over", f"{_STATE}._push:Push.decode",
        "if len(left) != len(adds) + len(assigns):", "if False:",
    ),
)  # fmt: skip
