"""Blocks from graphs of fixed sizes equal those that are computed for the batch as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sampling_requests import FILTERS, mixed_params
from sglang_dspark.drafters.base import DraftBlock
from sglang_dspark.drafters.captured import MAX_BYTES, SampledBlocks
from sglang_dspark.verify.sampling import SamplingParams, distribution, draw

GAMMA, HIDDEN, VOCAB = 3, 8, 13
SIZES = [1, 2, 4, 8]


def choose(hidden: torch.Tensor, anchors: torch.Tensor, sampling: SamplingParams) -> DraftBlock:
    """A toy drafter whose token depends on the one before; drawn without noise, so that it can be
    compared: the likeliest of what it would be drawn from."""
    head = torch.linspace(-2, 2, HIDDEN * VOCAB).sin().view(HIDDEN, VOCAB)
    previous, tokens, probs = anchors, [], []
    for k in range(hidden.shape[1]):
        q = distribution(hidden[:, k] @ head + previous[:, None] * head[0], sampling)
        previous = q.argmax(dim=-1)
        tokens.append(previous)
        probs.append(q)
    return DraftBlock(torch.stack(tokens, 1), torch.stack(probs, 1), None, None)


def eager_blocks(choose: Any, vocab_size: int, generator: torch.Generator) -> SampledBlocks:
    example = torch.zeros(GAMMA, HIDDEN)
    return SampledBlocks(choose, example, vocab_size, SIZES, generator, False, backend="eager")


def params(requests: int, generator: torch.Generator, **filters: float) -> SamplingParams:
    return mixed_params(torch.rand(requests, 1, generator=generator) + 0.5, **filters)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_a_padded_block_is_the_block_itself(filters):
    generator = torch.Generator().manual_seed(0)
    blocks = SampledBlocks(
        choose, torch.zeros(GAMMA, HIDDEN), VOCAB, SIZES, generator, False, "eager"
    )
    for requests in (8, 3, 1, 5, 2):
        hidden = torch.randn(requests, GAMMA, HIDDEN, generator=generator)
        anchors = torch.randint(0, VOCAB, (requests,), generator=generator)
        sampling = params(requests, generator, **filters)
        for depth in (GAMMA, 1):
            found = blocks.block(hidden, anchors, sampling, depth)
            wanted = choose(hidden[:, :depth], anchors, sampling)
            assert found is not None and found.tokens.tolist() == wanted.tokens.tolist()
            torch.testing.assert_close(found.probs, wanted.probs)


def test_batches_without_a_graph_are_left_to_the_drafter():
    """More requests than were captured, and sizes whose distributions would fill the memory."""
    generator = torch.Generator().manual_seed(0)

    def ask(blocks: SampledBlocks, requests: int) -> DraftBlock | None:
        hidden = torch.zeros(requests, GAMMA, HIDDEN)
        anchors = torch.zeros(requests, dtype=torch.int64)
        return blocks.block(hidden, anchors, params(requests, generator), GAMMA)

    blocks = eager_blocks(choose, VOCAB, generator)
    assert ask(blocks, 8) is not None and ask(blocks, 9) is None
    large = MAX_BYTES // (4 * GAMMA * 2)  # a vocabulary of which two requests fit
    blocks = eager_blocks(choose, large, generator)
    assert ask(blocks, 2) is not None and ask(blocks, 3) is None
    assert ask(eager_blocks(choose, 3 * large, generator), 1) is None


def test_draws_follow_the_generator():
    """Two replays of one input draw different tokens, a generator of the same seed the same."""

    def drawn(hidden: torch.Tensor, anchors: torch.Tensor, sampling: SamplingParams) -> DraftBlock:
        q = torch.full((len(hidden), VOCAB), 1 / VOCAB)
        tokens = torch.stack([draw(q, generator) for _ in range(GAMMA)], 1)
        return DraftBlock(tokens, q.unsqueeze(1).expand(-1, GAMMA, -1), None, None)

    runs = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        blocks = SampledBlocks(
            drawn, torch.zeros(GAMMA, HIDDEN), VOCAB, SIZES, generator, False, "eager"
        )
        sampling = params(8, torch.Generator().manual_seed(0))
        found = [
            blocks.block(torch.zeros(8, GAMMA, HIDDEN), torch.zeros(8).long(), sampling, GAMMA)
            for _ in range(2)
        ]
        runs.append([block.tokens.tolist() for block in found if block is not None])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]
