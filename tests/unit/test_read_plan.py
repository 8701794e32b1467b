"""How host attention splits a batch: every request once, rows back where they belong."""

from __future__ import annotations

import torch

from sglang_dspark.host.reads import split_by_length


def test_sets_cover_the_batch_and_keep_its_order():
    """A batch whose padding is above the budget, but which no cut would help, stays one set.

    It once came back sorted by length, and rows went to other requests.
    """
    generator = torch.Generator().manual_seed(0)
    undivided = 0
    for _ in range(2000):
        lengths = torch.randint(
            1, 700, (int(torch.randint(1, 10, (), generator=generator)),), generator=generator
        )
        for budget in (1, 64, 512):
            parts = split_by_length(lengths, budget)
            assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths)))
            assert all(part.tolist() == sorted(part.tolist()) for part in parts)
            padding = int(lengths.max()) * len(lengths) - int(lengths.sum())
            undivided += len(parts) == 1 and padding > budget
    assert undivided > 0, "the case that this test is about did not come up"
