"""Opens GGUF files without reading their lists.

The `gguf` package makes several array views for every item of every list, which takes seconds for a
vocabulary. An engine wants to know of a list only how long it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.model.errors import CheckpointError

_ArrayParts = tuple[int, list[np.ndarray[Any, Any]], list[int], list[gguf.GGUFValueType]]


class ListSkippingReader(gguf.GGUFReader):  # type: ignore[misc]  # an untyped package
    """`GGUFReader` whose list fields have as many entries in `data` as items, and no items."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> _ArrayParts:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            parts: _ArrayParts = super()._get_field_parts(orig_offs, raw_type)
            return parts
        header = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        item_type, count = gguf.GGUFValueType(header[0][0]), int(header[1][0])
        start = orig_offs + 12
        size = self._size_of_items(start, item_type, count)
        return start + size - orig_offs, header, [0] * count, [gguf.GGUFValueType.ARRAY, item_type]

    def _size_of_items(self, start: int, item_type: gguf.GGUFValueType, count: int) -> int:
        """Bytes of a list's items. Raises ValueError where they are beyond the file's end."""
        content = memoryview(self.data)
        scalar = self.gguf_scalar_to_np.get(item_type)
        if scalar is not None:
            end = start + count * np.dtype(scalar).itemsize
        elif item_type is gguf.GGUFValueType.STRING:
            end = start
            for _ in range(count):
                end += 8 + int.from_bytes(content[end : end + 8], "little")
                if end > len(content):
                    break
        else:
            raise ValueError(f"a list of {item_type.name} is not understood")
        if end > len(content):
            raise ValueError("a list goes on behind the end of the file")
        return int(end - start)


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Map the file and parse its header. Raises CheckpointError if it is no GGUF file."""
    try:
        return ListSkippingReader(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (ValueError, IndexError, OSError) as error:
        raise CheckpointError(f"{path} is no readable GGUF file: {error}") from error
