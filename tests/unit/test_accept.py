"""Greedy acceptance, case by case."""

from __future__ import annotations

import torch

from cuda_graph import Tier
from sglang_dspark.verify.accept import (
    Verdict,
    accept_greedy,
    accept_nothing,
    accept_sampled,
    accept_simulated,
)
from sglang_dspark.verify.layout import packed_rows
from sglang_dspark.verify.simulated import SimulatedAcceptance


def verdict(draft: list[list[int]], target: list[list[int]]):
    return accept_greedy(torch.tensor(draft), torch.tensor(target))


def committed(result) -> list[list[int]]:
    pairs = zip(result.tokens.tolist(), result.commit_lens.tolist(), strict=True)
    return [tokens[:length] for tokens, length in pairs]


def test_accepts_the_leading_run_and_adds_the_targets_token():
    result = verdict(
        draft=[[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]],
        target=[[9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4], [1, 2, 3, 4]],
    )
    assert committed(result) == [[9], [1, 9], [1, 2, 9], [1, 2, 3, 4]]
    assert result.bonus.tolist() == [9, 9, 9, 4]
    assert result.commit_lens.dtype == torch.int32


def test_a_match_behind_a_mismatch_does_not_count():
    assert committed(verdict([[7, 2, 3]], [[1, 2, 3, 4]])) == [[1]]


def test_one_draft_token():
    assert committed(verdict([[5], [6]], [[5, 8], [5, 8]])) == [[5, 8], [5]]


def test_sampled_acceptance_of_one_hot_rows_is_greedy_acceptance():
    draft = torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3]])
    target = torch.tensor([[1, 2, 3, 0]] * 3)
    one_hot = torch.nn.functional.one_hot
    sampled = accept_sampled(draft, one_hot(draft, 4).float(), one_hot(target, 4).float())
    greedy = accept_greedy(draft, target)
    assert committed(sampled) == committed(greedy)


def test_equal_distributions_that_differ_by_rounding_still_give_a_legal_token():
    """p == q up to rounding, x rejected by rounding: the residual is empty, p must serve."""
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    p = torch.tensor([[[0.5, 0.0, 0.0], [1.0, 0.0, 0.0]]])
    result = accept_sampled(torch.tensor([[1]]), q, p)
    assert committed(result) == [[0]]


def test_a_window_caps_what_is_accepted_and_keeps_the_ceiling():
    draft, target = torch.tensor([[1, 2, 3]] * 4), torch.tensor([[1, 2, 3, 4]] * 4)
    result = accept_greedy(draft, target, torch.tensor([1, 2, 3, 4]))
    assert committed(result) == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert result.ceiling.tolist() == [3, 3, 3, 3]
    one_hot = torch.nn.functional.one_hot
    sampled = accept_sampled(
        draft,
        one_hot(draft, 5).float(),
        one_hot(target, 5).float(),
        windows=torch.tensor([1, 2, 3, 4]),
    )
    assert committed(sampled) == committed(result)


def test_a_rejection_inside_the_window_is_what_it_was():
    draft, target = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 9, 3, 4]])
    result = accept_greedy(draft, target, torch.tensor([3]))
    assert committed(result) == [[1, 9]] and result.ceiling.tolist() == [1]


def test_packed_rows_commit_what_dense_rows_commit():
    """Compact runs the rows of the windows, cap-accept runs all: from one seed, the same tokens."""
    requests, gamma, vocab = 40, 5, 7
    generator = torch.Generator().manual_seed(0)
    accepted_all = rejected = 0
    for seed in range(20):
        logits = torch.randn(requests, 2 * gamma + 1, vocab, generator=generator)
        p, q = logits[:, gamma:].softmax(dim=-1), logits[:, :gamma].softmax(dim=-1)
        q = (q + 2 * p[:, :gamma]) / 3  # a draft good enough to reach the ends of windows
        draft = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(requests, gamma)
        windows = torch.randint(1, gamma + 2, (requests,), generator=generator)
        total = int(windows.sum())
        anchored = torch.cat([draft[:, :1], draft], dim=1)
        rows = packed_rows(anchored, anchored, windows, Tier(total + 3, requests))
        packed = torch.full((total + 3, vocab), float("nan"))  # padding must not be read
        inside = torch.arange(gamma + 1) < windows.unsqueeze(1)
        packed[rows.index[inside]] = p[inside]

        def seeded(seed=seed):
            return torch.Generator().manual_seed(seed)

        dense = accept_sampled(draft, q, p, seeded(), windows)
        ragged = accept_sampled(draft, q, packed, seeded(), windows, rows.index)
        assert committed(ragged) == committed(dense)
        assert ragged.bonus.tolist() == dense.bonus.tolist()
        accepted_all += int((dense.commit_lens == windows).sum())
        rejected += int((dense.commit_lens < windows).sum())
    assert min(accepted_all, rejected) > 100, "one of the two endings hardly came up"


