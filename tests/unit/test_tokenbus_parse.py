"""Requests from outside, on both doors: every bad value of every field is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.client import make_request
from tokenbus.errors import BadFrame, InvalidField, TokenbusError, TooLarge, Unsupported
from tokenbus.fields import MAX_IDS, MAX_TEXT_BYTES, ROLES, pack_ids
from tokenbus.keys import Keys
from tokenbus.parse import (
    JOB_FIELDS,
    MISSPELT,
    SAMPLING_FIELDS,
    UNSUPPORTED,
    build_entry,
    build_submit,
    parse_entry,
    parse_submit,
)
from tokenbus.request import MAX_SEED, JobRequest, SamplingParams

NAN, INF = float("nan"), float("inf")
BIG = 2**31
MISSING = object()


def submit(**values: Any) -> JobRequest:
    body = {"job": "j", "prompt": "p", **values}
    return parse_submit({key: value for key, value in body.items() if value is not MISSING})


def entry(**fields: str | bytes) -> JobRequest:
    as_bytes = {
        k.encode(): v if isinstance(v, bytes) else v.encode()
        for k, v in {"prompt": "p", **fields}.items()
    }
    return parse_entry(as_bytes, "170-0")


def chat(*messages: Any) -> dict[str, Any]:
    return {"prompt": MISSING, "messages": list(messages)}


USER = {"role": "user", "content": "hi"}

GOOD: list[tuple[str, Any, Any]] = [
    ("max_tokens", 1, 1),
    ("max_tokens", BIG - 1, BIG - 1),
    ("min_tokens", 0, 0),
    ("temperature", 0, 0.0),
    ("temperature", 100, 100.0),
    ("temperature", 0.7, 0.7),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("top_k", 50, 50),
    ("min_p", 0, 0.0),
    ("min_p", 1.0, 1.0),
    ("repetition_penalty", 1.1, 1.1),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("seed", 0, 0),
    ("seed", MAX_SEED, MAX_SEED),
    ("stop", [], ()),
    ("stop", ["a" * 256] * 16, ("a" * 256,) * 16),
    ("stop", "\n", ("\n",)),
    ("stop_token_ids", [0, BIG - 1], (0, BIG - 1)),
    ("ignore_eos", True, True),
    ("ignore_eos", False, False),
]


@pytest.mark.parametrize(("name", "value", "read"), GOOD)
def test_a_sampling_field_in_range_is_read_on_both_doors(name: str, value: Any, read: Any) -> None:
    assert read == getattr(submit(**{name: value}).params, name)
    assert read == getattr(entry(**{name: json.dumps(value)}).params, name)


BAD_NUMBERS = ["5", True, None, [], {}, b"1", NAN, INF, -INF, 1e308]
BAD: list[tuple[str, Any, str]] = [
    *[(n, v, n) for n in ("max_tokens", "deadline_ms") for v in (0, -1, 2.0, 1.5, 2**53 - 1)],
    *[("min_tokens", v, "min_tokens") for v in (-1, 0.5, BIG)],
    *[("temperature", v, "temperature") for v in (-0.1, 100.1, NAN, INF)],
    *[("top_p", v, "top_p") for v in (0, 0.0, -1, 1.01)],
    *[("top_k", v, "top_k") for v in (-2, 1.0, BIG)],
    *[("min_p", v, "min_p") for v in (-0.1, 1.1)],
    *[("repetition_penalty", v, "repetition_penalty") for v in (0, -1, 101)],
    *[("presence_penalty", v, "presence_penalty") for v in (-2.1, 2.1)],
    *[("frequency_penalty", v, "frequency_penalty") for v in (-2.1, 2.1)],
    *[("seed", v, "seed") for v in (-1, 2**53, 1.0)],
    *[
        (name, value, name)
        for name in SAMPLING_FIELDS
        if name not in ("stop", "stop_token_ids", "ignore_eos")
        for value in BAD_NUMBERS
        if value is not None
    ],
    *[("ignore_eos", v, "ignore_eos") for v in (0, 1, "true", [], 1.0)],
    *[("durable", v, "durable") for v in (0, 1, "yes", {})],
    *[("stop", v, "stop") for v in (5, True, {}, b"x", ["a"] * 17)],
    ("stop", [""], "stop[0]"),
    ("stop", ["a", "b" * 257], "stop[1]"),
    ("stop", ["a", 5], "stop[1]"),
    ("stop", ["\ud800"], "stop[0]"),
    *[("stop_token_ids", v, "stop_token_ids") for v in (5, "1", {}, b"\0\0\0\0")],
    ("stop_token_ids", [1, -1], "stop_token_ids[1]"),
    ("stop_token_ids", [1, BIG], "stop_token_ids[1]"),
    ("stop_token_ids", [True], "stop_token_ids[0]"),
    ("stop_token_ids", [1.0], "stop_token_ids[0]"),
    *[("job", v, "job") for v in ("", "a b", "x" * 129, 5, b"j", "ü", "a\n", "a/b", MISSING)],
    *[("tenant", v, "tenant") for v in ("a b", "x" * 65, 5, "a\n")],
    *[("idempotency_key", v, "idempotency_key") for v in ("", "a b", "x" * 129, 5, "ü")],
    *[("model", v, "model") for v in ("", "x" * 257, 5, "a b")],
    *[("priority", v, "priority") for v in ("urgent", "", 1, True, [])],
    *[("prompt", v, "prompt") for v in ("", 5, True, ["p"], b"p", "\ud800", MISSING)],
    *[("have", v, "have") for v in ("1", 5, {})],
    ("have", [1, -1], "have[1]"),
    ("have", [1], "seed"),
]


@pytest.mark.parametrize(("name", "value", "path"), BAD)
def test_a_bad_value_is_refused_with_the_fields_path(name: str, value: Any, path: str) -> None:
    with pytest.raises(InvalidField) as caught:
        submit(**{name: value})
    assert path == caught.value.field
    assert caught.value.message.startswith(path) or path == "prompt"


BAD_TEXTS: list[tuple[str, str, str]] = [
    *[
        (name, text, name)
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "deadline_ms")
        for text in ("", " 5", "5 ", "+5", "1e3", "0x10", "5.0", "٥", "9" * 5_000, "true", "1_0")
    ],
    *[
        (name, text, name)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
        for text in ("", "nan", "inf", "-Infinity", "1e999", "1,5", " 1", "0x1", "1_0", "1.0f")
    ],
    *[(n, t, n) for n in ("ignore_eos", "durable") for t in ("", "yes", "True", "2", "null")],
    *[
        (name, text, name)
        for name in ("stop", "stop_token_ids", "have")
        for text in ("", "x", "[", "[1", "5", "{}", "NaN", "[" * 100_000, '{"a":1,"a":2}')
    ],
    ("stop_token_ids", "[NaN]", "stop_token_ids"),
    ("stop_token_ids", "[1.0]", "stop_token_ids[0]"),
    ("stop_token_ids", f"[{10**400}]", "stop_token_ids[0]"),
    ("job", "a b", "job"),
    ("priority", "urgent", "priority"),
    ("prompt", "", "prompt"),
]


@pytest.mark.parametrize(("name", "text", "path"), BAD_TEXTS)
def test_a_bad_text_in_an_entry_is_refused_with_the_fields_path(
    name: str, text: str, path: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        entry(**{name: text})
    assert path == caught.value.field


@pytest.mark.parametrize("name", ["prompt", "stop", "temperature", "job", "messages"])
def test_bytes_that_are_not_utf8_name_their_field(name: str) -> None:
    with pytest.raises(InvalidField) as caught:
        entry(**{name: b"\xff\xfe"})
    assert name == caught.value.field


BAD_MESSAGES: list[tuple[Any, str, type[TokenbusError]]] = [
    ([], "messages", InvalidField),
    ("hi", "messages", InvalidField),
    ({}, "messages", InvalidField),
    ([USER] * 1_025, "messages", InvalidField),
    (["hi"], "messages[0]", InvalidField),
    ([None], "messages[0]", InvalidField),
    ([USER, {}], "messages[1].role", InvalidField),
    ([{"role": "user"}], "messages[0].content", InvalidField),
    ([{"role": "user", "content": None}], "messages[0].content", InvalidField),
    ([{"content": "x"}], "messages[0].role", InvalidField),
    ([{"role": "robot", "content": "x"}], "messages[0].role", InvalidField),
    ([{"role": 5, "content": "x"}], "messages[0].role", InvalidField),
    ([{"role": "user", "content": 5}], "messages[0].content", InvalidField),
    ([{"role": "user", "content": []}], "messages[0].content", InvalidField),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", InvalidField),
    ([{"role": "user", "content": [{}]}], "messages[0].content[0].type", InvalidField),
    (
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages[0].content[0].text",
        InvalidField,
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        "messages[0].content[0].text",
        InvalidField,
    ),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        "messages[0].content[0].type",
        Unsupported,
    ),
    ([{**USER, "name": 5}], "messages[0].name", InvalidField),
    ([{**USER, "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls", Unsupported),
    ([{**USER, "content": "x" * (MAX_TEXT_BYTES + 1)}], "messages[0].content", TooLarge),
    ([{**USER, "content": "x" * (MAX_TEXT_BYTES // 2 + 1)}] * 2, "messages", TooLarge),
]


@pytest.mark.parametrize(("value", "path", "error"), BAD_MESSAGES)
def test_a_malformed_chat_is_refused_with_the_path_on_both_doors(
    value: Any, path: str, error: type[TokenbusError]
) -> None:
    with pytest.raises(error) as caught:
        submit(prompt=MISSING, messages=value)
    assert path == caught.value.field
    with pytest.raises(error) as caught:
        parse_entry({b"messages": json.dumps(value).encode()}, "1-0")
    assert path == caught.value.field


def test_a_chat_is_normalised_to_one_string_per_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "later": 1}]
    messages = [{"role": role, "content": parts, "later": 1} for role in ROLES]
    request = submit(**chat(*messages, {**USER, "name": "n", "tool_calls": None}))
    assert request.messages == (
        *({"role": role, "content": "ab"} for role in ROLES),
        {"role": "user", "content": "hi", "name": "n"},
    )


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_option_we_do_not_honour_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    for value in UNSUPPORTED[name]:
        assert submit(**{name: value}).prompt == "p"
        assert entry(**{name: json.dumps(value)}).prompt == "p"
    assert submit(**{name: None}).prompt == "p"
    for value in (3, "something", {"a": 1}, [1]):
        with pytest.raises(Unsupported) as caught:
            submit(**{name: value})
        assert name == caught.value.field
        with pytest.raises(Unsupported) as caught:
            entry(**{name: json.dumps(value)})
        assert name == caught.value.field


@pytest.mark.parametrize("name", MISSPELT)
def test_another_spelling_of_our_field_is_refused_with_the_right_name(name: str) -> None:
    for refused in (lambda: submit(**{name: 1}), lambda: entry(**{name: "1"})):
        with pytest.raises(Unsupported, match=MISSPELT[name]) as caught:
            refused()
        assert name == caught.value.field


def test_true_is_not_one_and_one_is_not_true() -> None:
    with pytest.raises(Unsupported):
        submit(n=True)
    with pytest.raises(Unsupported):
        submit(echo=0)


def test_unknown_keys_are_ignored_on_both_doors() -> None:
    assert submit() == submit(later={"a": [1]})
    assert entry() == entry(later="\n", other=b"\xff")


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"prompt": MISSING}, "prompt"),
        ({"messages": [USER]}, "messages"),
        ({"input_ids": [1]}, "input_ids"),
        ({"prompt": MISSING, "messages": [USER], "input_ids": [1]}, "input_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(values: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidField) as caught:
        submit(**values)
    assert path == caught.value.field


def test_an_entry_without_a_job_id_has_the_entrys_id() -> None:
    assert entry().job == "170-0"
    assert entry(job="mine").job == "mine"


def test_an_entry_with_a_body_is_the_submit_in_it() -> None:
    body = msgpack.packb({"prompt": "p", "max_tokens": 3})
    assert replace(submit(max_tokens=3), job="170-0") == parse_entry({b"body": body}, "170-0")
    assert parse_entry({b"body": body, b"job": b"mine"}, "170-0").job == "mine"
    with pytest.raises(InvalidField) as caught:
        parse_entry({b"body": body, b"max_tokens": b"3"}, "170-0")
    assert caught.value.field == "max_tokens"
    named = msgpack.packb({"prompt": "p", "job": "a"})
    with pytest.raises(InvalidField) as caught:
        parse_entry({b"body": named, b"job": b"b"}, "170-0")
    assert caught.value.field == "job"
    for raw in (b"", b"\xc1", b"\x90", msgpack.packb({"prompt": NAN})):
        with pytest.raises(BadFrame):
            parse_entry({b"body": raw}, "170-0")


def test_sizes_are_capped() -> None:
    with pytest.raises(TooLarge) as caught:
        submit(prompt="x" * (MAX_TEXT_BYTES + 1))
    assert caught.value.field == "prompt"
    with pytest.raises(TooLarge) as caught:
        submit(prompt="é" * (MAX_TEXT_BYTES // 2 + 1))
    with pytest.raises(TooLarge) as caught:
        submit(stop_token_ids=[1] * 257)
    assert caught.value.field == "stop_token_ids"
    with pytest.raises(TooLarge):
        parse_entry({b"prompt": b"p", b"later": b"x" * (16 << 20)}, "1-0")


def ids_submit(body: dict[str, Any], *blobs: bytes) -> JobRequest:
    return parse_submit({"job": "j", **body}, blobs)


def test_prompt_ids_may_travel_as_a_blob() -> None:
    request = ids_submit({"input_ids_blob": 1}, b"", pack_ids((1, 2**31 - 1)))
    assert request.input_ids == (1, 2**31 - 1)


@pytest.mark.parametrize(
    ("body", "blobs", "error"),
    [
        ({"input_ids_blob": 0}, [], InvalidField),
        ({"input_ids_blob": 1}, [b"\0\0\0\0"], InvalidField),
        ({"input_ids_blob": -1}, [b"\0\0\0\0"], InvalidField),
        ({"input_ids_blob": True}, [b"\0\0\0\0"], InvalidField),
        ({"input_ids_blob": 0}, [b""], InvalidField),
        ({"input_ids_blob": 0}, [b"\0\0\0"], InvalidField),
        ({"input_ids_blob": 0}, [b"\xff\xff\xff\xff"], InvalidField),
        ({"input_ids_blob": 0, "input_ids": [1]}, [b"\0\0\0\0"], InvalidField),
        ({"input_ids_blob": 0}, [bytes(4 * MAX_IDS + 4)], TooLarge),
    ],
)
def test_a_bad_blob_is_refused(
    body: dict[str, Any], blobs: list[bytes], error: type[TokenbusError]
) -> None:
    with pytest.raises(error) as caught:
        ids_submit(body, *blobs)
    assert caught.value.field == "input_ids_blob"


@pytest.mark.parametrize("value", [[], [-1], [BIG], [True], [1.0], ["1"], "1", 5, {"a": 1}, None])
def test_bad_prompt_ids_are_refused(value: Any) -> None:
    with pytest.raises(InvalidField):
        ids_submit({"input_ids": value})


WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=100).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(10, 1_000),
    min_tokens=st.integers(0, 10),
    temperature=st.none() | st.floats(0, 100),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    top_k=st.none() | st.integers(0, 1_000),
    min_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.none() | st.floats(0.1, 100),
    presence_penalty=st.none() | st.floats(-2, 2),
    frequency_penalty=st.none() | st.floats(-2, 2),
    seed=st.integers(0, MAX_SEED),
    stop=st.lists(WORDS, max_size=3).map(tuple),
    stop_token_ids=IDS | st.just(()),
    ignore_eos=st.booleans(),
)
PROMPTS = (
    st.fixed_dictionaries({"prompt": WORDS})
    | st.fixed_dictionaries({"input_ids": IDS})
    | st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": WORDS}),
                min_size=1,
                max_size=3,
            ).map(tuple)
        }
    )
)


@given(PROMPTS, PARAMS, st.sampled_from(["high", "normal", "low"]), IDS | st.just(()))
@settings(max_examples=150, deadline=None)
def test_a_request_survives_both_doors(
    prompt: dict[str, Any], params: SamplingParams, priority: Any, have: tuple[int, ...]
) -> None:
    request = JobRequest(
        job="j", params=params, priority=priority, have=have, deadline_ms=5, tenant="t", **prompt
    )
    body, blobs = build_submit(request)
    assert request == parse_submit(body, blobs)
    fields = {key.encode(): value.encode() for key, value in build_entry(request).items()}
    assert request == parse_entry(fields, "1-0")


NAMES = st.sampled_from([*JOB_FIELDS, *SAMPLING_FIELDS, *UNSUPPORTED, "input_ids_blob", "body"])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.dictionaries(NAMES, ANY, max_size=6), st.lists(st.binary(max_size=9), max_size=3))
@settings(max_examples=300, deadline=None)
def test_no_submit_raises_anything_but_a_typed_error(
    body: dict[str, Any], blobs: list[bytes]
) -> None:
    with suppress(TokenbusError):
        parse_submit(body, blobs)


@given(st.dictionaries(NAMES.map(str.encode) | st.binary(max_size=5), st.binary(max_size=30)))
@settings(max_examples=300, deadline=None)
def test_no_entry_raises_anything_but_a_typed_error(fields: dict[bytes, bytes]) -> None:
    with suppress(TokenbusError):
        parse_entry(fields, "1-0")


@given(NAMES, ANY)
@settings(max_examples=300, deadline=None)
def test_no_json_text_in_an_entry_raises_anything_but_a_typed_error(name: str, value: Any) -> None:
    text = json.dumps(value, default=repr)
    with suppress(TokenbusError):
        parse_entry({b"prompt": b"p", name.encode(): text.encode("utf-8", "replace")}, "1-0")


def test_make_request_draws_an_id_and_refuses_unknown_names() -> None:
    assert make_request("p").job != make_request("p").job
    with pytest.raises(TypeError, match="temprature"):
        make_request("p", temprature=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidField):
        make_request("p", top_p=7)
    with pytest.raises(Unsupported):
        make_request("p", n=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("queue", ["", "a b", "a{b", "x" * 65, "a:b", "a\n"])
def test_a_queue_name_that_would_break_the_hash_tag_is_refused(queue: str) -> None:
    with pytest.raises(InvalidField):
        Keys(queue)


def test_keys_are_those_of_the_contract() -> None:
    keys = Keys("default")
    assert [
        keys.jobs(),
        keys.jobs("high"),
        keys.jobs("low"),
        keys.out("j"),
        keys.job("j"),
        keys.cancel("j"),
        keys.idempotency("t", "k"),
        keys.control,
        keys.dead,
        keys.workers,
    ] == [
        "tokenbus:{default}:jobs",
        "tokenbus:{default}:jobs:high",
        "tokenbus:{default}:jobs:low",
        "tokenbus:{default}:out:j",
        "tokenbus:{default}:job:j",
        "tokenbus:{default}:cancel:j",
        "tokenbus:{default}:idem:t:k",
        "tokenbus:{default}:control",
        "tokenbus:{default}:dead",
        "tokenbus:{default}:workers",
    ]
