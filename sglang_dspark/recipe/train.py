"""Stage 3: train the draft on cached features.

Batch number n is a function of (seed, n) alone, so a checkpoint needs no random state: resuming at
step n continues exactly as an uninterrupted run would.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from sglang_dspark.recipe.batches import Batch, choose_anchors, make_batch
from sglang_dspark.recipe.draft import DraftConfig, DraftModel
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.loss import (
    LossTerms,
    LossWeights,
    Vocabulary,
    choose_vocabulary,
    dspark_loss,
    position_weights,
)

LOG_SECONDS = 30.0


@dataclass(frozen=True)
class TrainConfig:
    """total_steps: optimiser steps. sequences_per_step × anchors_per_sequence: blocks a step.
    learning_rate: peak; linear warm-up over warmup_steps, constant, then linear to zero over the
    last decay_fraction. loss: the paper's, over the last final_fraction; early_loss before that: a
    draft that knows little learns from soft cross-entropy, while the gradient of |p - q| vanishes
    where q is near zero. frequent_ids, likely_per_row, sampled_ids: see loss.py. autocast: bfloat16
    matrix products with float32 weights."""

    total_steps: int
    sequences_per_step: int = 4
    anchors_per_sequence: int = 16
    learning_rate: float = 6e-4
    warmup_steps: int = 50
    decay_fraction: float = 0.4
    final_fraction: float = 0.2
    max_grad_norm: float = 1.0
    frequent_ids: int = 3000
    likely_per_row: int = 8
    sampled_ids: int = 1024
    checkpoint_seconds: float = 180.0
    autocast: bool = True
    seed: int = 0
    loss: LossWeights = field(default_factory=LossWeights)
    early_loss: LossWeights = field(
        default_factory=lambda: LossWeights(1.0, cross_entropy=0.0, confidence=0.3)
    )

    def rate_at(self, step: int) -> float:
        """The learning rate of `step`, counted from 0."""
        decay_steps = max(1, round(self.total_steps * self.decay_fraction))
        up = (step + 1) / max(1, self.warmup_steps)
        down = (self.total_steps - step) / decay_steps
        return self.learning_rate * min(1.0, up, down)

    def loss_at(self, step: int) -> LossWeights:
        final = step >= self.total_steps * (1 - self.final_fraction)
        return self.loss if final else self.early_loss


@dataclass(frozen=True)
class Shared:
    """What the draft borrows from the target, frozen, on the training device."""

    embed: Tensor  # [V, H]
    head: Tensor  # [V, H]


def examples_at(
    examples: list[Example], config: TrainConfig, step: int
) -> tuple[list[Example], list[Tensor]]:
    """The sequences of batch `step` and their anchors. Every epoch is a new permutation."""
    chosen = []
    for draw in range(step * config.sequences_per_step, (step + 1) * config.sequences_per_step):
        epoch, place = divmod(draw, len(examples))
        order = _generator(config.seed, 1, epoch)
        chosen.append(examples[int(torch.randperm(len(examples), generator=order)[place])])
    generator = _generator(config.seed, 2, step)
    anchors = [choose_anchors(e, config.anchors_per_sequence, generator) for e in chosen]
    return chosen, anchors


def compute_loss(
    draft: DraftModel,
    shared: Shared,
    batch: Batch,
    vocabulary: Vocabulary,
    weights: LossWeights,
    autocast: bool,
) -> LossTerms:
    """One forward of the draft over `batch` and its loss."""
    gamma = draft.config.block_size
    valid = batch.valid
    with torch.autocast(batch.block_ids.device.type, dtype=torch.bfloat16, enabled=autocast):
        context = draft.project_context(batch.features.float())
        embeds = F.embedding(batch.block_ids, shared.embed).float()
        hidden = draft(embeds, batch.positions, context, batch.mask).flatten(0, 1)
        previous = batch.previous.flatten()
        base = F.linear(hidden, shared.head[vocabulary.ids].to(hidden.dtype))
        bias = draft.markov_head.bias(previous, vocabulary.ids)
        confidence = draft.confidence_head(hidden, draft.markov_head.markov_w1(previous))
    rows = torch.arange(gamma, device=valid.device).repeat(valid.numel() // gamma)
    return dspark_loss(
        base.float() + bias.float(),
        confidence,
        batch.labels.flatten(),
        batch.topk_ids.flatten(0, 1),
        batch.topk_probs.flatten(0, 1),
        # Weight 0 rather than left out: the same shapes every step.
        position_weights(rows, gamma) * valid.flatten(),
        vocabulary,
        weights,
    )


def train(
    draft: DraftModel,
    shared: Shared,
    examples: list[Example],
    config: TrainConfig,
    checkpoint: Path | None = None,
    resume: bool = False,
    stop_after: int | None = None,
) -> list[float]:
    """Train `draft` in place; returns the loss of every step that this call ran.

    checkpoint: written every checkpoint_seconds and at the end; with `resume`, read first.
    stop_after: leave (with a checkpoint) when that many steps are done in all.
    """
    device = shared.head.device
    optimizer = torch.optim.AdamW(
        draft.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    done = 0
    if resume and checkpoint is not None and checkpoint.exists():
        done = load_checkpoint(checkpoint, draft, optimizer)
    frequent = frequent_ids(examples, config.frequent_ids, draft.config.vocab_size).to(device)
    losses: list[float] = []
    last_saved = last_logged = time.monotonic()
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    draft.train()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("train", total=config.total_steps, completed=done, note="")
        since = done
        for step in range(done, min(config.total_steps, stop_after or config.total_steps)):
            terms = _one_step(draft, shared, examples, frequent, optimizer, config, step)
            losses.append(float(terms.total.detach()))
            now = time.monotonic()
            if now - last_logged > LOG_SECONDS:
                rate = (step + 1 - since) / (now - last_logged)
                progress.console.print(_log_line(config, step, losses, terms, rate), style="dim")
                since, last_logged = step + 1, now
            if checkpoint is not None and now - last_saved > config.checkpoint_seconds:
                save_checkpoint(checkpoint, draft, optimizer, config, step + 1)
                last_saved = now
            done = step + 1
            progress.update(task, completed=done, note=f"loss {losses[-1]:.3f}")
    if checkpoint is not None:
        save_checkpoint(checkpoint, draft, optimizer, config, done)
    draft.eval()
    return losses


def _one_step(
    draft: DraftModel,
    shared: Shared,
    examples: list[Example],
    frequent: Tensor,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    step: int,
) -> LossTerms:
    device = shared.head.device
    chosen, anchors = examples_at(examples, config, step)
    batch = make_batch(chosen, anchors, draft.config.block_size, draft.mask_id).to(device)
    likely = batch.topk_ids[batch.valid][:, : config.likely_per_row]
    wanted = torch.cat([batch.labels[batch.valid], likely.flatten()])
    vocabulary = choose_vocabulary(
        draft.config.vocab_size,
        frequent,
        wanted,
        config.sampled_ids,
        _generator(config.seed, 3, step),
    )
    for group in optimizer.param_groups:
        group["lr"] = config.rate_at(step)
    terms = compute_loss(draft, shared, batch, vocabulary, config.loss_at(step), config.autocast)
    optimizer.zero_grad(set_to_none=True)
    terms.total.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), config.max_grad_norm)
    if not math.isfinite(float(norm)):
        raise FloatingPointError(
            f"train: the gradient norm of step {step} is {float(norm)}; lower learning_rate "
            f"(now {config.learning_rate}) or set autocast=False"
        )
    optimizer.step()
    return terms


def frequent_ids(examples: Iterable[Example], count: int, vocab_size: int) -> Tensor:
    """The `count` most frequent answer tokens, int64 [count]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        counts += example.ids[example.answer_start :].bincount(minlength=vocab_size)
    return counts.topk(min(count, vocab_size)).indices


