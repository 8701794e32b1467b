"""A random target of a few thousand parameters, and what the recipe makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_dspark.recipe import features
from sglang_dspark.recipe.draft import DraftModel
from sglang_dspark.recipe.export import AnyDraft
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.generate import Conversation
from sglang_dspark.recipe.target import FastLlama
from toy import DRAFTS, LAYER_IDS, VOCAB, new_draft


@pytest.fixture(scope="session")
def hf_target() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def target(hf_target: Any) -> FastLlama:
    return FastLlama(hf_target)


@pytest.fixture(scope="session")
def greedy(hf_target: Any) -> Callable[[list[int], int], list[int]]:
    """(prompt, n) -> the n tokens that transformers puts behind it."""

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = hf_target.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return generate


@pytest.fixture(scope="session")
def examples(target: FastLlama, greedy: Callable[[list[int], int], list[int]]) -> list[Example]:
    prompts = [[1, *range(5 + i, 9 + 2 * i)] for i in range(6)]
    conversations = [
        Conversation("chat", 0.0, prompt + greedy(prompt, 12), len(prompt)) for prompt in prompts
    ]
    return [features.extract(target, c, LAYER_IDS, VOCAB) for c in conversations]


@pytest.fixture(params=DRAFTS)
def draft(request: pytest.FixtureRequest, target: FastLlama, examples: list[Example]) -> AnyDraft:
    """Each family of drafts in turn."""
    return new_draft(request.param, target, examples)


@pytest.fixture
def dspark(target: FastLlama, examples: list[Example]) -> DraftModel:
    draft = new_draft("dspark", target, examples)
    assert isinstance(draft, DraftModel)
    return draft
