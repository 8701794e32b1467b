"""Stage 3: train the draft on cached features.

Batch number n is a function of (seed, n) alone, so a checkpoint needs no random state: resuming at
step n continues exactly as an uninterrupted run would.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from sglang_dspark.recipe.batches import choose_anchors, make_batch
from sglang_dspark.recipe.draft import DraftModel
from sglang_dspark.recipe.eagle3 import Eagle3Model
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.loss import LossTerms
from sglang_dspark.recipe.objectives import Objective

LOG_SECONDS = 30.0


@dataclass(frozen=True)
class TrainConfig:
    """total_steps: optimiser steps. sequences_per_step × anchors_per_sequence: blocks a step.
    learning_rate: peak; linear warm-up over warmup_steps, constant, then linear to zero over the
    last decay_fraction. autocast: bfloat16 matrix products with float32 weights."""

    total_steps: int
    sequences_per_step: int = 4
    anchors_per_sequence: int = 24
    learning_rate: float = 6e-4
    warmup_steps: int = 50
    decay_fraction: float = 0.4
    max_grad_norm: float = 1.0
    checkpoint_seconds: float = 180.0
    autocast: bool = True
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """The learning rate of `step`, counted from 0."""
        decay_steps = max(1, round(self.total_steps * self.decay_fraction))
        up = (step + 1) / max(1, self.warmup_steps)
        down = (self.total_steps - step) / decay_steps
        return self.learning_rate * min(1.0, up, down)


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


def train(
    objective: Objective,
    examples: list[Example],
    config: TrainConfig,
    checkpoint: Path | None = None,
    resume: bool = False,
    stop_after: int | None = None,
    log: Path | None = None,
) -> list[float]:
    """Train `objective.model` in place; returns the loss of every step that this call ran.

    checkpoint: written every checkpoint_seconds and at the end; with `resume`, read first.
    stop_after: leave (with a checkpoint) when that many steps are done in all.
    log: a JSON line is appended every LOG_SECONDS; the curves of a run.
    """
    draft = objective.model
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    done = 0
    if resume and checkpoint is not None and checkpoint.exists():
        done = load_checkpoint(checkpoint, draft, optimizer)
    losses: list[float] = []
    last_saved = last_logged = time.monotonic()
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    draft.train()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("train", total=config.total_steps, completed=done, note="")
        since = done
        for step in range(done, min(config.total_steps, stop_after or config.total_steps)):
            terms = _one_step(objective, examples, optimizer, config, step)
            losses.append(float(terms.total.detach()))
            done = step + 1
            now = time.monotonic()
            rate = (done - since) / max(now - last_logged, 1e-9)
            if now - last_logged > LOG_SECONDS:
                entry = _log_entry(config, step, losses, terms, rate)
                progress.console.print(entry, style="dim")
                if log is not None:
                    with log.open("a") as file:
                        file.write(json.dumps(entry) + "\n")
                since, last_logged = done, now
            if checkpoint is not None and now - last_saved > config.checkpoint_seconds:
                save_checkpoint(checkpoint, draft, optimizer, config, done)
                last_saved = now
            note = f"loss {losses[-1]:.3f}, {rate:.2f} steps/s"
            progress.update(task, completed=done, note=note)
    if checkpoint is not None:
        save_checkpoint(checkpoint, draft, optimizer, config, done)
    draft.eval()
    return losses


def _one_step(
    objective: Objective,
    examples: list[Example],
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    step: int,
) -> LossTerms:
    draft = objective.model
    device = next(draft.parameters()).device
    chosen, anchors = examples_at(examples, config, step)
    shape = draft.config
    batch = make_batch(chosen, anchors, shape.block_size, shape.mask_token_id).to(device)
    for group in optimizer.param_groups:
        group["lr"] = config.rate_at(step)
    generator = _generator(config.seed, 3, step)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.autocast):
        terms = objective.loss(batch, step / config.total_steps, generator)
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


def save_checkpoint(
    path: Path,
    draft: DraftModel | Eagle3Model,
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


def load_checkpoint(
    path: Path, draft: DraftModel | Eagle3Model, optimizer: torch.optim.Optimizer
) -> int:
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


def _log_entry(
    config: TrainConfig, step: int, losses: list[float], terms: LossTerms, rate: float
) -> dict[str, float]:
    """loss: mean of the last 50 steps; the parts are those of this step."""
    recent = losses[-50:]
    return {
        "step": step + 1,
        "loss": round(sum(recent) / len(recent), 4),
        **{name: round(float(value), 4) for name, value in terms.parts.items()},
        "steps_per_second": round(rate, 3),
        "minutes_left": round((config.total_steps - step - 1) / max(rate, 1e-9) / 60, 1),
    }


def _generator(seed: int, stream: int, number: int) -> torch.Generator:
    """An independent CPU generator for (seed, stream, number)."""
    mixed = (seed * 4 + stream) * 1_000_003 + number
    return torch.Generator().manual_seed(mixed)
