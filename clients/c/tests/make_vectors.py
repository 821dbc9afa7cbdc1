"""Writes the golden vectors as a C header: `make_vectors.py ../../tests/vectors > vectors.h`.

Bodies become canonical text, which `canonical` in test_vectors.c makes from decoded msgpack too:
keys sorted, text and bytes in hex.
"""

import json
import sys
from pathlib import Path
from typing import Any


def canonical(value: Any) -> str:
    """One spelling of a JSON value; {"hex": ...} stands for bytes."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"f{value:.17g}"
    if isinstance(value, str):
        return "s" + value.encode().hex()
    if isinstance(value, list):
        return "[" + "".join(canonical(item) + "," for item in value) + "]"
    if list(value) == ["hex"]:
        return "b" + value["hex"]
    pairs = sorted((key.encode(), item) for key, item in value.items())
    return "{" + "".join(f"{key.decode()}:{canonical(item)}," for key, item in pairs) + "}"


def array(c_type: str, name: str, values: list[int]) -> str:
    """An array with one element more, because C has no empty ones."""
    return f"static const {c_type} {name}[] = {{{', '.join(map(str, [*values, 0]))}}};"


def frames_of(rows: list[dict[str, Any]], prefix: str) -> tuple[list[str], list[str]]:
    """Arrays for all frames; for each row its initializer of `frames, num_frames`."""
    arrays, initializers = [], []
    for i, row in enumerate(rows):
        frames = [bytes.fromhex(text) for text in row["frames"]]
        names = [f"{prefix}_{i}_{j}" for j in range(len(frames))]
        arrays += [array("uint8_t", n, list(f)) for n, f in zip(names, frames, strict=True)]
        items = [f"{{{n}, {len(f)}}}" for n, f in zip(names, frames, strict=True)]
        initializers.append(f"{{{', '.join(items) or '{NULL, 0}'}}}, {len(frames)}")
    return arrays, initializers


def main() -> None:
    """Read the three files that concern ZeroMQ."""
    directory = Path(sys.argv[1])
    good, bad, sums = (
        json.loads((directory / f"{name}.json").read_text())
        for name in ("frames", "malformed", "checksums")
    )
    good_arrays, good_rows = frames_of(good, "good")
    bad_arrays, bad_rows = frames_of(bad, "bad")
    lines = ["/* Made by make_vectors.py. */", *good_arrays, *bad_arrays]
    lines += [array("int32_t", f"ids_{i}", row["ids"]) for i, row in enumerate(sums)]
    lines.append("static const struct good GOOD[] = {")
    for row, initializer in zip(good, good_rows, strict=True):
        body = json.dumps(canonical(row["body"]))
        lines.append(f"    {{{json.dumps(row['name'])}, {row['type_id']}, {initializer}, {body}}},")
    lines += ["};", "static const struct bad BAD[] = {"]
    for row, initializer in zip(bad, bad_rows, strict=True):
        limits = row.get("limits", {})
        names = ("max_body_bytes", "max_frame_bytes", "max_blobs")
        numbers = ", ".join(
            str(limits.get(n, d)) for n, d in zip(names, (1 << 20, 1 << 24, 4), strict=True)
        )
        code, name = json.dumps(row["code"]), json.dumps(row["name"])
        lines.append(f"    {{{name}, {code}, {initializer}, {{{numbers}}}}},")
    lines += ["};", "static const struct sum SUMS[] = {"]
    lines += [f"    {{ids_{i}, {len(row['ids'])}, {row['crc']}u}}," for i, row in enumerate(sums)]
    sys.stdout.write("\n".join([*lines, "};", ""]))


main()
