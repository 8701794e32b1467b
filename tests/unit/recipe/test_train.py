"""Initialisation, determinism and resumption, for every family of drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sglang_dspark.recipe import objectives, train
from sglang_dspark.recipe.confidence import confidence_rows, refit_confidence
from sglang_dspark.recipe.draft import DraftConfig, DraftModel
from sglang_dspark.recipe.export import AnyDraft
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.initialise import init_from_target, init_markov
from sglang_dspark.recipe.recency import carry
from sglang_dspark.recipe.target import FastLlama
from toy import GAMMA, LAYER_IDS, new_draft, objective_of, small_config


def fresh(draft: AnyDraft) -> AnyDraft:
    copy = type(draft)(draft.config)  # type: ignore[arg-type]
    copy.load_state_dict(draft.state_dict())
    return copy


def assert_same_weights(a: AnyDraft, b: AnyDraft) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def test_same_seed_same_weights(
    draft: AnyDraft, target: FastLlama, examples: list[Example]
) -> None:
    runs = [fresh(draft) for _ in range(3)]
    for run, seed in zip(runs, (0, 0, 1), strict=True):
        train.train(objective_of(run, target, examples), examples, small_config(seed=seed))
    assert_same_weights(runs[0], runs[1])
    assert not torch.equal(runs[0].fc.weight, runs[2].fc.weight)


def test_resume_equals_uninterrupted(
    draft: AnyDraft, target: FastLlama, examples: list[Example], tmp_path: Path
) -> None:
    whole, part, again = (fresh(draft) for _ in range(3))
    config, path = small_config(), tmp_path / "checkpoint.pt"
    expected = train.train(objective_of(whole, target, examples), examples, config)
    losses = train.train(objective_of(part, target, examples), examples, config, path, stop_after=4)
    losses += train.train(
        objective_of(again, target, examples), examples, config, path, resume=True
    )
    assert losses == expected
    assert_same_weights(whole, again)


def test_checkpoint_of_another_draft_is_refused(
    dspark: DraftModel, target: FastLlama, examples: list[Example], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    train.train(objective_of(dspark, target, examples), examples, small_config(total_steps=1), path)
    config = DraftConfig.for_target(target, LAYER_IDS, 3, block_size=GAMMA, markov_rank=5)
    other = objective_of(DraftModel(config), target, examples)
    with pytest.raises(ValueError, match="markov_rank is 4, this run has 5"):
        train.train(other, examples, small_config(), path, resume=True)


def test_training_lowers_the_loss(
    draft: AnyDraft, target: FastLlama, examples: list[Example]
) -> None:
    config = small_config(total_steps=150, learning_rate=3e-3)
    losses = train.train(objective_of(draft, target, examples), examples, config)
    # DSPARK ends with other loss weights; what is compared has the same. The random target is
    # nearly uniform, so most of a loss cannot be learnt away.
    assert sum(losses[110:120]) / 10 < sum(losses[:10]) / 10 - 0.3


def test_curves_are_logged(
    dspark: DraftModel,
    target: FastLlama,
    examples: list[Example],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "LOG_SECONDS", -1.0)
    log = tmp_path / "log.jsonl"
    objective = objective_of(dspark, target, examples)
    losses = train.train(objective, examples, small_config(), log=log)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] == pytest.approx(sum(losses) / 6, abs=1e-3)
    assert {"ce", "L1", "bce", "steps_per_second", "minutes_left"} <= set(rows[0])


def test_learning_rate_schedule() -> None:
    """Up, constant, down to zero."""
    config = small_config(total_steps=100, warmup_steps=10, decay_fraction=0.4)
    rates = [config.rate_at(step) / config.learning_rate for step in (0, 9, 59, 80, 99)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.5, 1 / 40])


def test_the_papers_loss_comes_last(
    dspark: DraftModel, target: FastLlama, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        objectives.BlockObjective, "loss_over", lambda self, b, v, weights: seen.append(weights)
    )
    objective = objective_of(dspark, target, examples)
    chosen, anchors = train.examples_at(examples, small_config(), 0)
    batch = train.make_batch(chosen, anchors, GAMMA, 3)
    for progress in (0.0, 0.79, 0.8, 0.99):
        objective.loss(batch, progress, torch.Generator())
    assert seen == [objectives.EARLY_LOSS] * 2 + [objectives.PAPER_LOSS] * 2
    assert vars(objectives.PAPER_LOSS) == {
        "soft_cross_entropy": 0.0,
        "cross_entropy": 0.1,
        "distance": 0.9,
        "confidence": 1.0,
    }


def test_the_confidence_head_is_refitted_alone(
    dspark: DraftModel, target: FastLlama, examples: list[Example]
) -> None:
    """It fits better, nothing else changes, and twice the same is the same."""
    shared = objectives.Shared(target.embed, target.head)
    start = {name: value.clone() for name, value in dspark.state_dict().items()}
    before, after = refit_confidence(dspark, shared, examples, seed=0)
    assert after < before
    for name, value in dspark.state_dict().items():
        assert torch.equal(value, start[name]) is not name.startswith("confidence_head"), name
    head = dspark.state_dict()["confidence_head.proj.weight"].clone()
    dspark.load_state_dict(start)
    assert refit_confidence(dspark, shared, examples, seed=0) == (before, after)
    assert torch.equal(dspark.state_dict()["confidence_head.proj.weight"], head)
    # At the optimum of a cross-entropy with a free bias the mean prediction is the mean label.
    inputs, labels = (
        torch.cat(parts)
        for parts in zip(
            *(
                confidence_rows(dspark, shared, e, torch.arange(e.answer_start, len(e.ids) - 1))
                for e in examples
            ),
            strict=True,
        )
    )
    assert dspark.confidence_head is not None
    predicted = dspark.confidence_head.proj(inputs).sigmoid().mean()
    assert float(predicted) == pytest.approx(float(labels.mean()), abs=0.02)
    with pytest.raises(ValueError, match="has no confidence head"):
        draft = new_draft("dflash", target, examples)
        assert isinstance(draft, DraftModel)
        refit_confidence(draft, shared, examples, seed=0)


@torch.no_grad()
def test_the_confidence_head_learns_from_blocks_that_survived(
    dspark: DraftModel, target: FastLlama, examples: list[Example]
) -> None:
    """Row k counts where the draft's tokens before k, given the true ones, are the sequence's."""
    shared = objectives.Shared(target.embed, target.head)
    example = examples[1]
    start, total = example.answer_start, len(example.ids)
    counts = 0
    for anchor in range(start, total - 1):
        context = dspark.project_context(example.features[:anchor].float())[None]
        embeds = F.embedding(dspark.block_ids(example.ids[anchor : anchor + 1]), target.embed)
        hidden = dspark(embeds, anchor + torch.arange(GAMMA)[None], context)[0]
        assert dspark.markov_head is not None
        for k in range(min(GAMMA, total - 1 - anchor)):
            counts += 1
            bias = dspark.markov_head.bias(example.ids[anchor + k])
            own = int((target.logits(hidden[k]) + bias).argmax())
            if own != int(example.ids[anchor + k + 1]):
                break
    inputs, _ = confidence_rows(dspark, shared, example, torch.arange(start, total - 1))
    assert len(inputs) == counts < GAMMA * (total - 1 - start) - 3


# --- initialisation ------------------------------------------------------------------------------


def test_draft_layers_start_as_the_targets_last(target: FastLlama, examples: list[Example]) -> None:
    """The folded norms leave what a target layer computes from its input unchanged."""
    first = target.layers[0]
    config = DraftConfig.for_target(target, LAYER_IDS, 3)
    draft = init_from_target(config, target, examples[0].features, seed=0)
    x = torch.randn(5, 16)
    for layer, source in zip(draft.decoder_layers, target.layers[-2:], strict=True):
        expected = F.rms_norm(x, (16,), source.input_norm, target.eps) @ source.qkv.T
        normed, attention = layer.input_layernorm(x), layer.self_attn
        found = [p(normed) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        torch.testing.assert_close(torch.cat(found, dim=-1), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(draft.decoder_layers[0].mlp.down_proj.weight, first.down)
    assert torch.equal(draft.decoder_layers[1].mlp.down_proj.weight, target.layers[-1].down)


def test_markov_init_prefers_what_followed(dspark: DraftModel, target: FastLlama) -> None:
    """Two groups of tokens, each followed by its own; rank 4 holds that, and no id stays empty."""
    previous = torch.arange(10).repeat(50)
    following = torch.where(previous < 5, 20, 30)[:, None] + torch.arange(5)
    head = dspark.markov_head
    assert head is not None
    init_markov(head, target.embed, previous, following, torch.full((500, 5), 0.2))
    bias = head.bias(torch.arange(10))
    assert bool((bias[:5, 20:25].min() > bias[:5, 30:35].max()).all())
    assert bool((bias[5:, 30:35].min() > bias[5:, 20:25].max()).all())
    assert bool((head.markov_w1.weight[10:].abs().sum(dim=1) > 0).all())


def test_a_new_draft_looks_at_the_latest_context(
    target: FastLlama, examples: list[Example]
) -> None:
    """The first layer's keys and queries are constant but for position, so that the scores fall
    with the distance, and block rows are not looked at."""
    draft = new_draft("dflash", target, examples)
    assert isinstance(draft, DraftModel)
    layer = draft.decoder_layers[0]
    rows = layer.input_layernorm(target.embed[torch.arange(5, 20)].float())
    context = draft.project_context(examples[0].features.float())
    q = layer.self_attn.q_proj(rows).unflatten(-1, (-1, 4))
    k = layer.self_attn.k_proj(context).unflatten(-1, (-1, 4))
    own = layer.self_attn.k_proj(rows).unflatten(-1, (-1, 4))
    cosine = torch.nn.functional.cosine_similarity
    mean_q, mean_k = q.mean(dim=0)[:2], k.mean(dim=0)
    assert float(cosine(mean_q, mean_k, dim=-1).min()) > 0.9
    assert float(cosine(mean_q, own.mean(dim=0), dim=-1).max()) < -0.5


def test_carry_projects_onto_the_greatest_directions(target: FastLlama) -> None:
    config = DraftConfig.for_target(target, LAYER_IDS, 3)  # two KV heads of 4: room for 8 of 16
    rows = torch.randn(50, 16) * torch.tensor([9.0, 8, 7, 6, 9, 8, 7, 6, *[0.01] * 8])
    down, up = carry(config, rows)
    values = (rows @ down.T).unflatten(-1, (2, 4)).repeat_interleave(2, dim=1).flatten(1)
    torch.testing.assert_close(values @ up.T, rows, atol=0.1, rtol=0)
