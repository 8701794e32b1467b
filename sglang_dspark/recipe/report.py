"""What a run measured, kept in the work directory, and the README of the exported draft."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sglang_dspark.recipe.draft import DraftConfig
from sglang_dspark.recipe.evaluate import Acceptance, format_table


@dataclass
class Figures:
    """Measured by the stages, summed over resumed runs. seconds: wall time by stage."""

    target: str = ""
    conversations: int = 0
    answer_tokens: int = 0
    steps: int = 0
    blocks: int = 0  # anchors trained on, with repetitions
    final_loss: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Figures:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def save(self, path: Path) -> None:
        temp = path.with_suffix(".tmp")
        temp.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(temp, path)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start


def readme(figures: Figures, config: DraftConfig, results: dict[str, Acceptance]) -> str:
    """README.md of an exported draft: how it was made and what was measured."""
    minutes = {stage: seconds / 60 for stage, seconds in figures.seconds.items()}
    spent = ", ".join(f"{stage} {value:.0f} min" for stage, value in minutes.items())
    overall = results["all"]
    rates = ", ".join(f"{rate:.2f}" for rate in overall.accept_rates())
    confidences = ", ".join(f"{value:.2f}" for value in overall.mean_confidences())
    return f"""# DSPARK draft for {figures.target}

Made by `python -m sglang_dspark.recipe` on {datetime.date.today().isoformat()}.
Format: SGLang's `Qwen3DSparkModel`; embedding and lm_head are the target's and not in the file.

- Shape: {config.num_hidden_layers} layers, γ = {config.block_size}, Markov rank \
{config.markov_rank}, context features from target layers {list(config.target_layer_ids)}.
- Data: {figures.conversations} conversations, {figures.answer_tokens} answer tokens, all written \
by the target itself.
- Training: {figures.steps} steps, {figures.blocks} blocks, final loss {figures.final_loss:.3f}.
- Wall time: {spent}.

Greedy, {overall.rounds} rounds on the prompts of `sglang_dspark/recipe/evaluate.py`. Accept length
counts the bonus token; @k is the share of verified tokens at position k that were accepted.

{format_table(results)}

Calibration, positions 1 to {config.block_size}: accepted {rates}; mean confidence {confidences}.
"""
