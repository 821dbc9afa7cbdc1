"""What a step has to do, as the decoder's layers see it: rows, lengths and work lists on the
device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.gpu.attention_plans import Plans


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Attention over the cache for rows of one new token.

    rows, seq_lens int32 [B]. plans: window -> work list, filled for these lengths.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    plans: Plans


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Attention for prompt chunks.

    begin: first packed token. rows, seq_lens int32 [R]; cu_seqlens_q int32 [R + 1] from `begin`.
    """

    begin: int
    rows: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledWork:
    """Tokens whose logits are wanted, each the last one of its row.

    tokens int32 [S]: places among the packed tokens. rows, seq_lens int32 [S]. -1, -1 and at most 0
    where there is none. plans: window -> work list for S rows, filled on the way.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    plans: Plans
