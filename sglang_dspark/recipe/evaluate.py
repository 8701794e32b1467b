"""Speculative decoding in plain PyTorch, one prompt at a time, and what it counts.

Definitions, after DeepSpec's evaluator (deepspec/eval/base_evaluator.py); sums run over rounds:

    accept length    committed / rounds, bonus included: 1 means that nothing is ever accepted
    accept rate @k   accepted / verified of draft token k, verified: those before it were accepted
    survival @k      blocks accepted up to k / blocks that offered k. DeepSpec prints this quotient
                     under the name accept_rate@k; it is the running product of ours
    verify rate      committed / (offered + rounds): the share of verified tokens that is kept

A block that ends the answer (stop token or length limit) offers only what comes before that end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from sglang_dspark.recipe.draft import DraftModel
from sglang_dspark.recipe.eagle3 import Eagle3Model
from sglang_dspark.recipe.proposers import Chooser, Proposal, begin
from sglang_dspark.recipe.reliability import Reliability
from sglang_dspark.recipe.target import FastLlama

AnyDraft = DraftModel | Eagle3Model
# Is told of every round: the block, the target's distributions [γ + 1, V] along it, how many of its
# tokens survived, how many were committed.
Watcher = Callable[[Proposal, Tensor, int, int], None]


@dataclass
class Acceptance:
    """Counts over rounds; lists are per draft position, k from 0.

    offered[k]: blocks that had a token k to verify; verified[k]: those that reached it;
    accepted[k]: those that accepted it.
    survivals, survived: for every round whose block was offered whole, the confidences' running
    product [γ] and how many tokens survived."""

    gamma: int
    rounds: int = 0
    committed: int = 0
    offered: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    survivals: list[list[float]] = field(default_factory=list)
    survived: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("offered", "verified", "accepted"):
            setattr(self, name, getattr(self, name) or [0] * self.gamma)

    def add_round(self, length: int, confidences: list[float] | None, committed: int) -> None:
        """`length` draft tokens survived, `committed` tokens were kept: length + 1, or fewer where
        a stop token or the limit came first."""
        self.rounds += 1
        self.committed += committed
        ended = committed < length + 1
        for k in range(committed if ended else self.gamma):
            self.offered[k] += 1
            self.verified[k] += k <= length
            self.accepted[k] += k < length
        if confidences is not None and not ended:
            self.survivals.append(torch.tensor(confidences).cumprod(dim=0).tolist())
            self.survived.append(length)

    def merge(self, other: Acceptance) -> None:
        self.rounds += other.rounds
        self.committed += other.committed
        for name in ("offered", "verified", "accepted"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, [a + b for a, b in zip(mine, theirs, strict=True)])
        self.survivals += other.survivals
        self.survived += other.survived

    @property
    def accept_length(self) -> float:
        return self.committed / max(1, self.rounds)

    @property
    def verify_rate(self) -> float:
        return self.committed / max(1, sum(self.offered) + self.rounds)

    def accept_rates(self) -> list[float | None]:
        return _quotients(self.accepted, self.verified)

    def survival_rates(self) -> list[float | None]:
        return _quotients(self.accepted, self.offered)

    def reliability(self) -> Reliability | None:
        """Of the confidence head; None without one."""
        if not self.survivals:
            return None
        outcomes = torch.tensor(self.survived)[:, None] > torch.arange(self.gamma)
        return Reliability.measure(torch.tensor(self.survivals), outcomes)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, without the rounds one by one."""
        reliability = self.reliability()
        return {
            "rounds": self.rounds,
            "committed": self.committed,
            "accept_length": self.accept_length,
            "verify_rate": self.verify_rate,
            "accept_rates": self.accept_rates(),
            "survival_rates": self.survival_rates(),
            "verified": self.verified,
            "confidence": None if reliability is None else reliability.as_dict(),
        }


def _quotients(above: list[int], below: list[int]) -> list[float | None]:
    return [a / b if b else None for a, b in zip(above, below, strict=True)]


