"""Greedy continuous decoding with llama-cpp-python's low-level interface, for a side-by-side
measurement.

Run by the interpreter that has llama-cpp-python, not by ours. Reads one JSON object from stdin:
`model` (a .gguf path), `prompts` (lists of token ids), `new_tokens`, `threads`, `repeats`. All
prompts are decoded as parallel sequences of one context. Prints one JSON object: the best run's
`prefill_s`, `decode_s`, `decode_tok_s`, and the tokens of sequence 0.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp as lib
import numpy as np

_BATCH = 512


def _decode(context: Any, batch: Any, entries: list[tuple[int, int, int, bool]]) -> None:
    batch.n_tokens = len(entries)
    for i, (token, position, sequence, wants_logits) in enumerate(entries):
        batch.token[i] = token
        batch.pos[i] = position
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.logits[i] = int(wants_logits)
    status = lib.llama_decode(context, batch)
    if status != 0:
        raise RuntimeError(f"llama_decode returned {status}")


def _argmax(context: Any, index: int, vocab_size: int) -> int:
    pointer = lib.llama_get_logits_ith(context, index)
    address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
    return int(np.argmax(np.ctypeslib.as_array(address, shape=(vocab_size,))))


def _run(
    context: Any, prompts: list[list[int]], new_tokens: int, vocab_size: int
) -> tuple[float, float, list[int]]:
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    batch = lib.llama_batch_init(_BATCH, 0, 1)
    started = time.perf_counter()
    last: list[int] = []
    for sequence, prompt in enumerate(prompts):
        for start in range(0, len(prompt), _BATCH):
            part = prompt[start : start + _BATCH]
            ends = start + len(part) == len(prompt)
            entries = [
                (token, start + i, sequence, ends and i == len(part) - 1)
                for i, token in enumerate(part)
            ]
            _decode(context, batch, entries)
        last.append(_argmax(context, len(part) - 1, vocab_size))
    prefilled = time.perf_counter()
    tokens = [last[0]]
    for step in range(new_tokens - 1):
        _decode(context, batch, [(t, len(prompts[s]) + step, s, True) for s, t in enumerate(last)])
        last = [_argmax(context, s, vocab_size) for s in range(len(prompts))]
        tokens.append(last[0])
    done = time.perf_counter()
    lib.llama_batch_free(batch)
    return prefilled - started, done - prefilled, tokens


def main() -> None:
    """Measure what stdin asks for."""
    job = json.load(sys.stdin)
    prompts, new_tokens, threads = job["prompts"], job["new_tokens"], job["threads"]
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(job["model"].encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = sum(len(p) + new_tokens for p in prompts) + 1024 * len(prompts)
    params.n_batch = params.n_ubatch = _BATCH
    params.n_seq_max = len(prompts)
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(model, params)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    runs = [_run(context, prompts, new_tokens, vocab_size) for _ in range(job["repeats"])]
    prefill_s, decode_s, tokens = min(runs, key=lambda run: run[1])
    result = {
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "decode_tok_s": len(prompts) * (new_tokens - 1) / decode_s,
        "tokens": tokens,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
