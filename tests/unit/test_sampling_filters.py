"""Top-k, top-p and min-p by FlashInfer's kernels and by a sort keep the same tokens."""

from __future__ import annotations

import inspect

import pytest
import torch

from sglang_dspark.verify.sampling import SamplingParams, distribution

FILTERS = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 8, "top_p": 0.9, "min_p": 0.02},
}


def renorm_top_k(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """What FlashInfer's kernel of this name does."""
    ordered = probs.sort(dim=-1, descending=True).values
    least = ordered.gather(1, (top_k.clamp(max=probs.shape[1]) - 1).long().unsqueeze(1))
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def renorm_top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered
    least = torch.where(before < top_p.unsqueeze(1), ordered, 2.0).amin(dim=-1, keepdim=True)
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def params(rows: int, device: str, kernels: bool, **asked: float) -> SamplingParams:
    """Every third row is greedy, every third asks for no filter."""

    def each(name: str, nothing: float, dtype: torch.dtype) -> torch.Tensor:
        values = torch.full((rows,), asked.get(name, nothing), dtype=dtype, device=device)
        values[1::3] = nothing
        return values

    top_k = each("top_k", 1 << 30, torch.int32)
    top_k[2::3] = 1
    return SamplingParams(
        temperature=torch.linspace(0.5, 1.5, rows, device=device).unsqueeze(1),
        top_k=top_k,
        top_p=each("top_p", 1.0, torch.float32),
        min_p=each("min_p", 0.0, torch.float32),
        need_top_k="top_k" in asked,
        need_top_p="top_p" in asked,
        need_min_p="min_p" in asked,
        any_greedy=True,
        kernels=kernels,
    )


def assert_both_agree(device: str, asked: dict[str, float]) -> None:
    rows = 30
    logits = 2 * torch.randn(rows, 50, generator=torch.Generator().manual_seed(0)).to(device)
    by_sort = distribution(logits, params(rows, device, False, **asked))
    by_kernels = distribution(logits, params(rows, device, True, **asked))
    torch.testing.assert_close(by_kernels, by_sort, atol=1e-6, rtol=1e-5)
    assert (by_sort[0::3] == 0).any(dim=-1).all(), "a filter that keeps everything shows nothing"
    assert (by_sort[1::3] > 0).all(), "these rows ask for no filter"


@pytest.mark.parametrize("asked", FILTERS.values(), ids=FILTERS)
def test_filters_look_at_the_unfiltered_probabilities(monkeypatch, asked):
    """Here with torch in the kernels' place."""
    import flashinfer.sampling

    monkeypatch.setattr(flashinfer.sampling, "top_k_renorm_probs", renorm_top_k)
    monkeypatch.setattr(flashinfer.sampling, "top_p_renorm_probs", renorm_top_p)
    assert_both_agree("cpu", asked)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("asked", FILTERS.values(), ids=FILTERS)
def test_filters_by_the_kernels_themselves(asked):
    assert_both_agree("cuda", asked)


def test_the_kernels_take_what_they_are_given():
    from flashinfer.sampling import top_k_renorm_probs, top_p_renorm_probs

    for function, name in ((top_k_renorm_probs, "top_k"), (top_p_renorm_probs, "top_p")):
        assert list(inspect.signature(function).parameters)[:2] == ["probs", name]
