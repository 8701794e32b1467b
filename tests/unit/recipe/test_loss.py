"""The losses against their formulas, written out with Python loops."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dspark.recipe import loss
from sglang_dspark.recipe.eagle3 import eagle3_loss

GAMMA, VOCAB = 3, 40


def literal_loss(
    logits: torch.Tensor, confidence: torch.Tensor, labels: torch.Tensor, p: torch.Tensor
) -> float:
    """The formula in loss.py's head with Python loops. logits, p [blocks, γ, V]."""
    total = weight_sum = 0.0
    for block in range(len(logits)):
        for k in range(1, GAMMA + 1):
            q = torch.softmax(logits[block, k - 1], dim=0)
            target_p = p[block, k - 1]
            weight = math.exp(-(k - 1) / GAMMA)
            distance = sum(abs(float(a) - float(b)) for a, b in zip(q, target_p, strict=True))
            label = 1 - distance / 2
            c = 1 / (1 + math.exp(-float(confidence[block, k - 1])))
            bce = -(label * math.log(c) + (1 - label) * math.log(1 - c))
            cross_entropy = -math.log(float(q[labels[block, k - 1]]))
            total += weight * (0.1 * cross_entropy + 0.9 * distance + 1.0 * bce)
            weight_sum += weight
    return total / weight_sum


def test_loss_equals_the_formula() -> None:
    """With every id a candidate and all of p given."""
    torch.manual_seed(3)
    logits = torch.randn(2, GAMMA, VOCAB)
    confidence = torch.randn(2, GAMMA)
    labels = torch.randint(VOCAB, (2, GAMMA))
    p = (2 * torch.randn(2, GAMMA, VOCAB)).softmax(dim=-1)
    everything = torch.arange(VOCAB)
    vocabulary = loss.choose_vocabulary(VOCAB, everything, labels, 4, torch.Generator())
    assert vocabulary.num_candidates == VOCAB
    topk = p.flatten(0, 1).topk(VOCAB, dim=-1)
    terms = loss.dspark_loss(
        logits.flatten(0, 1),
        confidence.flatten(),
        labels.flatten(),
        topk.indices,
        topk.values,
        loss.position_weights(torch.arange(GAMMA).repeat(2), GAMMA),
        vocabulary,
        loss.LossWeights(),
    )
    assert float(terms.total) == pytest.approx(
        literal_loss(logits, confidence, labels, p), rel=1e-5
    )


def test_soft_cross_entropy_equals_its_formula() -> None:
    """-Σ p log q over the candidates and one bucket for the rest."""
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    vocabulary = loss.Vocabulary(
        ids=torch.arange(4), num_candidates=2, sample_shift=0.0, column=torch.tensor([0, 1, 2, 2])
    )
    terms = loss.dspark_loss(
        q.log(),
        torch.zeros(1),
        torch.tensor([0]),
        torch.tensor([[0, 3]]),
        torch.tensor([[0.5, 0.3]]),
        torch.ones(1),
        vocabulary,
        loss.LossWeights(1.0, cross_entropy=0.0, distance=0.0, confidence=0.0),
    )
    assert float(terms.total) == pytest.approx(-(0.5 * math.log(0.4) + 0.5 * math.log(0.3)))


def test_confidence_label_carries_no_gradient() -> None:
    logits = torch.randn(4, VOCAB, requires_grad=True)
    p = torch.randn(4, VOCAB).softmax(dim=-1)
    ids = torch.arange(VOCAB)
    vocabulary = loss.choose_vocabulary(VOCAB, ids, ids, 0, torch.Generator())
    terms = loss.dspark_loss(
        logits,
        torch.zeros(4, requires_grad=True),
        torch.zeros(4, dtype=torch.int64),
        ids.expand(4, -1),
        p,
        torch.ones(4),
        vocabulary,
        loss.LossWeights(cross_entropy=0.0, distance=0.0),
    )
    terms.total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and float(logits.grad.abs().max()) == 0.0


def test_sampled_rest_estimates_the_partition_function() -> None:
    """Averaged over draws, candidates + shifted sample have the mass of the whole vocabulary."""
    torch.manual_seed(4)
    size, frequent = 400, torch.arange(10)
    logits = torch.randn(size)
    masses, generator = [], torch.Generator().manual_seed(0)
    for _ in range(2000):
        v = loss.choose_vocabulary(size, frequent, torch.tensor([17]), 20, generator)
        shift = torch.zeros(len(v.ids))
        shift[v.num_candidates :] = v.sample_shift
        masses.append(float((logits[v.ids] + shift).exp().sum()))
        assert v.num_candidates == 11 and int(v.column[17]) == 10 and int(v.column[30]) == 11
    assert sum(masses) / len(masses) == pytest.approx(float(logits.exp().sum()), rel=0.02)


def test_mass_outside_the_candidates_is_one_bucket() -> None:
    """Two candidates of four ids: ‖p - q‖₁ over (id 0, id 1, rest)."""
    vocabulary = loss.Vocabulary(
        ids=torch.tensor([0, 1, 2, 3]),
        num_candidates=2,
        sample_shift=0.0,
        column=torch.tensor([0, 1, 2, 2]),
    )
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    terms = loss.dspark_loss(
        q.log(),
        torch.zeros(1),
        torch.tensor([0]),
        torch.tensor([[0, 3]]),
        torch.tensor([[0.5, 0.3]]),  # 0.2 more is unknown
        torch.ones(1),
        vocabulary,
        loss.LossWeights(),
    )
    assert float(terms.parts["L1"]) == pytest.approx(0.1 + 0.3 + abs(0.3 - 0.5))


def test_eagle3_loss_is_over_the_draft_vocabulary() -> None:
    """Draft ids 0, 1 are target ids 2, 5; the second row's likely token is neither."""
    column = torch.full((8,), 2)
    column[2], column[5] = 0, 1
    q = torch.tensor([[0.7, 0.3], [0.5, 0.5]])
    ids = torch.tensor([[2, 5, 6], [6, 7, 2]])
    probs = torch.tensor([[0.6, 0.2, 0.2], [0.9, 0.08, 0.02]])
    total, accept = eagle3_loss(q.log(), ids, probs, torch.ones(2), column)
    expected = -(0.75 * math.log(0.7) + 0.25 * math.log(0.3))
    assert float(total) == pytest.approx(expected)
    # The acceptance counts what the draft cannot say: Σ min(p, q) over the whole vocabulary.
    assert accept.tolist() == pytest.approx([0.8, 0.02])
