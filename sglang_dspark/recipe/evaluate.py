"""Stage 4: speculative decoding in plain PyTorch, greedy, one prompt at a time.

accept length (τ): tokens committed per round, bonus included, so 1 means that nothing is ever
accepted and γ + 1 is the most. accept rate at k: accepted / verified of draft token k, among the
blocks whose tokens before k were all accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.recipe.draft import DraftModel
from sglang_dspark.recipe.target import FastLlama

# Not among the seeds of generate.py, whose messages the target writes itself.
PROMPTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "What are the main differences between cats and dogs as pets?",
        "Explain how rainbows form.",
        "How can I sleep better at night?",
        "Give me three tips for a job interview.",
    ),
    "maths": (
        "Tom has 12 apples. He gives 5 to Anna and buys 8 more. How many apples does he have now?",
        "Solve for x: 3x + 7 = 22.",
        "A rectangle is 8 cm long and 5 cm wide. What are its area and its perimeter?",
        "What is 15% of 240? Explain each step.",
    ),
    "code": (
        "Write a Python function that checks whether a string is a palindrome.",
        "Write a function that returns the n-th Fibonacci number.",
        "How do I read a text file line by line in Python?",
        "Write a SQL query that lists all customers who have placed more than three orders.",
    ),
    "prose": (
        "Write a short story about a lighthouse keeper.",
        "Write a poem about autumn leaves.",
        "Describe a busy market in a small town.",
        "Write a letter to a friend who has moved away.",
    ),
}


@dataclass
class Acceptance:
    """Counts over rounds. verified[k], accepted[k]: blocks that reached draft token k (from 0),
    and those in which it was accepted. confidence[k]: sum of the head's output over the same."""

    gamma: int
    rounds: int = 0
    committed: int = 0
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verified = self.verified or [0] * self.gamma
        self.accepted = self.accepted or [0] * self.gamma
        self.confidence = self.confidence or [0.0] * self.gamma

    def add_round(self, length: int, confidences: list[float], committed: int) -> None:
        """`length` draft tokens equal the target's, `committed` tokens were kept: length + 1, or
        fewer where a stop token or the limit came first. What lies behind those is not counted."""
        self.rounds += 1
        self.committed += committed
        for k in range(min(length + 1, self.gamma, committed)):
            self.verified[k] += 1
            self.accepted[k] += k < length
            self.confidence[k] += confidences[k]

    def merge(self, other: Acceptance) -> None:
        self.rounds += other.rounds
        self.committed += other.committed
        for name in ("verified", "accepted", "confidence"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, [a + b for a, b in zip(mine, theirs, strict=True)])

    @property
    def accept_length(self) -> float:
        return self.committed / max(1, self.rounds)

    def accept_rates(self) -> list[float]:
        return [a / max(1, v) for a, v in zip(self.accepted, self.verified, strict=True)]

    def mean_confidences(self) -> list[float]:
        """What the confidence head said of the same tokens; equal to accept_rates if calibrated."""
        return [c / max(1, v) for c, v in zip(self.confidence, self.verified, strict=True)]


@torch.inference_mode()
def propose(
    draft: DraftModel, target: FastLlama, context: Tensor, anchor: int
) -> tuple[list[int], list[float]]:
    """Draft a block greedily. context [L, H]: projected features of the positions before the
    anchor. Returns γ tokens and γ confidences."""
    device = context.device
    ids = draft.block_ids(torch.tensor([anchor], device=device))
    positions = len(context) + torch.arange(draft.config.block_size, device=device)[None]
    embeds = F.embedding(ids, target.embed).to(context.dtype)
    hidden = draft(embeds, positions, context[None])[0]
    base = F.linear(hidden.to(target.dtype), target.head).float()
    tokens, confidences, previous = [], [], torch.tensor(anchor, device=device)
    for k in range(draft.config.block_size):
        latent = draft.markov_head.markov_w1(previous)
        confidences.append(float(draft.confidence_head(hidden[k], latent).sigmoid()))
        previous = (base[k] + draft.markov_head.bias(previous).float()).argmax()
        tokens.append(int(previous))
    return tokens, confidences


@torch.inference_mode()
def speculative_decode(
    draft: DraftModel, target: FastLlama, prompt: list[int], max_new_tokens: int, stop_id: int
) -> tuple[list[int], Acceptance]:
    """Greedy decoding of one prompt. Returns the new tokens and the acceptance counts.

    Every round: draft γ tokens after the anchor, run the target on anchor + draft, accept the
    longest prefix that equals the target's own argmax, commit it and the target's next token.
    """
    gamma, layer_ids = draft.config.block_size, draft.config.target_layer_ids
    stats, device = Acceptance(gamma), target.device
    cache = target.new_cache(1, len(prompt) + max_new_tokens + gamma + 1)

    def run(tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Append to the cache -> argmax after each token [n], projected features [n, H]"""
        start, end = cache.length, cache.length + len(tokens)
        positions = torch.arange(start, end, device=device)
        mask = torch.arange(end, device=device)[None] <= positions[:, None]
        ids = torch.tensor([tokens], device=device)
        hidden, captured = target.forward(ids, positions[None], mask[None], cache, layer_ids)
        features = torch.cat(captured, dim=-1)[0].float()
        return target.logits(hidden[0]).argmax(dim=-1), draft.project_context(features)

    choices, context = run(prompt)
    output = [int(choices[-1])]
    while len(output) < max_new_tokens and output[-1] != stop_id:
        tokens, confidences = propose(draft, target, context, output[-1])
        choices, features = run([output[-1], *tokens])
        target_tokens = choices.tolist()
        length = 0
        while length < gamma and tokens[length] == target_tokens[length]:
            length += 1
        committed = target_tokens[: length + 1]
        if stop_id in committed:
            committed = committed[: committed.index(stop_id) + 1]
        committed = committed[: max_new_tokens - len(output)]
        stats.add_round(length, confidences, len(committed))
        output += committed
        context = torch.cat([context, features[: len(committed)]])
        cache.length = len(context)
    return output, stats


def evaluate(
    draft: DraftModel,
    target: FastLlama,
    tokenizer: Any,
    prompts: dict[str, tuple[str, ...]],
    max_new_tokens: int = 128,
) -> dict[str, Acceptance]:
    """Acceptance by kind of prompt, and over all under "all"."""
    results = {"all": Acceptance(draft.config.block_size)}
    for kind, texts in prompts.items():
        results[kind] = Acceptance(draft.config.block_size)
        for text in texts:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            _, stats = speculative_decode(
                draft, target, list(ids), max_new_tokens, int(tokenizer.eos_token_id)
            )
            results[kind].merge(stats)
        results["all"].merge(results[kind])
    return results


def format_table(results: dict[str, Acceptance]) -> str:
    """Markdown: accept length and accept rate per position, by kind."""
    gamma = results["all"].gamma
    positions = " | ".join(f"@{k + 1}" for k in range(gamma))
    lines = [f"| prompts | rounds | accept length | {positions} |"]
    lines.append("|---" * (gamma + 3) + "|")
    for kind, stats in results.items():
        rates = " | ".join(f"{rate:.2f}" for rate in stats.accept_rates())
        lines.append(f"| {kind} | {stats.rounds} | {stats.accept_length:.2f} | {rates} |")
    return "\n".join(lines)
