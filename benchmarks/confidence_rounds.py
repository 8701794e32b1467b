"""The rounds that confidence_sources.py compares sources on, with all that was said in them.

Plain PyTorch, one prompt at a time; see sglang_dspark/recipe/evaluate.py.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cost_tables.model import Floats
from sglang_dspark.drafters.evidence import BOUND, evidence
from sglang_dspark.recipe.evaluate import AnyDraft, speculative_decode
from sglang_dspark.recipe.export import load_draft
from sglang_dspark.recipe.proposers import Chooser, Proposal
from sglang_dspark.recipe.subjects import SUBJECTS, Subject
from sglang_dspark.recipe.target import FastLlama

DRAFTS = Path(__file__).parents[1] / "sglang_dspark" / "drafts"
PREFIX = {"smollm2": "smollm2-135m", "tiny": "tiny"}
# Columns that a source may use, all greater where more should survive. The first four speak of the
# position's own distribution: log-odds of the greatest probability, margin between the two greatest
# logits, negative entropy, log of the sum of squares. `before`: log-odds of the product of q over
# the positions before. `recent`: how many survived in the request's last rounds.
COLUMNS = ("log_odds", "margin", "certainty", "collision", "before", "recent")


@dataclass(frozen=True)
class Rounds:
    """n rounds in the order in which they were decoded, prompt by prompt.

    kind, prompt, length, committed [n]: the latter two as in `Acceptance.add_round`. candidates
    [n, γ, 4]: the first four of COLUMNS. overlap [n, γ]: Σ min(p, q), which knows the target too.
    head [n, γ]: the head's probability, 0 without a head.
    """

    kind: np.ndarray
    prompt: np.ndarray
    length: np.ndarray
    committed: np.ndarray
    candidates: np.ndarray
    overlap: np.ndarray
    head: np.ndarray

    @property
    def has_head(self) -> bool:
        return bool(self.head.any())

    @property
    def windows(self) -> np.ndarray:
        """[n]; a block that ends the answer offers only what comes before that end."""
        whole = self.committed == self.length + 1
        return np.where(whole, self.head.shape[1], self.committed) + 1

    @property
    def offered(self) -> np.ndarray:
        return np.arange(self.head.shape[1]) < self.windows[:, None] - 1

    @property
    def reached(self) -> np.ndarray:
        return self.offered & (np.arange(self.head.shape[1]) <= self.length[:, None])

    @property
    def survived(self) -> np.ndarray:
        return np.arange(self.head.shape[1]) < self.length[:, None]

    def head_logits(self) -> Floats:
        p = self.head.astype(np.float64).clip(1e-7, 1 - 1e-7)
        return np.log(p / (1 - p))

    def columns(self, names: tuple[str, ...]) -> Floats:
        """[n, γ, F]"""
        said = np.moveaxis(self.candidates.astype(np.float64), 2, 0)
        known = dict(zip(COLUMNS[:4], said, strict=True))
        q = 1 / (1 + np.exp(-known["log_odds"]))
        product = np.ones_like(q)
        product[:, 1:] = q.cumprod(axis=1)[:, :-1]
        known["before"] = np.log(product / (1 - product).clip(1e-6))
        known["before"][:, 0] = 0.0  # nothing is before it, and the position has its own bias
        known["recent"] = np.broadcast_to(self._recent()[:, None], q.shape)
        chosen = np.stack([known[name] for name in names], axis=2)
        return chosen.clip(-BOUND, BOUND)

    def _recent(self) -> Floats:
        """Running mean of min(length, 3) over the prompt's rounds before, less the mean of all."""
        recent, value = np.zeros(len(self.length)), 0.0
        centre = np.minimum(self.length, 3).mean()
        for i, length in enumerate(self.length):
            if i == 0 or self.prompt[i] != self.prompt[i - 1]:
                value = 0.0
            recent[i] = value
            value += 0.2 * (min(length, 3) - centre - value)
        return recent

    def batches(self, together: int, mixed: bool = True) -> Iterator[np.ndarray]:
        """Indices of rounds that run together, `together` prompts at a time. mixed: the kinds take
        turns, else one kind comes after the other."""
        first = np.unique(self.prompt, return_index=True)[1]
        kinds = self.kind[first]
        turn = np.array([int((kinds[:i] == kind).sum()) for i, kind in enumerate(kinds)])
        order = np.lexsort((kinds, turn)) if mixed else np.arange(len(first))
        waiting = deque(deque(np.flatnonzero(self.prompt == self.prompt[first[i]])) for i in order)
        running: list[deque[int]] = []
        while waiting or running:
            while waiting and len(running) < together:
                running.append(waiting.popleft())
            yield np.array([prompt.popleft() for prompt in running])
            running = [prompt for prompt in running if prompt]


def rounds_of(
    target: str,
    algorithm: str,
    temperature: float,
    limit: int,
    max_new_tokens: int,
    folder: Path | None,
) -> Rounds:
    """Decoded now, or read from the folder if they are there."""
    name = f"{target}-{algorithm}-{temperature:g}.npz"
    if folder is not None and (folder / name).exists():
        return Rounds(**np.load(folder / name))
    subject = SUBJECTS[target]()
    model = FastLlama.load(subject.path, torch.bfloat16)
    draft = load_draft(DRAFTS / f"{PREFIX[target]}-{algorithm}", model)
    began = time.perf_counter()
    rounds = decode(subject, model, draft, temperature, limit, max_new_tokens)
    seconds = time.perf_counter() - began
    print(f"{name}: {len(rounds.length)} rounds, {seconds:.0f} s", file=sys.stderr, flush=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / name, **vars(rounds))
    return rounds


def decode(
    subject: Subject,
    target: FastLlama,
    draft: AnyDraft,
    temperature: float,
    limit: int,
    max_new_tokens: int,
) -> Rounds:
    chooser = Chooser(temperature, torch.Generator().manual_seed(0))
    rows: list[tuple[Any, ...]] = []
    prompts = [
        (kind, ids) for kind, group in enumerate(subject.held_out.values()) for ids in group[:limit]
    ]
    for number, (kind, ids) in enumerate(prompts):

        def watch(
            block: Proposal,
            p: torch.Tensor,
            length: int,
            committed: int,
            kind: int = kind,
            number: int = number,
        ) -> None:
            assert block.logits is not None
            overlap = torch.minimum(p[:-1], block.probs).sum(dim=-1)
            head = block.confidences or [0.0] * len(block.tokens)
            said = candidates(block.logits).numpy()
            rows.append((kind, number, length, committed, said, overlap.numpy(), head))

        speculative_decode(draft, target, ids, max_new_tokens, subject.stop_id, chooser, watch)
    return Rounds(*(np.array(column) for column in zip(*rows, strict=True)))


def candidates(logits: torch.Tensor) -> torch.Tensor:
    """logits [γ, V] -> the first four of COLUMNS [γ, 4]."""
    first, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
    log_q = logits.log_softmax(dim=-1)
    q = log_q.exp()
    certainty, collision = (q * log_q).sum(dim=-1), q.square().sum(dim=-1).log()
    return torch.stack([evidence(logits)[:, 0], first - second, certainty, collision], dim=-1)
