"""A request -> `Prepared`: prompt ids, resolved numbers, every check against the model.

Pure functions of the request, the model and its limits; they raise a typed error naming the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from broker.messages import IntArray, Prepared
from broker.ring.records import Sampling
from broker.text.model import TextModel
from tokenbus.errors import InvalidField, TooLong, UnknownModel, UnknownQueue, Unsupported
from tokenbus.request import JobRequest, SamplingParams

FEW_IDS = 64  # so many are looked at sooner one by one than by numpy
GREEDY_BELOW = 1e-5  # temperatures under it count as 0
_LEAST_REPETITION_PENALTY = 1e-30
"""Smaller ones count as this: logits divided by it, and by the smallest temperature, stay finite in
float32, and the order of the tokens is what it would be."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine said when it became ready; before that, what the model's files say."""

    vocab_size: int
    max_model_len: int
    default_max_tokens: int
    eos_token_ids: tuple[int, ...]


def prompt_size(request: JobRequest) -> int:
    """Characters to be tokenized: the measure of how long that takes. 0 for ids."""
    if request.prompt is not None:
        return len(request.prompt)
    return sum(len(m["content"]) for m in request.messages or ())


def encode_prompt(request: JobRequest, model: TextModel) -> IntArray:
    """Prompt ids int32 [P]. Safe to run in a thread."""
    if request.prompt is not None:
        return model.encoder.encode(request.prompt, add_special_tokens=True)
    if request.messages is not None:
        if model.chat is None:
            raise Unsupported("messages: the model has no chat template", field="messages")
        text = model.chat.render(request.messages)
        return model.encoder.encode(text, add_special_tokens=False)
    return np.array(request.input_ids or (), dtype=np.int32)


def resolve(
    request: JobRequest, prompt_ids: IntArray, model: TextModel, limits: Limits, context: object
) -> Prepared:
    """Check ids and lengths, fill in defaults. Raises a TokenbusError naming the field."""
    field = prompt_field(request)
    _check_ids(field, prompt_ids, limits.vocab_size)
    _check_ids("stop_token_ids", request.params.stop_token_ids, limits.vocab_size)
    _check_ids("have", request.have, limits.vocab_size)
    room = limits.max_model_len - len(prompt_ids)
    if len(prompt_ids) == 0:
        raise InvalidField(f"{field}: has no tokens", field=field)
    if room < 1:
        message = f"{field}: {len(prompt_ids)} tokens, the model takes {limits.max_model_len - 1}"
        raise TooLong(f"{message} and needs room for one more", field=field)
    params = request.params
    wanted = params.max_tokens
    if wanted is None:
        wanted = max(limits.default_max_tokens, params.min_tokens)
    stop_ids = dict.fromkeys(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids.update(dict.fromkeys(limits.eos_token_ids))
    max_tokens = min(wanted, room)
    return Prepared(
        request=request,
        prompt_ids=prompt_ids,
        sampling=_sampling(params, model, limits.vocab_size),
        stop_token_ids=tuple(stop_ids),
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        context=context,
    )


def check_names(request: JobRequest, model_name: str, queue: str) -> None:
    """Raises UnknownModel or UnknownQueue if the request names another model or queue."""
    if request.model is not None and request.model != model_name:
        message = f"model: {request.model!r} is not served here, {model_name!r} is"
        raise UnknownModel(message, field="model")
    if request.queue is not None and request.queue != queue:
        message = f"queue: {request.queue!r} is not served here, {queue!r} is"
        raise UnknownQueue(message, field="queue")


def prompt_field(request: JobRequest) -> str:
    """Which of the three prompt fields the request uses."""
    if request.prompt is not None:
        return "prompt"
    return "messages" if request.messages is not None else "input_ids"


def _check_ids(field: str, ids: Sequence[int] | IntArray, vocab_size: int) -> None:
    if len(ids) == 0:
        return
    if len(ids) <= FEW_IDS:
        few = ids.tolist() if isinstance(ids, np.ndarray) else ids
        if min(few) >= 0 and max(few) < vocab_size:
            return
    array = np.asarray(ids, dtype=np.int32)
    if np.maximum.reduce(array.view(np.uint32)) < vocab_size:  # a negative id is a huge one
        return
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    path = f"{field}[{bad[0]}]"
    message = f"{path}: token id {array[bad[0]]} is not in 0..{vocab_size - 1}"
    raise InvalidField(message, field=path)


def _sampling(params: SamplingParams, model: TextModel, vocab_size: int) -> Sampling:
    defaults = model.defaults
    temperature = defaults.temperature if params.temperature is None else params.temperature
    repetition = params.repetition_penalty
    if repetition is None:
        repetition = defaults.repetition_penalty
    return Sampling(
        seed=params.seed or 0,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=defaults.top_p if params.top_p is None else params.top_p,
        min_p=defaults.min_p if params.min_p is None else params.min_p,
        top_k=min(defaults.top_k if params.top_k is None else params.top_k, vocab_size),
        repetition_penalty=max(repetition, _LEAST_REPETITION_PENALTY),
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
    )
