"""Admission: what can never run is refused with a code and a field; the queue keeps its order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from broker.ring.records import Reject, Sampling
from engine.request import Request, WaitingQueue, accept
from tests.unit.engine_harness import VOCAB, make_runner, make_submit

INFO = make_runner(num_blocks=16, block_size=4, max_len=128).info  # the cache holds 64 tokens
NAN = float("nan")
P = Sampling


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt": []}, "invalid", "prompt_ids"),
        ({"prompt": [VOCAB]}, "invalid", "prompt_ids"),
        ({"prompt": [-1]}, "invalid", "prompt_ids"),
        ({"prompt": [1], "prefix": [VOCAB], "max_tokens": 4}, "invalid", "prefix_ids"),
        ({"prompt": [1], "stop": [VOCAB]}, "invalid", "stop_token_ids"),
        ({"prompt": [1], "stop": [-5]}, "invalid", "stop_token_ids"),
        ({"prompt": [1] * 64}, "too_long", "prompt_ids"),
        ({"prompt": [1] * 60, "prefix": [1] * 4, "max_tokens": 9}, "too_long", "prompt_ids"),
        ({"prompt": [1], "max_tokens": 0}, "invalid", "max_tokens"),
        ({"prompt": [1], "prefix": [2, 3], "max_tokens": 2}, "invalid", "max_tokens"),
        ({"prompt": [1], "min_tokens": -1}, "invalid", "min_tokens"),
        ({"prompt": [1], "priority": 3}, "invalid", "priority"),
        ({"prompt": [1], "priority": -1}, "invalid", "priority"),
        ({"prompt": [1], "sampling": P(temperature=NAN)}, "invalid", "temperature"),
        ({"prompt": [1], "sampling": P(temperature=-1)}, "invalid", "temperature"),
        ({"prompt": [1], "sampling": P(temperature=1e999)}, "invalid", "temperature"),
        ({"prompt": [1], "sampling": P(top_p=NAN)}, "invalid", "top_p"),
        ({"prompt": [1], "sampling": P(top_p=1.5)}, "invalid", "top_p"),
        ({"prompt": [1], "sampling": P(min_p=-0.1)}, "invalid", "min_p"),
        ({"prompt": [1], "sampling": P(top_k=-1)}, "invalid", "top_k"),
        ({"prompt": [1], "sampling": P(repetition_penalty=0)}, "invalid", "repetition_penalty"),
        ({"prompt": [1], "sampling": P(presence_penalty=NAN)}, "invalid", "presence_penalty"),
        ({"prompt": [1], "sampling": P(frequency_penalty=NAN)}, "invalid", "frequency_penalty"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_naming_the_field(
    fields: dict[str, object], code: str, field: str
) -> None:
    fields = dict(fields)
    prompt = fields.pop("prompt")
    refused = accept(make_submit(7, prompt, **fields), INFO, 0)
    assert isinstance(refused, Reject)
    assert (refused.rid, refused.code, refused.field) == (7, code, field)
    assert field in refused.message or code == "too_long"


def test_max_tokens_over_the_room_is_cut_to_it() -> None:
    request = accept(make_submit(1, [1] * 60, max_tokens=1000), INFO, 0)
    assert isinstance(request, Request)
    assert request.limit_tokens == 64


def test_a_prompt_over_the_model_names_the_model_and_its_length() -> None:
    info = replace(INFO, num_blocks=1000)
    refused = accept(make_submit(1, [1] * 129), info, 0)
    assert isinstance(refused, Reject)
    assert "the model holds 128" in refused.message


def test_a_request_does_not_keep_the_record_alive() -> None:
    submit = make_submit(1, [1, 2, 3])
    request = accept(submit, INFO, 0)
    assert isinstance(request, Request)
    assert not np.shares_memory(request.token_ids, submit.prompt_ids)


def request(rid: int, order: int) -> Request:
    made = accept(make_submit(rid, [1]), INFO, order)
    assert isinstance(made, Request)
    return replace(made, order=order)


def test_the_queue_serves_by_order_and_a_held_run_comes_back_to_its_place() -> None:
    queue = WaitingQueue()
    for rid, order in ((1, 30), (2, 10), (3, 20)):
        queue.push(request(rid, order))
    queue.hold(2)
    assert len(queue) == 3
    assert queue.pop().rid == 3
    queue.resume(2)
    assert queue.pop().rid == 2
    assert queue.pop().rid == 1
    assert queue.peek() is None


def test_the_queue_does_not_grow_with_runs_that_left_it() -> None:
    queue = WaitingQueue()
    queue.push(request(1, 0))
    for rid in range(2, 2000):
        queue.push(request(rid, rid))
        assert queue.remove(rid) is not None
    assert len(queue) == 1
    assert len(queue._heap) < 200
    assert queue.pop().rid == 1


def test_removing_an_unknown_run_gives_none() -> None:
    assert WaitingQueue().remove(5) is None


def test_min_tokens_with_more_stop_ids_than_the_runner_holds_back_is_refused() -> None:
    info = replace(INFO, max_held_stop_ids=2)
    submit = make_submit(7, [1], stop=[0, 1, 2], min_tokens=1)
    rejected = accept(submit, info, 0)
    assert isinstance(rejected, Reject)
    assert (rejected.code, rejected.field) == ("unsupported", "min_tokens")
    assert isinstance(accept(submit._replace(min_tokens=0), info, 0), Request)
