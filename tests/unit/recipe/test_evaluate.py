"""The plain loop: lossless for every family, counts by hand, and the confidence's figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distributions import FALSE_ALARM, g_test
from sglang_dspark.recipe import batches, evaluate, proposers
from sglang_dspark.recipe.eagle3 import Eagle3Model
from sglang_dspark.recipe.export import AnyDraft
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.proposers import Chooser, Proposal
from sglang_dspark.recipe.reliability import Reliability, roc_auc
from sglang_dspark.recipe.target import FastLlama
from toy import GAMMA, MASK, VOCAB

Greedy = Callable[[list[int], int], list[int]]
PROMPTS = ([1, 5, 6, 7], [1, 20, 21, 22, 23, 24])


@pytest.mark.parametrize("stop_id", [-1, 11])
def test_greedy_decoding_is_lossless(
    draft: AnyDraft, target: FastLlama, greedy: Greedy, stop_id: int
) -> None:
    for prompt in PROMPTS:
        expected = greedy(prompt, 24)
        if stop_id in expected:
            expected = expected[: expected.index(stop_id) + 1]
        output, stats = evaluate.speculative_decode(
            draft, target, prompt, 24, stop_id, Chooser(0.0)
        )
        assert output == expected
        assert stats.committed == len(output) - 1


def test_sampled_acceptance_is_lossless() -> None:
    """Whatever q proposes, the first token follows p_1, and the second p_2. G-tests, fixed seed."""
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.randn(3, 5, generator=generator).mul(2).softmax(dim=-1) for _ in range(2))
    chooser = Chooser(1.0, generator)
    first, second = [], []
    for _ in range(20_000):
        tokens = [chooser.draw(q[k]) for k in range(2)]
        length, bonus = evaluate.accept(p, Proposal(tokens, q[:2], None), chooser)
        output = [*tokens[:length], bonus]
        first.append((output[0],))
        second += [(output[1],)] if len(output) > 1 else []
    for samples, row in ((first, p[0]), (second, p[1])):
        exact = {(token,): mass for token, mass in enumerate(row.tolist())}
        assert g_test(samples, exact) > FALSE_ALARM


def test_proposals_are_what_training_sees(
    draft: AnyDraft, target: FastLlama, examples: list[Example]
) -> None:
    """One session a sequence, fed with the true tokens round by round, against the packed batch."""
    example = examples[3]
    start, total = example.answer_start, len(example.ids)
    anchors = torch.tensor([start, start + 2, start + 5])
    batch = batches.make_batch([example], [anchors], GAMMA, MASK)
    if isinstance(draft, Eagle3Model):
        logits = draft.lm_head(draft.train_forward(batch, target.embed))[0]
    else:
        context = draft.project_context(batch.features.float())
        embeds = torch.nn.functional.embedding(batch.block_ids, target.embed)
        hidden = draft(embeds, batch.positions, context, batch.mask)[0]
        logits = target.logits(hidden.detach()).unflatten(0, (-1, GAMMA))
        if draft.markov_head is not None:
            logits = logits + draft.markov_head.bias(batch.previous[0]).unflatten(0, (-1, GAMMA))

    class TrueTokens(Chooser):
        def draw(self, probs: torch.Tensor) -> int:
            return truth.pop(0)

    prompt = example.ids[:start].tolist()
    session = proposers.begin(draft, target, prompt, example.features[:start])
    for j, anchor in enumerate(anchors.tolist()):
        truth = example.ids[anchor + 1 : anchor + 1 + GAMMA].tolist()
        proposal = session.propose(int(example.ids[anchor]), TrueTokens(1.0))
        expected = logits[j].float().softmax(dim=-1)
        found = proposal.probs
        if isinstance(draft, Eagle3Model):
            assert found.sum(dim=-1).tolist() == pytest.approx([1.0] * GAMMA, abs=1e-4)
            found = found[:, draft.d2t]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
        after = anchors[j + 1] if j + 1 < len(anchors) else min(anchor + 2, total - 1)
        session.commit(example.ids[anchor + 1 : after + 1].tolist(), example.features[anchor:after])


def test_a_draft_that_knows_the_answer_is_accepted_whole(
    dspark: AnyDraft, target: FastLlama, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [1, 5, 6, 7]
    truth = greedy(prompt, 30)
    done = [1]

    def propose(self: object, anchor: int, chooser: Chooser) -> Proposal:
        block = truth[done[0] : done[0] + GAMMA]
        done[0] += GAMMA + 1
        probs = torch.nn.functional.one_hot(torch.tensor(block), VOCAB).float()
        return Proposal(block, probs, [1.0] * GAMMA)

    monkeypatch.setattr(proposers.BlockSession, "propose", propose)
    output, stats = evaluate.speculative_decode(dspark, target, prompt, 21, -1, Chooser(0.0))
    assert output == truth[:21]
    assert stats.accept_length == GAMMA + 1 and stats.verify_rate == 1.0
    assert stats.accept_rates() == stats.survival_rates() == [1.0] * GAMMA


def test_acceptance_counts_by_hand() -> None:
    stats = evaluate.Acceptance(GAMMA)
    half = [0.5, 0.5, 0.5]
    stats.add_round(0, half, committed=1)
    stats.add_round(2, half, committed=3)
    stats.add_round(3, half, committed=4)
    stats.add_round(3, half, committed=2)  # a stop token as the second draft token
    assert stats.offered == [4, 4, 3]
    assert stats.verified == [4, 3, 2]
    assert stats.accepted == [3, 3, 1]
    assert stats.accept_length == 10 / 4
    assert stats.verify_rate == 10 / (11 + 4)
    assert stats.accept_rates() == [3 / 4, 1.0, 1 / 2]
    assert stats.survival_rates() == [3 / 4, 3 / 4, 1 / 3]
    # The round that the stop token cut short says nothing of its third token.
    assert stats.survived == [0, 2, 3]
    assert stats.survivals[0] == [0.5, 0.25, 0.125]


# --- reliability ---------------------------------------------------------------------------------


def test_reliability_by_hand() -> None:
    """Four blocks: predictions 0.15, 0.15, 0.85, 0.85, of which one, none, both survive."""
    survivals = torch.tensor([[0.15], [0.15], [0.85], [0.85]])
    survived = torch.tensor([[True], [False], [True], [True]])
    position = Reliability.measure(survivals, survived).positions[0]
    assert [(b.count, b.observed) for b in position.bins] == [(2, 0.5), (2, 1.0)]
    assert position.ece == pytest.approx(0.5 * 0.35 + 0.5 * 0.15)
    # Pairs (survivor, casualty): 0.15 against 0.15 ties, the two 0.85 win.
    assert position.auc == pytest.approx((0.5 + 1 + 1) / 3)
    assert position.brier == pytest.approx((0.85**2 + 0.15**2 + 2 * 0.15**2) / 4)


def test_auc_needs_both_outcomes() -> None:
    assert roc_auc(torch.tensor([0.1, 0.9]), torch.tensor([True, True])) is None


def test_calibrated_predictions_have_no_error() -> None:
    generator = torch.Generator().manual_seed(0)
    survivals = torch.rand(50_000, 2, generator=generator)
    survived = torch.rand(50_000, 2, generator=generator) < survivals
    reliability = Reliability.measure(survivals, survived)
    assert reliability.ece < 0.01
    assert reliability.positions[0].auc == pytest.approx(5 / 6, abs=0.01)


def test_figures_are_written(tmp_path: Path, dspark: AnyDraft, target: FastLlama) -> None:
    results = evaluate.evaluate(
        dspark, target, {"a": [PROMPTS[0]], "b": [PROMPTS[1]]}, -1, max_new_tokens=20
    )
    evaluate.write_json(tmp_path / "r.json", results, {"temperature": 0.0})
    read = json.loads((tmp_path / "r.json").read_text())
    assert read["results"]["all"]["committed"] == 2 * 19
    assert len(read["results"]["a"]["accept_rates"]) == GAMMA
    assert evaluate.format_table(results).count("\n") == 4
    reliability = results["all"].reliability()
    assert reliability is not None
    reliability.plot(tmp_path / "r.png", "title")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
