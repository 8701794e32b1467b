"""The confidence head, fitted again on text that the draft was not trained on.

While the draft trains, its head learns from text that the draft knows better and better, and
believes that all text is so. The rest of the draft stays as it is; the head is one row of weights,
so a few thousand blocks are enough.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.recipe.batches import choose_anchors, make_batch
from sglang_dspark.recipe.draft import DraftModel
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.objectives import Shared

ANCHORS_PER_SEQUENCE = 64
WEIGHT_DECAY = 1e-3


def refit_confidence(
    draft: DraftModel, shared: Shared, examples: list[Example], seed: int
) -> tuple[float, float]:
    """Refit in place on `examples`; returns the cross-entropy before and after, nats a token.

    A row counts if the true tokens before it are what the draft would have proposed: the head
    speaks of blocks that survived so far. Its label is whether the draft's own greedy token is the
    target's, weighted with the paper's 1 - ½‖p - q‖₁ half and half, since one head serves both
    greedy and sampled requests.
    """
    if draft.confidence_head is None:
        raise ValueError("the draft has no confidence head")
    rows, labels = [], []
    generator = torch.Generator().manual_seed(seed)
    for example in examples:
        anchors = choose_anchors(example, ANCHORS_PER_SEQUENCE, generator)
        inputs, accepted = confidence_rows(draft, shared, example, anchors)
        rows.append(inputs)
        labels.append(accepted)
    x, y = torch.cat(rows), torch.cat(labels)
    head = draft.confidence_head.proj
    before = float(F.binary_cross_entropy_with_logits(head(x).squeeze(-1), y))
    # Features differ in size by orders of magnitude; the decay is to treat them alike.
    mean, scale = x.mean(dim=0), x.std(dim=0).clamp(min=1e-6)
    z = (x - mean) / scale
    weight = torch.zeros(x.shape[1], requires_grad=True, device=x.device)
    bias = torch.zeros((), requires_grad=True, device=x.device)
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = F.binary_cross_entropy_with_logits(z @ weight + bias, y)
        loss = loss + WEIGHT_DECAY * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    solver.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        head.weight.copy_((weight / scale)[None])
        head.bias.copy_((bias - (weight * mean / scale).sum())[None])
        after = float(F.binary_cross_entropy_with_logits(head(x).squeeze(-1), y))
    return before, after


@torch.no_grad()
def confidence_rows(
    draft: DraftModel, shared: Shared, example: Example, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Head inputs [n, H + r] and labels [n] of the rows of one sequence that count."""
    device, gamma = shared.head.device, draft.config.block_size
    batch = make_batch([example], [anchors], gamma, draft.mask_id).to(device)
    context = draft.project_context(batch.features.float())
    embeds = F.embedding(batch.block_ids, shared.embed).float()
    hidden = draft(embeds, batch.positions, context, batch.mask)[0]
    previous, latent = batch.previous[0], draft.latent(batch.previous[0])
    logits = F.linear(hidden.to(shared.head.dtype), shared.head).float()
    if draft.markov_head is not None:
        logits = logits + draft.markov_head.bias(previous)
    q = logits.softmax(dim=-1)
    likely = q.gather(1, batch.topk_ids[0])
    overlap = torch.minimum(likely, batch.topk_probs[0]).sum(dim=-1)  # 1 - ½‖p - q‖₁, but for tails
    own = logits.argmax(dim=-1)
    greedy = (own == batch.topk_ids[0, :, 0]).float()
    # Row k is reached if the draft's tokens before it are the sequence's.
    hits = (own == batch.labels[0]).unflatten(0, (-1, gamma))
    reached = F.pad(hits[:, :-1], (1, 0), value=True).long().cumprod(dim=1).flatten().bool()
    counts = reached & batch.valid[0]
    inputs = hidden if latent is None else torch.cat([hidden, latent], dim=-1)
    return inputs[counts], (0.5 * overlap + 0.5 * greedy)[counts]