def test_a_shallow_draft_commits_what_its_own_width_says():
    """A draft of depth D, packed in windows of gamma + 1 places as the worker does it, against
    dense rows of D + 1: from one seed the same tokens, in rows of the full width."""
    requests, gamma, vocab = 40, 5, 7
    generator = torch.Generator().manual_seed(1)
    accepted_all = rejected = 0
    for depth in (1, 2, 4) * 7:
        p = torch.randn(requests, depth + 1, vocab, generator=generator).softmax(dim=-1)
        q = torch.randn(requests, depth, vocab, generator=generator).softmax(dim=-1)
        q = (q + 2 * p[:, :depth]) / 3
        draft = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(requests, depth)
        windows = torch.randint(1, depth + 2, (requests,), generator=generator)
        total = int(windows.sum())
        places = torch.zeros(requests, gamma + 1, dtype=torch.int64)
        rows = packed_rows(places, places, windows, Tier(total + 3, requests))
        packed = torch.full((total + 3, vocab), float("nan"))  # padding must not be read
        inside = torch.arange(gamma + 1) < windows.unsqueeze(1)
        packed[rows.index[inside]] = p[inside[:, : depth + 1]]

        seed = int(torch.randint(1 << 30, (), generator=generator))
        dense, ragged = (
            accept_sampled(*(draft, q, target, torch.Generator().manual_seed(seed), windows), index)
            for target, index in ((p, None), (packed, rows.index[:, : depth + 1]))
        )
        padded = ragged.padded(gamma + 1)
        assert padded.tokens.shape == (requests, gamma + 1) and padded.tokens.dtype == torch.int64
        assert committed(padded) == committed(dense)
        assert padded.tokens[:, depth + 1 :].eq(0).all()
        for name in ("commit_lens", "bonus"):
            assert torch.equal(getattr(padded, name), getattr(dense, name))
        assert padded.ceiling is ragged.ceiling
        accepted_all += int((dense.commit_lens == windows).sum())
        rejected += int((dense.commit_lens < windows).sum())
    assert min(accepted_all, rejected) > 100, "one of the two endings hardly came up"


def test_a_verdict_of_the_full_width_is_padded_by_nothing():
    result = verdict([[1, 2, 3]], [[1, 2, 9, 4]])
    assert torch.equal(result.padded(4).tokens, result.tokens)


def test_zeros_behind_a_shallow_draft_are_never_committed():
    """Greedy rounds compare rows of the full width; the target may well say 0 there."""
    draft = torch.tensor([[5, 6, 0, 0], [5, 6, 0, 0], [5, 6, 0, 0]])
    target = torch.tensor([[5, 6, 0, 0, 0], [5, 6, 7, 0, 0], [5, 9, 0, 0, 0]])
    result = accept_greedy(draft, target, torch.tensor([3, 3, 3]))
    assert committed(result) == [[5, 6, 0], [5, 6, 7], [5, 9]]


def test_without_a_draft_one_token_of_the_target_is_committed():
    draft = torch.tensor([[1, 2, 3], [0, 0, 0]])
    one_hot = torch.nn.functional.one_hot(torch.tensor([4, 2]), 6).float()
    result = accept_nothing(draft, one_hot)
    assert committed(result) == [[4], [2]]
    assert result.tokens.shape == (2, 4) and result.tokens.dtype == torch.int64
    assert result.commit_lens.tolist() == [1, 1] and result.commit_lens.dtype == torch.int32
    assert result.bonus.tolist() == [4, 2] and result.ceiling.tolist() == [0, 0]


def test_without_a_draft_the_token_is_drawn_not_the_likeliest():
    p = torch.tensor([[0.6, 0.3, 0.1]]).expand(20_000, 3)
    draft = torch.zeros(len(p), 2, dtype=torch.int64)
    result = accept_nothing(draft, p, torch.Generator().manual_seed(0))
    shares = result.bonus.bincount(minlength=3) / len(p)
    torch.testing.assert_close(shares, p[0], atol=0.02, rtol=0)


def simulated(
    chances: list[float], drafts: torch.Tensor, target: torch.Tensor, drafted: int, windows=None
) -> Verdict:
    made_up = SimulatedAcceptance(chances, torch.device("cpu"), torch.Generator().manual_seed(0))
    coins = torch.empty(drafts.shape)
    made_up.toss(coins, drafted)
    return accept_simulated(drafts, target, made_up.survives(coins), windows)


def test_simulated_acceptance_follows_the_stated_chances():
    """Shares of 40 000 requests, each within 5 standard errors (6e-7 for each of four)."""
    chances = [0.9, 0.5, 0.8]
    count = 40_000
    draft = torch.tensor([[1, 2, 3]]).expand(count, 3)
    target = torch.tensor([[4, 5, 6, 7]]).expand(count, 4)
    result = simulated(chances, draft, target, 3)
    survival = torch.tensor(chances).cumprod(0)
    for k, expected in enumerate(survival.tolist()):
        share = (result.ceiling > k).double().mean().item()
        assert abs(share - expected) < 5 * (expected * (1 - expected) / count) ** 0.5, k
    mean = result.commit_lens.double().mean().item()
    assert abs(mean - 1 - survival.sum().item()) < 5 * 1.2 / count**0.5
    for row in committed(result)[:50]:
        assert row == [*[1, 2, 3][: len(row) - 1], 3 + len(row)]


def test_simulated_acceptance_ends_at_the_window_and_at_the_draft():
    draft = torch.tensor([[1, 2, 3], [1, 2, 3]])
    target = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7]])
    windows = torch.tensor([2, 4])
    trimmed = simulated([1.0] * 3, draft, target, 3, windows)
    assert committed(trimmed) == [[1, 5], [1, 2, 3, 7]]
    assert trimmed.ceiling.tolist() == [3, 3]
    shallow = simulated([1.0] * 3, draft, target, 1, windows)
    assert committed(shallow) == [[1, 5], [1, 5]]
    assert shallow.ceiling.tolist() == [1, 1]
