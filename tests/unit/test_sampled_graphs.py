"""Sampled acceptance from graphs of fixed sizes is that of the batch as it is."""

from __future__ import annotations

import pytest
import torch

from sampling_requests import FILTERS, mixed_params
from sglang_dspark.drafters.base import DraftBlock
from sglang_dspark.verify.accept import accept_greedy, accept_sampled
from sglang_dspark.verify.acceptance import Acceptance
from sglang_dspark.verify.layout import full_rows
from sglang_dspark.verify.sampled_graphs import MAX_BYTES, SampledAccept
from sglang_dspark.verify.sampling import SamplingParams, distribution

WIDTH, VOCAB = 4, 13
SIZES = [1, 2, 4, 8]


def params(requests: int, **filters: float) -> SamplingParams:
    return mixed_params(torch.linspace(0.5, 1.5, requests).view(-1, 1), **filters)


def a_round(requests: int, seed: int) -> tuple[DraftBlock, torch.Tensor]:
    """A block that is drawn from what it says, and the target's logits [R * W, V]."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(requests, WIDTH - 1, VOCAB, generator=generator)
    probs /= probs.sum(dim=-1, keepdim=True)
    tokens = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)
    logits = torch.randn(requests * WIDTH, VOCAB, generator=generator)
    return DraftBlock(tokens.view(requests, -1), probs, None, None), logits


def graphs(seed: int) -> SampledAccept:
    generator = torch.Generator().manual_seed(seed)
    return SampledAccept(WIDTH, VOCAB, SIZES, generator, kernels=False, backend="eager")


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("capped", [False, True])
def test_a_batch_of_a_captured_size_gets_what_it_gets_without_a_graph(filters, capped):
    """The same draws from the same seed."""
    lengths = set()
    for seed, requests in enumerate(SIZES * 5):
        block, logits = a_round(requests, seed)
        sampling = params(requests, **filters)
        windows = torch.arange(requests) % WIDTH + 1 if capped else None
        target = distribution(logits, sampling.of_rows(torch.arange(len(logits)) // WIDTH))
        wanted = accept_sampled(
            block.tokens, block.probs, target, torch.Generator().manual_seed(seed), windows
        )
        found = graphs(seed).verdict(block, logits, sampling, windows)
        assert found is not None
        for name in ("tokens", "commit_lens", "bonus", "ceiling"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        lengths |= set(found.commit_lens.tolist())
    assert lengths >= ({1, 2} if capped else {1, 2, 3})


def test_requests_that_fill_a_graph_change_nothing():
    """Greedy requests have one outcome, whatever is drawn for the rows behind them; a round of
    more requests went before, so that the buffers hold its rows."""
    pool = graphs(0)
    for seed, requests in enumerate((7, 3, 5, 1, 6, 3)):
        block, logits = a_round(requests, seed)
        logits.view(requests, WIDTH, VOCAB)[:, 0].scatter_(1, block.tokens[:, :1], 9.0)
        sampling = params(requests)
        sampling.top_k.fill_(1)
        one_hot = torch.nn.functional.one_hot(block.tokens, VOCAB).float()
        block = DraftBlock(block.tokens, one_hot, None, None)
        windows = torch.full((requests,), 3)
        found = pool.verdict(block, logits, sampling, windows)
        target = logits.argmax(dim=-1).view(requests, WIDTH)
        wanted = accept_greedy(block.tokens, target, windows)
        assert found is not None
        assert found.commit_lens.tolist() == wanted.commit_lens.tolist()
        assert found.bonus.tolist() == wanted.bonus.tolist()
        assert min(found.commit_lens.tolist()) >= 2


def test_what_has_no_graph_is_left_to_the_steps_one_by_one():
    """More requests than were captured, shorter blocks, and vocabularies that would fill the
    memory."""
    pool = graphs(0)
    block, logits = a_round(9, 0)
    assert pool.verdict(block, logits, params(9), None) is None
    block, logits = a_round(2, 0)
    assert pool.verdict(block.part(2, 2), logits, params(2), None) is None
    assert pool.verdict(block, logits, params(2), None) is not None
    large = MAX_BYTES // (4 * (2 * WIDTH - 1) * 2)  # two requests fit
    generator = torch.Generator()
    pool = SampledAccept(WIDTH, large, SIZES, generator, kernels=False, backend="eager")
    assert pool.max_requests == 2
    pool = SampledAccept(WIDTH, 3 * large, SIZES, generator, kernels=False, backend="eager")
    assert pool.max_requests == 0
    assert pool.verdict(block, logits, params(2), None) is None


def test_a_round_asks_the_graphs_first():
    block, logits = a_round(8, 0)
    tokens = torch.cat([torch.zeros(8, 1).long(), block.tokens], dim=1)
    rows = full_rows(tokens, torch.arange(8 * WIDTH).view(8, WIDTH), None)
    acceptance = Acceptance(torch.Generator().manual_seed(0))
    acceptance._sampled = graphs(5)
    found = acceptance.verdict(block, tokens, logits, params(8), rows, None)
    wanted = graphs(5).verdict(block, logits, params(8), None)
    assert wanted is not None and torch.equal(found.tokens, wanted.tokens)