@torch.inference_mode()
def speculative_decode(
    draft: AnyDraft,
    target: FastLlama,
    prompt: list[int],
    max_new_tokens: int,
    stop_id: int,
    chooser: Chooser,
    watch: Watcher | None = None,
) -> tuple[list[int], Acceptance]:
    """Decode one prompt with speculation. Returns the new tokens and the acceptance counts.

    Every round: draft γ tokens after the anchor, run the target on anchor + draft, accept draft
    token x with probability min(1, p(x) / q(x)), commit what was accepted and one token more: from
    norm(max(0, p - q)) after a rejection, else from p (Leviathan et al., arXiv 2211.17192).
    """
    gamma, layer_ids = draft.config.block_size, draft.config.target_layer_ids
    stats, device = Acceptance(gamma), target.device
    cache = target.new_cache(1, len(prompt) + max_new_tokens + gamma + 1)

    def run(tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Append to the cache -> distribution after each token [n, V], features [n, F * H]"""
        start, end = cache.length, cache.length + len(tokens)
        positions = torch.arange(start, end, device=device)
        mask = torch.arange(end, device=device)[None] <= positions[:, None]
        ids = torch.tensor([tokens], device=device)
        hidden, captured = target.forward(ids, positions[None], mask[None], cache, layer_ids)
        return chooser.distribution(target.logits(hidden[0])), torch.cat(captured, dim=-1)[0]

    p, features = run(prompt)
    session = begin(draft, target, prompt, features)
    output = [chooser.draw(p[-1])]
    while len(output) < max_new_tokens and output[-1] != stop_id:
        proposal = session.propose(output[-1], chooser)
        p, features = run([output[-1], *proposal.tokens])
        length, bonus = accept(p, proposal, chooser)
        committed = [*proposal.tokens[:length], bonus]
        if stop_id in committed:
            committed = committed[: committed.index(stop_id) + 1]
        committed = committed[: max_new_tokens - len(output)]
        stats.add_round(length, proposal.confidences, len(committed))
        if watch is not None:
            watch(proposal, p, length, len(committed))
        session.commit(committed, features[: len(committed)])
        cache.length += len(committed) - gamma - 1
        output += committed
    return output, stats


def accept(p: Tensor, proposal: Proposal, chooser: Chooser) -> tuple[int, int]:
    """p [γ + 1, V], the target's distributions -> how many tokens survive, and the token after."""
    for k, token in enumerate(proposal.tokens):
        q = proposal.probs[k]
        if not chooser.accepts(float(p[k, token] / q[token])):
            return k, chooser.draw((p[k] - q).clamp(min=0))
    return len(proposal.tokens), chooser.draw(p[-1])


def evaluate(
    draft: AnyDraft,
    target: FastLlama,
    prompts: dict[str, list[list[int]]],
    stop_id: int,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Acceptance]:
    """Acceptance by kind of prompt, and over all under "all". prompts: token ids by kind."""
    generator = torch.Generator(target.device).manual_seed(seed)
    chooser = Chooser(temperature, generator)
    results = {"all": Acceptance(draft.config.block_size)}
    results |= {kind: Acceptance(draft.config.block_size) for kind in prompts}
    work = [(kind, ids) for kind, prompts_of_kind in prompts.items() for ids in prompts_of_kind]
    for kind, ids in track(work, "evaluate", console=Console(stderr=True)):
        _, stats = speculative_decode(draft, target, ids, max_new_tokens, stop_id, chooser)
        results[kind].merge(stats)
        results["all"].merge(stats)
    return results


def chat_prompts(tokenizer: Any, texts: dict[str, tuple[str, ...]]) -> dict[str, list[list[int]]]:
    """Token ids of one user message each, in the target's chat template."""

    def ids(text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    return {kind: [ids(text) for text in of_kind] for kind, of_kind in texts.items()}


def format_table(results: dict[str, Acceptance]) -> str:
    """Markdown, by kind: accept length, verify rate, accept rate per position."""
    return "\n".join(_table_lines(results))


def _table_lines(results: dict[str, Acceptance]) -> Iterator[str]:
    gamma = results["all"].gamma
    positions = " | ".join(f"@{k + 1}" for k in range(gamma))
    yield f"| prompts | rounds | accept length | verify rate | {positions} |"
    yield "|---" * (gamma + 4) + "|"
    for kind, stats in results.items():
        rates = " | ".join("-" if r is None else f"{r:.2f}" for r in stats.accept_rates())
        yield (
            f"| {kind} | {stats.rounds} | {stats.accept_length:.2f} | {stats.verify_rate:.2f} "
            f"| {rates} |"
        )


def write_json(path: Path, results: dict[str, Acceptance], about: dict[str, Any]) -> None:
    """`about` and, under "results", the counts and rates by kind."""
    rows = {kind: stats.as_dict() for kind, stats in results.items()}
    path.write_text(json.dumps({**about, "results": rows}, indent=1) + "\n")
