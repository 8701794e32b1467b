"""Drafts of every family for a random target of a few thousand parameters."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dspark.recipe import objectives
from sglang_dspark.recipe.draft import DraftConfig
from sglang_dspark.recipe.eagle3 import Eagle3Config, Eagle3Model
from sglang_dspark.recipe.export import AnyDraft
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.initialise import init_block_draft, init_eagle3
from sglang_dspark.recipe.objectives import Objective
from sglang_dspark.recipe.target import FastLlama
from sglang_dspark.recipe.train import TrainConfig

LAYER_IDS = (0, 2)
GAMMA = 3
VOCAB = 40
MASK = 3
DRAFTS = ("dspark", "dflash", "eagle3", "eagle3-deepspec")


def new_draft(name: str, target: FastLlama, examples: list[Example]) -> AnyDraft:
    """An untrained draft, its heads random: zeros would hide a wrong index."""
    if name.startswith("eagle3"):
        deepspec = name == "eagle3-deepspec"
        config = Eagle3Config.for_target(
            target,
            LAYER_IDS,
            MASK,
            block_size=GAMMA,
            qk_norm=deepspec,
            draft_vocab_size=VOCAB if deepspec else 30,
        )
        return init_eagle3(Eagle3Model(config), target, examples, seed=0)
    heads = {"markov_rank": 0, "confidence": False} if name == "dflash" else {"markov_rank": 4}
    block = DraftConfig.for_target(target, LAYER_IDS, MASK, block_size=GAMMA, **heads)
    draft = init_block_draft(block, target, examples, seed=0)
    torch.manual_seed(5)
    for head in (draft.markov_head, draft.confidence_head):
        for parameter in head.parameters() if head is not None else ():
            torch.nn.init.normal_(parameter, std=0.3)
    return draft


def objective_of(draft: AnyDraft, target: FastLlama, examples: list[Example]) -> Objective:
    shared = objectives.Shared(target.embed, target.head)
    if isinstance(draft, Eagle3Model):
        return objectives.Eagle3Objective(draft, shared)
    frequent = objectives.frequent_ids(examples, 8, VOCAB)
    return objectives.BlockObjective(draft, shared, frequent, likely_per_row=4, num_sampled=6)


def small_config(**values: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "total_steps": 6,
        "sequences_per_step": 2,
        "anchors_per_sequence": 3,
        "warmup_steps": 2,
        "autocast": False,
    }
    return TrainConfig(**{**defaults, **values})
