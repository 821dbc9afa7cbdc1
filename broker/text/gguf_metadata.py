"""Key-value metadata of a GGUF file. Knows nothing of its tensors.

The `gguf` package needs seconds for a large vocabulary, because it makes NumPy views of every
string; this reads the same table in milliseconds, and it is all that the broker needs.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from tokenbus.errors import Unsupported

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_ITEMS = 1 << 24


class _Cursor:
    """A position in the mapped file; every read checks against its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.at = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.at + num_bytes
        if end > len(self._data):
            raise Unsupported(f"{self._path}: truncated GGUF metadata", field="model")
        data = self._data[self.at : end]
        self.at = end
        return data

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("<I"), self.scalar("<Q")
            return self._items(item, count)
        raise Unsupported(f"{self._path}: unknown GGUF value type {kind}", field="model")

    def _items(self, kind: int, count: int) -> list[Any]:
        if count > _MAX_ITEMS:
            raise Unsupported(f"{self._path}: GGUF array of {count} items", field="model")
        if kind in _SCALARS:
            letter = _SCALARS[kind][1]
            size = struct.calcsize(_SCALARS[kind])
            return list(struct.unpack(f"<{count}{letter}", self.take(size * count)))
        return [self.value(kind) for _ in range(count)]


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs. Raises Unsupported if the file is not GGUF version 2 or 3."""
    if path.stat().st_size == 0:
        raise Unsupported(f"{path}: is empty", field="model")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, path)
        magic, version = cursor.take(4), cursor.scalar("<I")
        if magic != b"GGUF" or version not in _VERSIONS:
            raise Unsupported(f"{path}: expected GGUF version 2 or 3", field="model")
        cursor.scalar("<Q")  # number of tensors
        count = cursor.scalar("<Q")
        pairs = {}
        for _ in range(count):
            key = cursor.string()
            pairs[key] = cursor.value(cursor.scalar("<I"))
        return pairs
