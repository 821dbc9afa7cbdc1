"""The decoder's layers on the GPU, in the two forms a step can have.

`decode` is a step of one token per row, made to be captured in a CUDA graph: every launch has fixed
arguments and lengths live in device memory. `packed` is any mix of prompt chunks and decode rows.
Both write the same numbers into the same cache.

What the last layer computes of a token goes into that token's own logits and its keys and values.
So of tokens that are not sampled, which are most of a prompt's, `packed` computes the latter only:
one layer in all of a model's is saved. In deterministic mode a token's way is always the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.gpu.activations import Activations, HeadBuffers
from engine.gpu.kv_memory import KvMemory
from engine.gpu.linear import Linears
from engine.gpu.step_costs import step_costs
from engine.gpu.work import DecodeWork, PromptWork, SampledWork
from engine.model.spec import ModelSpec
from engine.model.weights import LayerWeights, ModelWeights
from kernels.activation import silu_mul
from kernels.decode_plan import plan_decode
from kernels.deferred_norm import NextNorm, ScaledInput
from kernels.embedding import embed
from kernels.new_tokens import NewTokens
from kernels.norm import add_parts_norm, rms_norm
from kernels.paged_decode import paged_decode
from kernels.prefill import prefill_attention
from kernels.rope import rope_kv_write, rope_tables
from kernels.table_updates import gather_rows


class GpuDecoder:
    """All layers of one model over one KV cache."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        cache: KvMemory,
        block_tables: torch.Tensor,
        token_table: torch.Tensor,
        linears: Linears,
    ) -> None:
        self.spec = spec
        self._weights = weights
        self._cache = cache
        self._block_tables = block_tables
        self._token_table = token_table
        self.linears = linears
        self.costs = step_costs(spec, _dense(weights.embedding).element_size())
        device = token_table.device
        cos, sin = rope_tables(
            spec.head_dim,
            spec.max_model_len,
            spec.rope.inverse_frequencies(spec.head_dim),
        )
        self._cos, self._sin = cos.to(device), sin.to(device)
        self._scale = spec.head_dim**-0.5
        # What attention turns new tokens with; None where they are turned before it.
        self._new_tokens = [
            None
            if linears.deterministic
            else NewTokens(self._cos, self._sin, layer.q_norm, layer.k_norm, spec.rms_norm_eps)
            for layer in weights.layers
        ]

    def decode(self, a: Activations, work: DecodeWork, logits: torch.Tensor) -> None:
        """One token per row: embeddings to logits float32 [B, V], for B rows of activations."""
        x = self._embed(
            a, pdl=True, next_norm=self._next_norm(a, self._weights.layers[0].attn_norm)
        )
        if self.linears.is_fused(len(a.hidden)):
            self._fused_layers(a, x, work, logits)
            return
        # Each of our kernels may start early, since each waits. A cuBLAS kernel among them starts
        # and ends as usual: what follows it starts when it has ended.
        self._plain_layers(a, work, None, self.spec.num_layers, pdl=True)
        self.linears.plain(logits, a.normed, self._head(), pdl=True)

    def packed(
        self,
        a: Activations,
        decode: DecodeWork | None,
        prompts: PromptWork | None,
        sampled: SampledWork,
        head: HeadBuffers,
    ) -> torch.Tensor:
        """Any step: T rows of activations -> logits float32 [S, V] of the sampled tokens."""
        self._embed(a, pdl=False)
        ends_early = not self.linears.deterministic
        self._plain_layers(a, decode, prompts, self.spec.num_layers - ends_early)
        if ends_early:
            self._keep_last_kv(a)
        num_sampled = len(sampled.tokens)
        hidden, normed = head.hidden[:num_sampled], head.normed[:num_sampled]
        logits = head.logits[:num_sampled]
        if num_sampled:
            if ends_early:
                gather_rows(a.hidden, sampled.tokens, hidden)
                self._sampled_layer(
                    replace(a.first(num_sampled), hidden=hidden, normed=normed), sampled
                )
            else:
                gather_rows(a.normed, sampled.tokens, normed)
            self.linears.plain(logits, normed, self._head())
        return logits

    # --- parts ---

    def _head(self) -> torch.Tensor:
        return _dense(self._weights.lm_head)

    def _embed(
        self, a: Activations, pdl: bool, next_norm: NextNorm | None = None
    ) -> ScaledInput | None:
        table = _dense(self._weights.embedding)
        return embed(
            a.hidden, table, self._token_table, a.token_rows, a.positions, pdl=pdl,
            next_norm=next_norm,
        )  # fmt: skip

    def _fused_layers(
        self, a: Activations, x: ScaledInput | None, work: DecodeWork, logits: torch.Tensor
    ) -> None:
        """Few launches, each prefetching its weights while the one before still runs. x: what the
        embedding has left of the first norm."""
        layers, final_norm = self._weights.layers, self._weights.final_norm
        next_norms = [*(layer.attn_norm for layer in layers[1:]), final_norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            self._product_of_norm(a, a.qkv, x, _dense(layer.qkv), layer.attn_norm, layer.qkv_bias)
            self._attend_decode(index, a, work, pdl=True)
            x = self._product_before_norm(a, a.attended, _dense(layer.o), layer.mlp_norm)
            self._product_of_norm(a, a.gated, x, _dense(layer.gate_up), layer.mlp_norm, glu=True)
            x = self._product_before_norm(a, a.gated, _dense(layer.down), next_norm)
        self._product_of_norm(a, logits, x, self._head(), final_norm)

    def _product_of_norm(
        self,
        a: Activations,
        out: torch.Tensor,
        x: ScaledInput | None,
        weight: torch.Tensor,
        norm: torch.Tensor,
        bias: torch.Tensor | None = None,
        glu: bool = False,
    ) -> None:
        """out = RMSNorm(hidden) W^T + bias; x: what the product before has left of that norm."""
        if x is not None:
            self.linears.fused(out, x, weight, bias=bias, glu=glu)
            return
        self.linears.fused(
            out, a.hidden, weight, bias=bias, glu=glu,
            norm_weight=norm, eps=self.spec.rms_norm_eps, norm_scratch=a.normed,
        )  # fmt: skip

    def _product_before_norm(
        self, a: Activations, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor
    ) -> ScaledInput | None:
        """hidden += x W^T; returns what it leaves of the norm behind it."""
        next_norm = self._next_norm(a, norm)
        return self.linears.fused(a.hidden, x, weight, residual=a.hidden, next_norm=next_norm)

    def _next_norm(self, a: Activations, norm: torch.Tensor) -> NextNorm | None:
        """The norm behind what is written to hidden, where products share it."""
        if not self.linears.shares_norms(len(a.hidden), a.hidden.dtype):
            return None
        return NextNorm(norm, a.normed, a.squares, self.spec.rms_norm_eps)

    def _plain_layers(
        self,
        a: Activations,
        decode: DecodeWork | None,
        prompts: PromptWork | None,
        num_layers: int,
        pdl: bool = False,
    ) -> None:
        """The first layers, with products of cuBLAS or fixed ones; normed is then what the norm
        behind them makes of hidden."""
        layers = self._weights.layers
        rms_norm(a.normed, a.hidden, layers[0].attn_norm, self.spec.rms_norm_eps, pdl=pdl)
        for index in range(num_layers):
            self._plain_layer(index, a, decode, prompts, pdl)

    def _plain_layer(
        self,
        index: int,
        a: Activations,
        decode: DecodeWork | None,
        prompts: PromptWork | None,
        pdl: bool = False,
    ) -> None:
        """One layer, from normed and hidden to those of the next one."""
        layers, plain = self._weights.layers, self.linears.plain
        layer, is_last = layers[index], index + 1 == len(layers)
        plain(a.qkv, a.normed, _dense(layer.qkv), layer.qkv_bias, pdl=pdl)
        if prompts is not None or self.linears.deterministic:
            self._rope(index, layer, a, pdl=pdl)
        if decode is not None:
            self._attend_decode(index, a, decode, pdl=pdl)
        if prompts is not None:
            self._attend_prompts(index, a, prompts)
        self._add_and_norm(a, a.attended, _dense(layer.o), layer.mlp_norm, pdl)
        self._gate_up(a, _dense(layer.gate_up), pdl)
        next_norm = self._weights.final_norm if is_last else layers[index + 1].attn_norm
        self._add_and_norm(a, a.gated, _dense(layer.down), next_norm, pdl)

    def _add_and_norm(
        self, a: Activations, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, pdl: bool
    ) -> None:
        """hidden += x W^T; normed = the norm of that."""
        eps, num_parts = self.spec.rms_norm_eps, self.linears.norm_parts(len(x), *weight.shape)
        if num_parts > 1:
            parts = a.parts_of(num_parts)
            self.linears.plain_parts(parts, x, weight)
            add_parts_norm(a.normed, a.hidden, parts, norm, eps, pdl=pdl)
        else:
            self.linears.plain(a.hidden, x, weight, residual=a.hidden, pdl=pdl)
            rms_norm(a.normed, a.hidden, norm, eps, pdl=pdl)

    def _keep_last_kv(self, a: Activations) -> None:
        """Keys and values of the last layer from normed, all that later steps need of it."""
        index, layer, begin = self.spec.num_layers - 1, self._weights.layers[-1], self.spec.q_size
        bias = layer.qkv_bias[begin:] if layer.qkv_bias is not None else None
        self.linears.plain(a.qkv[:, begin:], a.normed, _dense(layer.qkv)[begin:], bias)
        self._rope(index, layer, a, pdl=False)

    def _sampled_layer(self, a: Activations, sampled: SampledWork) -> None:
        """The last layer of S tokens alone, as decode rows: their keys and values are kept again.

        The work lists may be those that the decode rows had in the layers before.
        """
        index, num_kv_heads = self.spec.num_layers - 1, self.spec.num_kv_heads
        window = self.spec.windows[index]
        plan_decode(sampled.plans[window][0], sampled.seq_lens, num_kv_heads, window=window)
        work = DecodeWork(sampled.rows, sampled.seq_lens, sampled.plans)
        norm = self._weights.layers[index].attn_norm
        rms_norm(a.normed, a.hidden, norm, self.spec.rms_norm_eps)
        self._plain_layer(index, a, work, None)

    def _gate_up(self, a: Activations, weight: torch.Tensor, pdl: bool) -> None:
        """gated = silu(normed Wg^T) * normed Wu^T."""
        if self.linears.glu_is_ours(len(a.normed), weight):
            self.linears.fixed(a.gated, a.normed, weight, glu=True, pdl=pdl)
        else:
            self.linears.plain(a.gate_up, a.normed, weight, pdl=pdl)
            silu_mul(a.gated, a.gate_up, pdl=pdl)

    def _rope(self, index: int, layer: LayerWeights, a: Activations, pdl: bool) -> None:
        """Keys and values of all tokens into the cache, though decode attention may keep its own
        again; queries where attention leaves them."""
        k_cache, v_cache = self._cache.layer(index)
        rope_kv_write(
            a.qkv, k_cache, v_cache, self._cos, self._sin, a.positions, a.slots,
            self.spec.num_heads, q_norm=layer.q_norm, k_norm=layer.k_norm,
            eps=self.spec.rms_norm_eps, pdl=pdl, with_queries=self.linears.deterministic,
        )  # fmt: skip

    def _queries(self, a: Activations) -> torch.Tensor:
        q = a.qkv[:, : self.spec.q_size]
        return q.view(len(q), self.spec.num_heads, self.spec.head_dim)

    def _attend_decode(self, index: int, a: Activations, work: DecodeWork, pdl: bool) -> None:
        """For the first rows of a, one token each."""
        window, num_rows = self.spec.windows[index], len(work.rows)
        plan, workspace = work.plans[window]
        k_cache, v_cache = self._cache.layer(index)
        paged_decode(
            a.attended[:num_rows].view(num_rows, self.spec.num_heads, self.spec.head_dim),
            self._queries(a)[:num_rows], k_cache, v_cache, self._block_tables,
            work.rows, work.seq_lens, plan, workspace, self._scale, window=window, pdl=pdl,
            new_tokens=self._new_tokens[index],
        )  # fmt: skip

    def _attend_prompts(self, index: int, a: Activations, work: PromptWork) -> None:
        k_cache, v_cache = self._cache.layer(index)
        attended = a.attended[work.begin :]
        prefill_attention(
            attended.view(len(attended), self.spec.num_heads, self.spec.head_dim),
            self._queries(a)[work.begin :], k_cache, v_cache, self._block_tables,
            work.rows, work.seq_lens, work.cu_seqlens_q, self._scale,
            window=self.spec.windows[index], new_tokens=self._new_tokens[index],
        )  # fmt: skip


def _dense(matrix: object) -> torch.Tensor:
    """The GPU holds dense matrices only."""
    assert isinstance(matrix, torch.Tensor), type(matrix)
    return matrix
