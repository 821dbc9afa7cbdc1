"""A model with its weights and its KV memory, ready to compute on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cpu.contexts import DecodeContexts
from engine.cpu.decoder import Decoder
from engine.cpu.head import Embedding, LmHead
from engine.cpu.kv_cache import KvCache
from engine.cpu.linear import LinearFactory, Scheme
from engine.model.spec import ModelSpec
from engine.model.weights import ModelWeights

_CONTEXT_SHARE = 2  # of the cache's size, at most, for contexts in one piece


@dataclass(frozen=True, slots=True)
class CpuModel:
    """The parts of a forward pass, in their order."""

    spec: ModelSpec
    embedding: Embedding
    decoder: Decoder
    head: LmHead
    cache: KvCache
    contexts: DecodeContexts

    @classmethod
    def prepare(
        cls, spec: ModelSpec, weights: ModelWeights, cache: KvCache, scheme: Scheme
    ) -> CpuModel:
        """Pack matrices as `scheme` says."""
        make_linear = LinearFactory(scheme)
        contexts = DecodeContexts(cache, cache.num_bytes // _CONTEXT_SHARE)
        layers, final_norm = weights.layers, weights.final_norm
        return cls(
            spec=spec,
            embedding=Embedding(weights.embedding),
            decoder=Decoder(spec, layers, final_norm, cache, contexts, make_linear),
            head=LmHead(weights.lm_head, make_linear),
            cache=cache,
            contexts=contexts,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are held."""
        return self.decoder.num_bytes + self.embedding.num_bytes + self.head.num_bytes
