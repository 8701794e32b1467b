"""The targets that the recipe trains drafts for, and where their prompts come from.

smollm2  SmolLM2-135M-Instruct, the demo model. It writes its own user messages (seeds.py gives the
         first words), then answers them.
tiny     a target of a few million parameters that was trained on Python's own help texts (tiny.py).
         It continues excerpts of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dspark.recipe import tiny
from sglang_dspark.recipe.evaluate import chat_prompts
from sglang_dspark.recipe.generate import GenerateConfig, Prompt, PromptSource, complete
from sglang_dspark.recipe.prompts import PROMPTS
from sglang_dspark.recipe.seeds import sample_opener
from sglang_dspark.serving import Server

USER_TOKENS = 64
# The cut keeps a small model on topic.
USER_SAMPLING = {"temperature": 0.9, "top_k": 40}


@dataclass(frozen=True)
class Subject:
    """path: the target's folder. mask_token: a token that it never uses. cached_layers: the layers
    whose outputs are kept, of which EAGLE3 reads eagle3_layers. held_out: prompts by kind.
    sizes: fields of DraftConfig and Eagle3Config that differ from the target's."""

    path: Path
    mask_token: str
    cached_layers: tuple[int, ...]
    eagle3_layers: tuple[int, ...]
    source: PromptSource
    held_out: dict[str, list[list[int]]]
    stop_id: int
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    block_sizes: dict[str, Any] = field(default_factory=dict)
    eagle3_sizes: dict[str, Any] = field(default_factory=dict)


def smollm2() -> Subject:
    from transformers import AutoTokenizer

    from sglang_dspark.demo import prepare_demo_model

    path = prepare_demo_model("bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(path)
    return Subject(
        path=path,
        mask_token="<reponame>",
        cached_layers=(2, 11, 20, 28),
        eagle3_layers=(2, 20, 28),
        source=ChatSource(tokenizer),
        held_out=chat_prompts(tokenizer, PROMPTS),
        stop_id=int(tokenizer.eos_token_id),
        # Values carry what the block knows of the context: room for the whole hidden size.
        block_sizes={"num_key_value_heads": 9},
        eagle3_sizes={"draft_vocab_size": 5376},
    )


def tiny_target() -> Subject:
    from transformers import AutoTokenizer

    path = tiny.prepare_tiny_target()
    tokenizer = AutoTokenizer.from_pretrained(path)
    return Subject(
        path=path,
        mask_token=tiny.MASK_TOKEN,
        cached_layers=(0, 1, 2),
        eagle3_layers=(0, 1, 2),
        source=ExcerptSource(tokenizer),
        held_out=tiny.held_out_prompts(tokenizer),
        stop_id=int(tokenizer.eos_token_id),
        generate=GenerateConfig(max_answer_tokens=160),
        block_sizes={"num_hidden_layers": 2},
        eagle3_sizes={"draft_vocab_size": len(tokenizer), "qk_norm": True},
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {"smollm2": smollm2, "tiny": tiny_target}


class ChatSource:
    """User messages that the target writes itself, after a short opener, in its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        mark = "\u0001"
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        self.before_user, _, self.after_user = text.partition(mark)

    def __call__(self, server: Server, rng: random.Random, count: int) -> list[Prompt]:
        openers = [sample_opener(rng) for _ in range(count)]
        begun = [self._encode(self.before_user + text.rstrip(" ")) for _, text, _ in openers]
        turns = complete(server, begun, USER_TOKENS, [USER_SAMPLING] * count)
        prompts = []
        for (kind, opener, suffix), turn in zip(openers, turns, strict=True):
            text = opener.rstrip(" ") + self.tokenizer.decode(turn, skip_special_tokens=True)
            whole = self.before_user + text.strip() + suffix + self.after_user
            prompts.append(Prompt(kind, self._encode(whole)))
        return prompts

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


class ExcerptSource:
    """Excerpts of the tiny target's own text, 8 to 48 tokens long."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids = tiny.training_ids(tokenizer)

    def __call__(self, server: Server, rng: random.Random, count: int) -> list[Prompt]:
        prompts = []
        for _ in range(count):
            start, length = rng.randrange(len(self.ids) - 64), rng.randint(8, 48)
            prompts.append(Prompt("help", self.ids[start : start + length]))
        return prompts
