"""The golden vectors are what the code says, and the code reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vectors import generate
from tokenbus.entries import entry_id, event_from_entry, event_to_entry
from tokenbus.errors import _CLASSES, TokenbusError
from tokenbus.events import Failed, crc32_of_ids
from tokenbus.parse import JOB_FIELDS, SAMPLING_FIELDS, parse_entry, parse_submit
from tokenbus.protocol import Limits, MessageType, decode, encode

VECTORS = Path(generate.__file__).parent
PROTOCOL_PAGE = VECTORS.parents[1] / "docs" / "PROTOCOL.md"


def load(name: str) -> Any:
    return json.loads((VECTORS / name).read_text())


def from_hex(frames: list[str]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in frames]


FRAMES = load("frames.json")
MALFORMED = load("malformed.json")


@pytest.mark.parametrize("name", sorted(generate.all_files()))
def test_the_files_are_what_the_generator_writes(name: str) -> None:
    assert generate.all_files()[name] == (VECTORS / name).read_text()


@pytest.mark.parametrize("row", FRAMES, ids=lambda row: row["name"])
def test_a_golden_frame_decodes_and_encodes_to_itself(row: dict[str, Any]) -> None:
    frames = from_hex(row["frames"])
    message = decode(frames)
    assert row["type"] == message.type.name
    assert row["type_id"] == message.type
    assert row["body"] == generate._jsonable(message.body)
    assert frames == encode(message.type, message.body, message.blobs)


def test_every_message_type_has_a_golden_frame() -> None:
    assert {kind.name for kind in MessageType} == {row["type"] for row in FRAMES}


@pytest.mark.parametrize("row", MALFORMED, ids=lambda row: row["name"])
def test_a_malformed_message_is_refused_with_its_code(row: dict[str, Any]) -> None:
    limits = Limits(**row["limits"]) if "limits" in row else Limits()
    with pytest.raises(TokenbusError) as caught:
        decode(from_hex(row["frames"]), limits)
    assert row["code"] == caught.value.code


@pytest.mark.parametrize("name", generate.REQUESTS)
def test_a_golden_submit_is_its_request(name: str) -> None:
    row = next(row for row in FRAMES if row["name"] == f"submit-{name}")
    message = decode(from_hex(row["frames"]))
    assert generate.REQUESTS[name] == parse_submit(message.body, message.blobs)


@pytest.mark.parametrize("row", load("entries.json")["jobs"], ids=lambda row: row["name"])
def test_a_golden_job_entry_is_its_request(row: dict[str, Any]) -> None:
    fields = {key.encode(): value.encode() for key, value in row["fields"].items()}
    assert generate.REQUESTS[row["name"]] == parse_entry(fields, "1-0")


@pytest.mark.parametrize(
    ("row", "event"), list(zip(load("entries.json")["out"], generate.EVENTS, strict=True))
)
def test_a_golden_out_entry_is_its_event(row: dict[str, Any], event: Any) -> None:
    fields = {key.encode(): value.encode() for key, value in row["fields"].items()}
    read = event_from_entry(event.job, row["id"], fields)
    if isinstance(event, Failed):  # exceptions compare by identity
        assert isinstance(read, Failed)
        assert type(event.error) is type(read.error)
        assert (event.error.message, event.error.field) == (read.error.message, read.error.field)
        assert event.error.retry_ms == read.error.retry_ms
    else:
        assert event == read
    assert row["id"] == entry_id(event)
    assert row["fields"] == event_to_entry(event)


@pytest.mark.parametrize("row", load("checksums.json"), ids=lambda row: str(len(row["ids"])))
def test_a_golden_checksum_is_ours(row: dict[str, Any]) -> None:
    assert row["crc"] == crc32_of_ids(row["ids"])


def test_a_crc_can_be_taken_piece_by_piece() -> None:
    assert crc32_of_ids((1, 2, 3)) == crc32_of_ids((3,), crc32_of_ids((1, 2)))


@pytest.mark.parametrize("name", ["cancel", "hello-least", "submit-prompt", "tokens"])
def test_the_hex_dumps_of_the_protocol_page_are_the_golden_frames(name: str) -> None:
    """Whoever writes a client from the page gets the same bytes."""
    row = next(row for row in FRAMES if row["name"] == name)
    dumps = [_hex_of(block) for block in PROTOCOL_PAGE.read_text().split("```")[1::2]]
    assert "".join(row["frames"]) in dumps


def _hex_of(block: str) -> str:
    """Hex digits of a dump: two-digit words up to the first other word of each line."""
    digits: list[str] = []
    for line in block.splitlines():
        words = line.replace("frame 0", "").replace("frame 1", "").split()
        for word in words:
            if len(word) != 2 or any(c not in "0123456789abcdef" for c in word):
                break
            digits.append(word)
    return "".join(digits)


def test_the_protocol_page_names_every_error_code_and_message_type() -> None:
    text = PROTOCOL_PAGE.read_text()
    assert [code for code in _CLASSES if f"`{code}`" not in text] == []
    assert [kind.name for kind in MessageType if f"| {kind.name} | {kind:02x} |" not in text] == []


def test_the_protocol_page_names_every_field_of_a_job() -> None:
    text = PROTOCOL_PAGE.read_text()
    assert [name for name in (*JOB_FIELDS, *SAMPLING_FIELDS) if f"`{name}`" not in text] == []
