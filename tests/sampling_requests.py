"""Sampling parameters of made-up batches."""

from __future__ import annotations

import torch

from sglang_dspark.verify.sampling import SamplingParams

FILTERS = {"none": {}, "top-k": {"top_k": 3}, "top-p": {"top_p": 0.5}, "min-p": {"min_p": 0.4}}


def mixed_params(
    temperature: torch.Tensor, top_k: int = 1 << 30, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingParams:
    """Of as many requests as temperature [R, 1] has rows; every third is greedy."""
    requests = len(temperature)
    top_ks = torch.full((requests,), top_k, dtype=torch.int32)
    top_ks[::3] = 1
    return SamplingParams(
        temperature=temperature,
        top_k=top_ks,
        top_p=torch.full((requests,), top_p),
        min_p=torch.full((requests,), min_p),
        need_top_k=top_k < 1 << 30,
        need_top_p=top_p < 1.0,
        need_min_p=min_p > 0.0,
        any_greedy=True,
    )
