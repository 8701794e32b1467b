"""Greedy acceptance, case by case."""

from __future__ import annotations

import torch

from sglang_dspark.verify.accept import accept_greedy, accept_sampled


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
