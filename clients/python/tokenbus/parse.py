"""Untrusted input -> `JobRequest`, for both doors; and back.

`parse_submit` reads the body of a ZeroMQ SUBMIT, `parse_entry` the fields of a Redis entry. Both
end in the same table of fields, so the doors cannot drift apart. Unknown keys are ignored (a newer
client may send them), but an option that we know and do not honour is refused unless its value asks
for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenbus import fields as f
from tokenbus.errors import InvalidField, Unsupported
from tokenbus.flat import entry_to_map, map_to_entry
from tokenbus.request import MAX_SEED, JobRequest, SamplingParams

MAX_OUTPUT_TOKENS = 2**31 - 1
INLINE_IDS = 64  # up to here a prompt's ids travel in the body, above in a blob

Reader = Callable[[str, Any], Any]


def _int(low: int, high: int) -> Reader:
    return lambda path, value: f.read_int(path, value, low, high)


def _float(low: float, high: float, *, above_low: bool = False) -> Reader:
    return lambda path, value: f.read_float(path, value, low, high, above_low=above_low)


SAMPLING_FIELDS: dict[str, Reader] = {
    "max_tokens": _int(1, MAX_OUTPUT_TOKENS),
    "min_tokens": _int(0, MAX_OUTPUT_TOKENS),
    "temperature": _float(0.0, 100.0),
    "top_p": _float(0.0, 1.0, above_low=True),
    "top_k": _int(-1, MAX_OUTPUT_TOKENS),
    "min_p": _float(0.0, 1.0),
    "repetition_penalty": _float(0.0, 100.0, above_low=True),
    "presence_penalty": _float(-2.0, 2.0),
    "frequency_penalty": _float(-2.0, 2.0),
    "seed": _int(0, MAX_SEED),
    "stop": f.read_stop,
    "stop_token_ids": lambda p, v: f.read_token_ids(p, v, f.MAX_STOP_TOKEN_IDS, allow_empty=True),
    "ignore_eos": f.read_bool,
}

JOB_FIELDS: dict[str, Reader] = {
    "job": f.read_job_id,
    "prompt": f.read_prompt,
    "messages": f.read_messages,
    "input_ids": lambda path, value: f.read_token_ids(path, value, f.MAX_IDS),
    "priority": f.read_priority,
    "deadline_ms": _int(1, f.MAX_DEADLINE_MS),
    "tenant": f.read_tenant,
    "idempotency_key": f.read_idempotency_key,
    "durable": f.read_bool,
    "model": f.read_model,
    "queue": f.read_queue,
    "have": lambda path, value: f.read_token_ids(path, value, f.MAX_IDS, allow_empty=True),
}

# Options of other engines that we know and do not honour, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "prompt_logprobs": (False, 0),
    "logit_bias": ({}, []),
    "response_format": ({"type": "text"}, {}, "text"),
    "json_schema": ({}, ""),
    "guided_json": ({}, ""),
    "regex": ("",),
    "guided_regex": ("",),
    "grammar": ("",),
    "guided_grammar": ("",),
    "structured_outputs": ({},),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "suffix": ("",),
    "stream": (True,),
    "truncate_prompt_tokens": (-1,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "lora": ("",),
    "adapter": ("",),
    "images": ([],),
    "audio": ([], {}),
}
# Other spellings of our own fields: taking them for unknown keys would ignore what the caller asked
# for.
MISSPELT: dict[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "ids": "input_ids",
    "prompt_token_ids": "input_ids",
    "repeat_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "timeout_ms": "deadline_ms",
    "ttl_ms": "deadline_ms",
    "prio": "priority",
}


_SCALARS = frozenset((int, float, bool, str, type(None)))
_KNOWN = frozenset((*SAMPLING_FIELDS, *JOB_FIELDS))
_REFUSED = frozenset((*UNSUPPORTED, *MISSPELT))


def parse_submit(body: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> JobRequest:
    """The job in a SUBMIT body. Raises InvalidField, TooLarge or Unsupported naming the field;
    nothing else.
    """
    values = {key: value for key, value in body.items() if value is not None}
    if "job" not in values:
        raise InvalidField("job: is missing", field="job")
    _take_blob(values, "input_ids_blob", "input_ids", tuple(blobs))
    _take_blob(values, "have_blob", "have", tuple(blobs))
    return _build(values)


def parse_entry(fields: Mapping[bytes, bytes], entry_id: str) -> JobRequest:
    """The job in a Redis entry; its id is the field `job`, else the entry's id.

    Raises InvalidField, TooLarge, Unsupported, or BadFrame for a `body` that is not a msgpack map;
    nothing else.
    """
    values = entry_to_map(fields, _KNOWN, _REFUSED)
    if values.get("job") is None:
        values["job"] = entry_id
    return parse_submit(values)


def _take_blob(values: dict[str, Any], name: str, target: str, blobs: tuple[bytes, ...]) -> None:
    if name not in values:
        return
    if target in values:
        raise InvalidField(f"{name}: {target} is given too; send one of them", field=name)
    values[target] = f.read_ids_blob(name, values.pop(name), blobs, f.MAX_IDS)


def _build(values: Mapping[str, Any]) -> JobRequest:
    if not values.keys() <= _KNOWN:
        _refuse_unsupported(values)
    job: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in values.items():
        if name in JOB_FIELDS:
            job[name] = JOB_FIELDS[name](name, value)
        elif name in SAMPLING_FIELDS:
            sampling[name] = SAMPLING_FIELDS[name](name, value)
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    prompts = [k for k in ("prompt", "messages", "input_ids") if k in job]
    if len(prompts) != 1:
        got = " and ".join(prompts) or "none"
        message = f"expected exactly one of prompt, messages and input_ids, got {got}"
        raise InvalidField(message, field=prompts[1] if prompts else "prompt")
    params = SamplingParams(**sampling)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        message = f"min_tokens: {params.min_tokens} is more than max_tokens {params.max_tokens}"
        raise InvalidField(message, field="min_tokens")
    if job.get("have") and params.seed is None:
        raise InvalidField("seed: is needed to continue from `have`", field="seed")
    return JobRequest(**job, params=params)


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key in MISSPELT:
            raise Unsupported(f"{key}: is called {MISSPELT[key]} here", field=key)
        if key in UNSUPPORTED and not _is_neutral(value, UNSUPPORTED[key]):
            raise Unsupported(f"{key}: is not supported by this worker", field=key)


def _is_neutral(value: Any, neutral: tuple[object, ...]) -> bool:
    """Equal to a neutral value and of its kind: True is not 1."""
    is_bool = isinstance(value, bool)
    return any(isinstance(item, bool) == is_bool and value == item for item in neutral)


def build_submit(request: JobRequest) -> tuple[dict[str, Any], list[bytes]]:
    """Body and blobs of the SUBMIT for a request. Fields that say nothing are left out."""
    body = request_to_map(request)
    blobs: list[bytes] = []
    for name in ("input_ids", "have"):
        ids = body.get(name)
        if ids is not None and len(ids) > INLINE_IDS:
            body[f"{name}_blob"] = len(blobs)
            blobs.append(f.pack_ids(tuple(body.pop(name))))
    return body, blobs


def build_entry(request: JobRequest) -> dict[str, str]:
    """Fields of the Redis entry for a request, all flat strings."""
    return map_to_entry(request_to_map(request))


def request_to_map(request: JobRequest) -> dict[str, Any]:
    """A request as plain values (lists, not tuples), without fields at their defaults. Checks it on
    the way.
    """
    values: dict[str, Any] = {"job": request.job}
    blank = JobRequest(job=request.job)
    for name in JOB_FIELDS:
        value = getattr(request, name)
        if value != getattr(blank, name):
            values[name] = _plain(value)
    for name in SAMPLING_FIELDS:
        value = getattr(request.params, name)
        if value != getattr(blank.params, name):
            values[name] = _plain(value)
    _build(values)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):  # of a thousand ids, perhaps
        return [item if type(item) in _SCALARS else _plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
