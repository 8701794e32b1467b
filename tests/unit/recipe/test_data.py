"""The target's forward, the cached features, and how a batch is cut from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sglang_dspark.recipe import batches, features
from sglang_dspark.recipe.draft import DraftConfig, DraftModel
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.target import FastLlama, left_padded_mask

GAMMA, LAYER_IDS, VOCAB = 3, (0, 2), 40


def test_target_equals_transformers(hf_target: Any, target: FastLlama) -> None:
    """Padded rows, decoded in two pieces, against transformers row by row."""
    torch.manual_seed(2)
    rows = [torch.randint(3, VOCAB, (length,)) for length in (1, 5, 9)]
    longest, pads = 9, torch.tensor([8, 4, 0])
    ids = torch.stack([F.pad(row, (longest - len(row), 0)) for row in rows])
    positions = (torch.arange(longest) - pads[:, None]).clamp(min=0)
    cache = target.new_cache(3, longest)
    hidden, captured = [], []
    for start, end in ((0, 6), (6, 9)):
        mask = left_padded_mask(pads, end - start, end)
        h, c = target.forward(ids[:, start:end], positions[:, start:end], mask, cache, LAYER_IDS)
        hidden.append(h)
        captured.append(torch.cat(c, dim=-1))
    logits, states = target.logits(torch.cat(hidden, dim=1)), torch.cat(captured, dim=1)
    for i, row in enumerate(rows):
        with torch.no_grad():
            expected = hf_target(row[None], output_hidden_states=True)
        torch.testing.assert_close(logits[i, pads[i] :], expected.logits[0], atol=1e-4, rtol=1e-4)
        layers = torch.cat([expected.hidden_states[k + 1][0] for k in LAYER_IDS], dim=-1)
        torch.testing.assert_close(states[i, pads[i] :], layers, atol=1e-4, rtol=1e-4)


def test_shards_read_back(examples: list[Example], tmp_path: Path) -> None:
    features.write_shard(tmp_path / "a.safetensors", examples[:4])
    features.write_shard(tmp_path / "b.safetensors", examples[4:])
    for before, after in zip(examples, features.read_features(tmp_path), strict=True):
        assert after.answer_start == before.answer_start
        assert torch.equal(after.ids, before.ids)
        assert torch.equal(after.features, before.features)
        assert torch.equal(after.topk_ids, before.topk_ids)
        torch.testing.assert_close(after.topk_probs, before.topk_probs, atol=0, rtol=2**-8)


def test_layers_of_the_cache_can_be_chosen(examples: list[Example]) -> None:
    chosen = features.select_layers(examples, (0, 2), (2,))
    assert torch.equal(chosen[0].features, examples[0].features[:, 16:])
    with pytest.raises(ValueError, match=r"layers \[1\] are not cached; cached: \[0, 2\]"):
        features.select_layers(examples, (0, 2), (1, 2))


def test_the_last_target_layer_is_refused(target: FastLlama) -> None:
    with pytest.raises(ValueError, match=r"target_layer_ids is \[0, 3\].*in 0\.\.2"):
        DraftConfig.for_target(target, (0, 3), 3)


# --- attention mask ----------------------------------------------------------------------------


def test_mask_equals_a_per_anchor_loop() -> None:
    anchors, length = torch.tensor([2, 3, 7, -1]), 9
    mask = batches.block_mask(anchors, length, GAMMA)
    for j, anchor in enumerate(anchors.tolist()):
        for k in range(GAMMA):
            row = mask[j * GAMMA + k].tolist()
            context = [t < anchor for t in range(length)]
            block = [j2 == j for j2 in range(len(anchors)) for _ in range(GAMMA)]
            assert row == context + block


def test_packed_blocks_equal_blocks_alone(
    dspark: DraftModel, target: FastLlama, examples: list[Example]
) -> None:
    """Two padded sequences with several anchors in one call = one call per anchor, no mask."""
    anchors = [torch.tensor([8, 10, 15]), torch.tensor([12, 13])]
    batch = batches.make_batch(examples[1:3], anchors, GAMMA, dspark.mask_id)
    context = dspark.project_context(batch.features.float())
    embeds = F.embedding(batch.block_ids, target.embed)
    packed = dspark(embeds, batch.positions, context, batch.mask).unflatten(1, (-1, GAMMA))
    for i, example in enumerate(examples[1:3]):
        for j, anchor in enumerate(anchors[i].tolist()):
            before = dspark.project_context(example.features[:anchor].float())[None]
            ids = torch.tensor([[int(example.ids[anchor])] + [dspark.mask_id] * (GAMMA - 1)])
            positions = anchor + torch.arange(GAMMA)[None]
            alone = dspark(F.embedding(ids, target.embed), positions, before)
            torch.testing.assert_close(packed[i, j], alone[0], atol=1e-4, rtol=1e-4)


def test_batch_rows_line_up(examples: list[Example]) -> None:
    example = examples[0]
    last = len(example.ids) - 2
    batch = batches.make_batch([example], [torch.tensor([last - 1, last])], GAMMA, 3)
    assert batch.valid.tolist() == [[True, True, False, True, False, False]]
    assert batch.labels[batch.valid].tolist() == example.ids[[last, last + 1, last + 1]].tolist()
    assert batch.previous[batch.valid].tolist() == example.ids[[last - 1, last, last]].tolist()
    row = last - example.answer_start
    assert torch.equal(batch.topk_ids[0, 3], example.topk_ids[row])
