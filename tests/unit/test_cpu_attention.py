"""Attention of decode rows: near torch's own, and the same bits in any company and any padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.cpu.attention import DecodeAttention
from engine.cpu.step_inputs import PIECE_TOKENS, DecodeGroup
from engine.model.spec import ModelSpec, RopeSpec

HEADS, KV_HEADS, HEAD_DIM, LONGEST = 9, 3, 64, 1536
LENGTHS = (1, 63, 64, 65, 300, 511, 512, 513, 1500)
WINDOW = 100

Array = npt.NDArray[Any]


def make_spec(heads: int = HEADS, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        hidden_size=heads * head_dim,
        intermediate_size=64,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=8,
        max_model_len=LONGEST,
        rms_norm_eps=1e-5,
        rope=RopeSpec(),
        windows=(0,),
        qkv_bias=False,
        qk_norm=False,
        tied_embeddings=True,
        eos_token_ids=(),
    )


class Rows:
    """Rows of the given lengths; each has the same numbers in any company."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        shape = (spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        generator = np.random.default_rng(11)
        self.heads = generator.normal(0, 1, (len(LENGTHS), *shape)).astype(np.float32)
        contexts = (2, len(LENGTHS), spec.num_kv_heads, LONGEST, spec.head_dim)
        self.contexts = generator.normal(0, 1, contexts).astype(np.float32)
        for i, length in enumerate(LENGTHS):
            self.contexts[:, i, :, length:] = 0.0

    def attend(self, rows: list[int], context: int, window: int = 0) -> torch.Tensor:
        """What these rows get in one step whose contexts are padded to this many tokens."""
        spec = self.spec
        distance = np.array([LENGTHS[i] for i in rows])[:, None] - 1 - np.arange(context)
        hidden = (distance < 0) | ((distance >= window) if window else False)
        mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32))
        mask = mask.repeat_interleave(spec.num_kv_heads, dim=0)[:, None, :]
        group = DecodeGroup(len(rows), context, torch.zeros(0), {window: mask})
        k, v = self.contexts[:, rows, :, :context].reshape(
            2, len(rows), spec.num_kv_heads, -1, PIECE_TOKENS, spec.head_dim
        )
        return DecodeAttention(spec, group)(self.heads[rows], k, v, window).clone()


def padded(length: int) -> int:
    return -(-length // PIECE_TOKENS) * PIECE_TOKENS


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 48), (8, 1, 128), (12, 4, 12)]
)
@pytest.mark.parametrize("window", [0, WINDOW])
def test_it_is_near_the_attention_of_torch(
    heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
    rows = Rows(make_spec(heads, kv_heads, head_dim))
    together = rows.attend(list(range(len(LENGTHS))), LONGEST, window)
    for i, length in enumerate(LENGTHS):
        first = max(0, length - window) if window else 0
        q = torch.from_numpy(rows.heads[i, :heads, None])
        k, v = torch.from_numpy(rows.contexts[:, i, :, first:length])
        expected = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(together[i], expected.reshape(-1))


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_row_has_the_same_bits_in_any_company_and_any_padding(window: int) -> None:
    rows = Rows(make_spec())
    everyone = list(range(len(LENGTHS)))
    together = rows.attend(everyone, LONGEST, window)
    for i, length in enumerate(LENGTHS):
        assert torch.equal(rows.attend([i], padded(length), window)[0], together[i])
        with_others = rows.attend([*everyone[:i][:2], i], LONGEST, window)
        assert torch.equal(with_others[-1], together[i])


def test_a_row_that_is_not_finite_spoils_itself_only() -> None:
    rows = Rows(make_spec())
    clean = rows.attend([0, 4, 5], 512)
    rows.heads[4, 0, 3] = np.nan
    spoiled = rows.attend([0, 4, 5], 512)
    assert not bool(torch.isfinite(spoiled[1]).all())
    assert torch.equal(spoiled[[0, 2]], clean[[0, 2]])
