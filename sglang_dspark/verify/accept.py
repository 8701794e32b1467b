"""Lossless acceptance: which drafted tokens survive, and which token follows them.

Greedy: a draft token survives while it equals the target's argmax.
Sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318): token x
drawn from q survives with probability min(1, p(x) / q(x)); at the first rejection the next token
is drawn from norm(max(0, p - q)); if all survive it is drawn from the target's next p. The output
is then distributed as the target's own samples, whatever the draft proposes.

A window of fewer than W rows ends the block early: what it holds is accepted as above, and if all
of it survives, the next token is drawn from the target's p behind it. That stays lossless as long
as whether a draft token is in the window does not depend on that token or on later ones (the DSpark
paper, arXiv 2607.05147, appendix A). The ceiling is what a full window would have accepted.

Terms: the *anchor* is row 0 of a window, *accepted* counts surviving draft tokens, the *bonus* is
the token that the target adds, which becomes the next anchor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from sglang_dspark.verify.sampling import draw


@dataclass(frozen=True)
class Verdict:
    """What a round commits. R requests, W = gamma + 1."""

    # [R, W] int64: accepted drafts, then the bonus; entries from commit_lens on are padding
    tokens: torch.Tensor
    # [R] int32: accepted + 1
    commit_lens: torch.Tensor
    # [R] int64
    bonus: torch.Tensor
    # [R] int64: draft tokens that a full window would have accepted, if every row of it was run
    ceiling: torch.Tensor

    def copied(self, requests: int) -> Verdict:
        """Of the first requests. The ceiling is not copied: it is read before the next replay."""
        return Verdict(
            tokens=self.tokens[:requests].clone(),
            commit_lens=self.commit_lens[:requests].clone(),
            bonus=self.bonus[:requests].clone(),
            ceiling=self.ceiling[:requests],
        )

    def padded(self, width: int) -> Verdict:
        """The same with rows of `width` tokens, for a draft of fewer."""
        return replace(self, tokens=pad(self.tokens, (0, width - self.tokens.shape[1])))


def accept_greedy(
    draft_tokens: torch.Tensor, target_tokens: torch.Tensor, windows: torch.Tensor | None = None
) -> Verdict:
    """draft_tokens: [R, gamma] int64; target_tokens: [R, W] int64, argmax after each window row.

    windows: [R] int64, 1 to W rows of each request that count; None: all.
    """
    ceiling = _leading_run(draft_tokens == target_tokens[:, :-1])
    accepted = ceiling if windows is None else torch.minimum(ceiling, windows - 1)
    bonus = target_tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return _verdict(draft_tokens, accepted, bonus, ceiling)


def accept_sampled(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    generator: torch.Generator | None = None,
    windows: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> Verdict:
    """Speculative sampling.

    draft_tokens: [R, gamma] int64, token k drawn from draft_probs[:, k].
    draft_probs:  [R, gamma, V] float32, q.
    target_probs: [R, W, V] or packed [M, V] float32, p after each window row.
    windows:      [R] int64, 1 to W rows of each request that count; None: all.
    rows:         [R, W] int64, the packed row of each place of a window; a place behind the window
                  may name any row. None: target_probs holds all R * W rows in order.
    A greedy request takes part with one-hot rows: the rule then reads "equal to the argmax".
    """
    num_requests, gamma = draft_tokens.shape
    vocab = target_probs.shape[-1]
    target_probs = target_probs.reshape(-1, vocab)
    if rows is None:
        rows = torch.arange(len(target_probs), device=target_probs.device).view(num_requests, -1)
    p = target_probs.view(-1).take(rows[:, :-1] * vocab + draft_tokens)
    q = draft_probs.gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1)
    coin = torch.rand(p.shape, device=p.device, generator=generator)
    # coin < p / q without the division: q(x) > 0, since x was drawn from q.
    ceiling = _leading_run(coin * q < p)
    accepted = ceiling if windows is None else torch.minimum(ceiling, windows - 1)

    p_next = target_probs[rows.gather(1, accepted.unsqueeze(1)).squeeze(1)]
    requests = torch.arange(num_requests, device=p.device)
    q_next = draft_probs[requests, accepted.clamp(max=gamma - 1)]
    # Where all of the window survived, nothing was rejected.
    verified = gamma if windows is None else windows - 1
    rejected = (accepted < verified).unsqueeze(1)
    residual = torch.where(rejected, (p_next - q_next).clamp_min(0.0), p_next)
    # p == q up to rounding leaves no residual; a rejection is then rounding too, and p is right.
    empty = residual.sum(dim=-1, keepdim=True) <= 0
    bonus = draw(torch.where(empty, p_next, residual), generator)
    return _verdict(draft_tokens, accepted, bonus, ceiling)


def accept_nothing(
    draft_tokens: torch.Tensor, target_probs: torch.Tensor, generator: torch.Generator | None = None
) -> Verdict:
    """A round without a draft: one token from target_probs [R, V], the p behind each anchor.

    draft_tokens: [R, gamma] int64, of any content; they fill the padding of `Verdict.tokens`.
    """
    nothing = torch.zeros(len(draft_tokens), dtype=torch.int64, device=draft_tokens.device)
    return _verdict(draft_tokens, nothing, draw(target_probs, generator), nothing)


def accept_simulated(
    draft_tokens: torch.Tensor,
    target_tokens: torch.Tensor,
    survives: torch.Tensor,
    windows: torch.Tensor | None = None,
) -> Verdict:
    """A made-up outcome, for measurements without a trained draft; the output means nothing.

    survives: [R, gamma] bool, whether each draft token would if all before it did. What is
    committed are the draft's own tokens, and behind them the target's.
    draft_tokens, target_tokens, windows: as in `accept_greedy`.
    """
    ceiling = _leading_run(survives)
    accepted = ceiling if windows is None else torch.minimum(ceiling, windows - 1)
    bonus = target_tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return _verdict(draft_tokens, accepted, bonus, ceiling)


def _leading_run(survives: torch.Tensor) -> torch.Tensor:
    """[R] int64: how many leading entries of each row of [R, gamma] bool hold."""
    return survives.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _verdict(
    draft_tokens: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor, ceiling: torch.Tensor
) -> Verdict:
    tokens = torch.cat([draft_tokens, draft_tokens[:, :1]], dim=1)
    tokens.scatter_(1, accepted.unsqueeze(1), bonus.unsqueeze(1))
    commit_lens = (accepted + 1).to(torch.int32)
    return Verdict(tokens=tokens, commit_lens=commit_lens, bonus=bonus, ceiling=ceiling)
