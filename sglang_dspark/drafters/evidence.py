"""What a draft's distribution says of its own chances, as numbers that a fit can weigh.

    log_odds = log(q / (1 - q)),  q = max softmax(logits)

It speaks of q_k as a distribution, never of the token that was drawn from it: a window that
depended on that token would not be lossless. It is the draft's at temperature 1, whatever the
request's, and over the draft's own vocabulary. Entropy, the margin between the two greatest logits
and Σ q² were measured beside it and add nothing (docs/confidence.md).
"""

from __future__ import annotations

import torch

NAMES = ("log_odds",)
F = len(NAMES)
# Beyond it float32's rounding of the logits hides 1 - q; the least log-odds of a vocabulary of
# 160,000 is -12 too.
BOUND = 12.0


def evidence(logits: torch.Tensor) -> torch.Tensor:
    """logits [..., V], -inf where masked -> float32 [..., F], within ±BOUND. Two passes over V.

    A NaN, +inf or a row of nothing but -inf gives NaN.
    """
    logits = logits.float()
    # logsumexp - max = log(1 + s), where s sums the others: q = 1 / (1 + s), its odds are 1 / s.
    others = (logits.logsumexp(dim=-1) - logits.amax(dim=-1)).expm1()
    log_odds = -others.clamp(min=1e-9).log()
    return log_odds.clamp(-BOUND, BOUND).unsqueeze(-1)
