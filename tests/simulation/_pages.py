"""The bytes of a file that processes have mapped: memory that all mappings share, written back in pages.

The system writes a changed page to the disk when it likes, in any order, and as it is at that moment. A
process that is killed loses nothing; with the power each page may be there, be as the disk had it, or be torn
between two sectors.

Tests: tests/unit/test_simulated_files.py.
"""

import mmap

import numpy as np

_PAGE, _SECTOR = 4096, 512
#: What a mapped file may grow to; memory is taken by the page that is written.
_CAPACITY = 16 << 20
#: While files are simulated, the module's own is another one.
_real_mmap = mmap.mmap


class Pages:
    """What a `bytearray` is for other files."""

    def __init__(self, data):
        self._memory = _real_mmap(-1, _CAPACITY)
        self._size = len(data)
        # A file that was only made longer consists of zeros, as new memory does.
        if np.frombuffer(data, np.uint8).any():
            self._memory[: self._size] = bytes(data)

    def __len__(self):
        return self._size

    def __bytes__(self):
        return self._memory[: self._size]

    def __getitem__(self, key):
        return self._memory[key] if isinstance(key, int) else self._memory[: self._size][key]

    def __setitem__(self, key, value):
        self._memory[key] = value if isinstance(key, int) else bytes(value)

    def __delitem__(self, key):
        begin, end, _ = key.indices(self._size)
        if end != self._size:
            raise ValueError(f"A file is cut at its end. Received: {key} of {self._size} bytes.")
        self._memory[begin:end] = bytes(end - begin)
        self._size = begin

    def extend(self, zeros):
        """Grow by bytes, which are zeros: beyond the end there are no others."""
        self._size += len(zeros)
        if self._size > _CAPACITY:
            raise ValueError(f"A simulated file may have {_CAPACITY} bytes. Received: {self._size}.")

    def view(self, size, is_readonly):
        """Return the memory itself."""
        view = memoryview(self._memory)[:size]
        return view.toreadonly() if is_readonly else view

    # --- the disk ------------------------------------------------------------------------------------

    def _changed(self, saved):
        """Return the content, the disk in the same length, and which pages differ."""
        size = -(-max(self._size, len(saved)) // _PAGE) * _PAGE
        now = np.frombuffer(self._memory, np.uint8, size)
        disk = np.zeros(size, np.uint8)
        disk[: len(saved)] = np.frombuffer(saved, np.uint8)
        differs = (now != disk).reshape(-1, _PAGE).any(1)
        return now, disk, np.flatnonzero(differs).tolist()

    def write_back(self, saved, choose):
        """Return what is on the disk after the system has written some of the pages."""
        now, disk, pages = self._changed(saved)
        size = len(saved)
        for page in pages:
            if choose(2):
                begin, end = page * _PAGE, (page + 1) * _PAGE
                disk[begin:end] = now[begin:end]
                size = max(size, min(end, self._size))
        return disk[:size].tobytes()

    def lose_power(self, saved, choose):
        """Return what is left: of each page the new content, the old one, or sectors of both."""
        now, disk, pages = self._changed(saved)
        for page in pages:
            begin, end = page * _PAGE, (page + 1) * _PAGE
            fate = choose(3)
            if fate == 0:
                disk[begin:end] = now[begin:end]
            elif fate == 2:
                for at in range(begin, end, _SECTOR):
                    if choose(2):
                        disk[at : at + _SECTOR] = now[at : at + _SECTOR]
        # The size is a change of its own.
        return disk[: len(saved) if choose(2) else self._size].tobytes()
