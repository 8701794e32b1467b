"""The distribution that a request samples from, given a row of logits.

The same function serves both sides of speculative sampling: the target's p and the draft's q.
Filters follow SGLang's sampler (its "joint" order): top-k and top-p are both cut on
softmax(logits / temperature) before renormalisation, then min-p relative to the largest value.
Where SGLang samples with FlashInfer, its kernels find what top-k and top-p keep, elsewhere a sort.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from cuda_graph.pool import Buffer

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


# Static inputs of a graph that samples, a row per request; rows of no request sample like any.
PARAM_BUFFERS = {
    "temperature": Buffer(torch.float32, (1,), padding=1),
    "top_k": Buffer(torch.int32, padding=1),
    "top_p": Buffer(torch.float32, padding=1),
    "min_p": Buffer(torch.float32),
}


@dataclass(frozen=True)
class SamplingParams:
    """Per-row sampling parameters of N rows; greedy rows have top_k == 1.

    The `need_*` flags are host values that spare the batch the filters nobody asked for.
    kernels: whether FlashInfer's kernels filter.
    """

    # [N, 1] float32, > 0
    temperature: torch.Tensor
    # [N] int32
    top_k: torch.Tensor
    # [N] float32
    top_p: torch.Tensor
    # [N] float32
    min_p: torch.Tensor
    need_top_k: bool
    need_top_p: bool
    need_min_p: bool
    any_greedy: bool
    kernels: bool = False

    @classmethod
    def of_batch(cls, info: SamplingBatchInfo, kernels: bool) -> SamplingParams | None:
        """Parameters of a batch, a row per request; None if every request is greedy."""
        if info.is_all_greedy:
            return None
        return cls(
            temperature=info.temperatures,
            top_k=info.top_ks,
            top_p=info.top_ps,
            min_p=info.min_ps,
            need_top_k=info.need_top_k_sampling,
            need_top_p=info.need_top_p_sampling,
            need_min_p=info.need_min_p_sampling,
            any_greedy=info.is_any_greedy,
            kernels=kernels,
        )

    @classmethod
    def of_buffers(
        cls, views: Mapping[str, torch.Tensor], filters: bool, kernels: bool
    ) -> SamplingParams:
        """Parameters in a graph, which was captured with all filters or with none."""
        return cls(
            **{name: views[name] for name in PARAM_BUFFERS},
            need_top_k=filters,
            need_top_p=filters,
            need_min_p=filters,
            any_greedy=True,
            kernels=kernels,
        )

    def buffers(self) -> dict[str, torch.Tensor]:
        """What `PARAM_BUFFERS` take."""
        return {name: getattr(self, name) for name in PARAM_BUFFERS}

    @property
    def filters(self) -> bool:
        return self.need_top_k or self.need_top_p or self.need_min_p

    def of_rows(self, requests: torch.Tensor) -> SamplingParams:
        """Parameters of packed rows; requests [M] int64 names the request of each."""
        return replace(
            self,
            temperature=self.temperature[requests],
            top_k=self.top_k[requests],
            top_p=self.top_p[requests],
            min_p=self.min_p[requests],
        )


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [N, V] float32 that a request samples the next token from.

    logits: [N, V]; params: N rows. A greedy row comes out one-hot at its (first) argmax.
    """
    probs = torch.softmax(logits.float() / params.temperature, dim=-1)
    if params.filters:
        probs = (_filter_by_kernels if params.kernels else _filter)(probs, params)
    if params.any_greedy:
        one_hot = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
        probs = torch.where((params.top_k <= 1).unsqueeze(1), one_hot, probs)
    return probs


def _filter(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    ordered, order = probs.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.need_top_k:
        rank = torch.arange(ordered.shape[1], device=probs.device)
        keep &= rank < params.top_k.unsqueeze(1)
    if params.need_top_p:
        mass_before = ordered.cumsum(dim=-1) - ordered
        keep &= mass_before <= params.top_p.unsqueeze(1)
    if params.need_min_p:
        keep &= ordered >= ordered[:, :1] * params.min_p.unsqueeze(1)
    kept = torch.where(keep, ordered, 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.empty_like(probs).scatter_(1, order, kept)


def _filter_by_kernels(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The same without a sort. Each filter looks at the unfiltered probabilities, and what all of
    them keep is renormalised once; tokens that tie at a threshold are all kept."""
    from flashinfer.sampling import top_k_renorm_probs, top_p_renorm_probs

    kept = probs
    if params.need_top_k:
        kept = torch.where(top_k_renorm_probs(probs, params.top_k) > 0, kept, 0.0)
    if params.need_top_p:
        kept = torch.where(top_p_renorm_probs(probs, params.top_p) > 0, kept, 0.0)
    if params.need_min_p:
        least = probs.amax(dim=-1, keepdim=True) * params.min_p.unsqueeze(1)
        kept = torch.where(probs >= least, kept, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def draw(weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One draw per row, [N] int64, in proportion to non-negative `weights` [N, V] float32.

    argmax(weights / Exp(1)) is the exponential race (the Gumbel-max trick in another form). Unlike
    torch.multinomial it needs no normalised rows and never synchronises with the device.
    """
    noise = torch.empty_like(weights).exponential_(1.0, generator=generator)
    noise.clamp_min_(torch.finfo(noise.dtype).tiny)
    return (weights / noise).argmax(dim=-1)