def save_checkpoint(
    path: Path,
    draft: DraftModel,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    step: int,
) -> None:
    """Atomic: an interruption leaves the checkpoint before it."""
    temp = path.with_suffix(".tmp")
    state: dict[str, Any] = {
        "step": step,
        "draft_config": draft.config.as_dict(),
        "train_config": asdict(config),
        "draft": draft.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, temp)
    os.replace(temp, path)


def load_checkpoint(path: Path, draft: DraftModel, optimizer: torch.optim.Optimizer) -> int:
    """Restore both and return the number of steps done."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    found, expected = state["draft_config"], draft.config.as_dict()
    different = [name for name in expected if found.get(name) != expected[name]]
    if different:
        name = different[0]
        raise ValueError(
            f"{path}: {name} is {found.get(name)}, this run has {expected[name]}; "
            "resume with the same settings or use another --work-dir"
        )
    draft.load_state_dict(state["draft"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def draft_from_checkpoint(path: Path) -> DraftModel:
    """The draft of a checkpoint, without its optimiser."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    draft = DraftModel(DraftConfig.from_dict(state["draft_config"]))
    draft.load_state_dict(state["draft"])
    return draft.eval()


def _log_line(
    config: TrainConfig, step: int, losses: list[float], terms: LossTerms, steps_per_second: float
) -> str:
    recent = losses[-50:]
    blocks = config.sequences_per_step * config.anchors_per_sequence
    left = (config.total_steps - step - 1) / max(steps_per_second, 1e-9) / 60
    return (
        f"train: step {step + 1}/{config.total_steps} loss {sum(recent) / len(recent):.4f} "
        f"ce {float(terms.cross_entropy):.3f} L1 {float(terms.distance):.3f} "
        f"bce {float(terms.confidence):.3f} {steps_per_second:.2f} steps/s "
        f"(at most {steps_per_second * blocks:.0f} anchors/s) {left:.1f} min left"
    )


def _generator(seed: int, stream: int, number: int) -> torch.Generator:
    """An independent CPU generator for (seed, stream, number)."""
    mixed = (seed * 4 + stream) * 1_000_003 + number
    return torch.Generator().manual_seed(mixed)
