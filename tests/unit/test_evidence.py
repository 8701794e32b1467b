"""What a draft's distribution says of its own chances."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dspark.drafters.evidence import BOUND, NAMES, F, evidence
from sglang_dspark.schedule.confidence import ConfidenceFit, confidence_logits


def test_log_odds_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.9, 0.1, 0.0, 0.0]]).log()
    assert evidence(logits)[:, 0].tolist() == pytest.approx([0.0, math.log(9)], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, -40.0, 40.0])
def test_evidence_equals_double_precision(dtype: torch.dtype, shift: float) -> None:
    """Tolerance: at 12 the odds hang on rounding; up to 9, 0.02 holds with logits near 40."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.1, 5, 64)[:, None]
    logits = (torch.randn(64, 200, generator=generator) * scale + shift).to(dtype)
    q = logits.double().softmax(dim=-1).amax(dim=-1)
    exact = (q / (1 - q)).log().clamp(-BOUND, BOUND)
    found = evidence(logits)
    assert found.dtype is torch.float32 and found.shape == (64, F)
    usual = exact.abs() < 9
    assert usual.float().mean() > 0.9
    torch.testing.assert_close(found[..., 0].double()[usual], exact[usual], atol=0.02, rtol=0)


def test_certain_and_masked_rows_are_finite() -> None:
    one_hot = torch.full((1, 8), -1e4)
    one_hot[0, 3] = 1e4
    masked = torch.full((1, 8), -torch.inf)
    masked[0, 2:4] = 1.0
    alone = torch.full((1, 8), -torch.inf)
    alone[0, 2] = 1.0
    flat = torch.zeros(1, 200_000)
    assert [float(evidence(x)) for x in (one_hot, masked, alone)] == [BOUND, 0.0, BOUND]
    assert float(evidence(flat)) == -BOUND


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logits_are_noticed(bad: float) -> None:
    logits = torch.zeros(2, 8)
    logits[1] = bad
    if not math.isinf(bad) or bad > 0:
        logits[1, 1:] = 0.0  # one bad entry is enough
    found = evidence(logits)
    assert found[0].isfinite().all() and found[1].isnan().all()
    parameters = torch.from_numpy(ConfidenceFit(1, head=False).parameters())
    assert confidence_logits(found[:, None], None, parameters)[1].isnan().all()


def test_evidence_depends_on_the_distribution_alone() -> None:
    """Non-anticipation: a permuted vocabulary, and so another drawn token, says the same."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 50, generator=generator)
    for _ in range(5):
        order = torch.randperm(50, generator=generator)
        torch.testing.assert_close(evidence(logits[:, order]), evidence(logits))


def test_names_are_the_columns() -> None:
    assert len(NAMES) == F == evidence(torch.zeros(1, 4)).shape[-1]
