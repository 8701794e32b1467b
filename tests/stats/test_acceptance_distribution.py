"""Sampling is lossless: what the acceptance code commits is distributed as the target's samples.

The target and the draft are Markov chains over a small vocabulary, so that the exact joint
distribution of the first three tokens is known. Rounds run through the worker's own acceptance
code, with real drafts of gamma tokens, 60,000 requests at once. The last tests break that code on
purpose, in the two classic ways, and expect the same check to notice.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from distributions import FALSE_ALARM, g_test, joint, mutant
from sglang_dspark.kernels.top_windows import top_windows_reference
from sglang_dspark.verify import accept
from sglang_dspark.verify.sampling import SamplingParams, distribution, draw

VOCAB, GAMMA, LENGTH, REQUESTS = 6, 3, 3, 60_000


def chain(seed: int, sharpness: float) -> torch.Tensor:
    """Logits [V, V] of a Markov chain."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * sharpness


def params(
    rows: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SamplingParams:
    return SamplingParams(
        temperature=torch.full((rows, 1), temperature),
        top_k=torch.full((rows,), top_k or 1 << 30, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        need_top_k=top_k is not None,
        need_top_p=top_p < 1.0,
        need_min_p=min_p > 0.0,
        any_greedy=top_k == 1,
    )


def first_tokens(
    module=accept, seed=0, draft_sharpness=1.0, depths=(GAMMA,), windows=None, **sampling
) -> list[tuple[int, ...]]:
    """The first LENGTH tokens of REQUESTS requests, all starting from anchor 0.

    depths: tokens to draft, one round after the other, in turns.
    windows: (q [R, D, V], drafted [R, D], generator) -> [R], how much is verified.
    """
    depth_of_rounds = cycle(depths)
    generator = torch.Generator().manual_seed(seed)
    target = distribution(chain(1, 1.5), params(VOCAB, **sampling))
    draft = distribution(chain(2, draft_sharpness), params(VOCAB, **sampling))
    tokens = torch.zeros(REQUESTS, 1, dtype=torch.int64)
    lengths = torch.zeros(REQUESTS, dtype=torch.int64)
    anchor = torch.zeros(REQUESTS, dtype=torch.int64)
    while int(lengths.min()) < LENGTH:
        block, q, previous = [], [], anchor
        for _ in range(next(depth_of_rounds)):
            q.append(draft[previous])
            previous = draw(q[-1], generator)
            block.append(previous)
        drafted = torch.stack(block, dim=1)
        p = target[torch.cat([anchor.unsqueeze(1), drafted], dim=1)]
        probs = torch.stack(q, dim=1)
        ends = windows(probs, drafted, generator) if windows is not None else None
        verdict = module.accept_sampled(drafted, probs, p, generator, ends).padded(GAMMA + 1)
        room = torch.zeros(REQUESTS, GAMMA + 1, dtype=torch.int64)
        tokens = torch.cat([tokens, room], dim=1)
        columns = torch.arange(GAMMA + 1)
        committed = columns < verdict.commit_lens.unsqueeze(1)
        rows = torch.arange(REQUESTS).unsqueeze(1).expand_as(committed)[committed]
        where = (1 + lengths.unsqueeze(1) + columns)[committed]
        tokens[rows, where] = verdict.tokens[committed]
        lengths += verdict.commit_lens
        anchor = verdict.bonus
    return [tuple(row) for row in tokens[:, 1 : LENGTH + 1].tolist()]


def p_value(samples: list[tuple[int, ...]], **sampling) -> float:
    target = distribution(chain(1, 1.5), params(VOCAB, **sampling))
    return g_test(samples, joint(target, target[0], LENGTH))


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 4, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=str,
)
def test_committed_tokens_follow_the_target(sampling):
    assert p_value(first_tokens(**sampling), **sampling) > FALSE_ALARM


@pytest.mark.parametrize("draft_sharpness", [0.0, 4.0], ids=["uniform draft", "overconfident"])
def test_a_bad_draft_changes_nothing_but_speed(draft_sharpness):
    assert p_value(first_tokens(draft_sharpness=draft_sharpness)) > FALSE_ALARM


def test_a_greedy_request_in_a_sampling_batch_gets_the_argmax():
    samples = first_tokens(top_k=1)
    target = chain(1, 1.5)
    expected, token = [], 0
    for _ in range(LENGTH):
        token = int(target[token].argmax())
        expected.append(token)
    assert set(samples) == {tuple(expected)}


def test_bonus_after_a_fully_accepted_window_is_drawn_from_the_target():
    """With draft = target everything is accepted, so each fourth token is a bonus."""
    target = distribution(chain(1, 1.5), params(VOCAB))
    generator = torch.Generator().manual_seed(3)
    anchor = torch.zeros(REQUESTS, dtype=torch.int64)
    drafted = draw(target[anchor], generator).unsqueeze(1)
    p = target[torch.cat([anchor.unsqueeze(1), drafted], dim=1)]
    verdict = accept.accept_sampled(drafted, p[:, :1], p, generator)
    assert verdict.commit_lens.eq(2).all()
    samples = [tuple(row) for row in verdict.tokens.tolist()]
    assert g_test(samples, joint(target, target[0], 2)) > FALSE_ALARM


# --- windows -------------------------------------------------------------------------------------


def random_windows(probs, drafted, generator):
    """Whatever other requests and earlier rounds say: independent of this request's draft."""
    return torch.randint(1, drafted.shape[1] + 2, (len(drafted),), generator=generator)


def windows_from_distributions(probs, drafted, generator):
    """Top-K over survivals whose confidence is max q_k: a function of x_<k and q_k alone."""
    survivals = probs.amax(dim=-1).cumprod(dim=1)
    return top_windows_reference(survivals, len(drafted))


def windows_from_the_tokens_drawn(probs, drafted, generator):
    """The same with q_k(x_k), the drawn token's own probability. It says something of x_k."""
    own = probs.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    return top_windows_reference(own.cumprod(dim=1), len(drafted))


@pytest.mark.parametrize("windows", [random_windows, windows_from_distributions])
def test_trimmed_windows_are_lossless(windows):
    assert p_value(first_tokens(windows=windows)) > FALSE_ALARM


@pytest.mark.parametrize("windows", [None, random_windows, windows_from_distributions])
@pytest.mark.parametrize("depths", [(1,), (2, 1, 3)], ids=str)
def test_drafts_of_less_than_gamma_are_lossless(depths, windows):
    assert p_value(first_tokens(depths=depths, windows=windows)) > FALSE_ALARM


def test_windows_that_look_at_the_drawn_token_are_noticed():
    """The DSpark paper's appendix A: likely tokens are verified, unlikely ones dropped unseen."""
    assert p_value(first_tokens(windows=windows_from_the_tokens_drawn)) < FALSE_ALARM


def test_a_window_that_ended_is_not_a_rejection():
    """Drawing its bonus from the residual would be wrong."""
    broken = mutant(accept, "(accepted < verified)", "(accepted < gamma)")
    assert p_value(first_tokens(broken, windows=random_windows)) < FALSE_ALARM


def test_residual_replaced_by_the_target_is_noticed():
    broken = mutant(accept, "(p_next - q_next).clamp_min(0.0)", "p_next")
    assert p_value(first_tokens(broken)) < FALSE_ALARM


def test_deterministic_ratio_test_is_noticed():
    broken = mutant(accept, "coin * q < p", "p >= q")
    assert p_value(first_tokens(broken)) < FALSE_ALARM


def test_accepting_one_position_too_many_is_noticed():
    broken = mutant(accept, "_leading_run(coin * q < p)", "_leading_run(coin * q < p * 1.3)")
    assert p_value(first_tokens(broken)) < FALSE_ALARM
