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
from sglang_dspark.recipe.reliability import Reliability
from sglang_dspark.recipe.subjects import Subject


@dataclass
class Figures:
    """Measured by the stages, summed over resumed runs. seconds: wall time by stage."""

    conversations: int = 0
    answer_tokens: int = 0
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


def readme(
    name: str,
    subject: Subject,
    figures: Figures,
    config: DraftConfig,
    steps: int,
    results: dict[float, dict[str, Acceptance]],
) -> str:
    """README.md of an exported draft: how it was made and what was measured. results: by
    temperature, then by kind of prompt."""
    stages = ("generate", "features", f"train {name}")
    spent = ", ".join(f"{stage} {figures.seconds.get(stage, 0) / 60:.0f} min" for stage in stages)
    tables = "\n\n".join(
        f"Temperature {temperature:g}:\n\n{format_table(result)}"
        for temperature, result in results.items()
    )
    reliability = results[0.0]["all"].reliability()
    confidence = "" if reliability is None else "\n" + confidence_lines(reliability)
    return f"""# {name.upper()} draft for {subject.path.name}

Made by `sglang-dspark train-demo` on {datetime.date.today().isoformat()}. The embedding is the
target's and not in the file.

- Shape: {config.num_hidden_layers} layers, γ = {config.block_size}, Markov rank \
{config.markov_rank}, features of target layers {list(config.target_layer_ids)}.
- Data: {figures.conversations} conversations, {figures.answer_tokens} answer tokens, all written \
by the target itself.
- Training: {steps} steps. Wall time on {os.cpu_count()} CPUs: {spent}.

Held-out prompts, 128 tokens each. Accept length counts the bonus token; @k is the share of verified
tokens at position k that were accepted.

{tables}
{confidence}"""


def confidence_lines(reliability: Reliability) -> str:
    """The confidence head per position, as a Markdown table."""
    lines = ["| position | predicted survival | observed | ECE | AUC |", "|---|---|---|---|---|"]
    for k, row in enumerate(reliability.positions):
        auc = "-" if row.auc is None else f"{row.auc:.2f}"
        lines.append(
            f"| {k + 1} | {row.predicted:.3f} | {row.observed:.3f} | {row.ece:.3f} | {auc} |"
        )
    return "Confidence head, uncalibrated, greedy:\n\n" + "\n".join(lines) + "\n"


def plot_curves(logs: dict[str, Path], path: Path) -> None:
    """Loss over steps of one or more trainings; logs: the JSON lines that `train` wrote, by name.

    The losses of different drafts are different functions: each has its own panel.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(logs), 3), layout="constrained")
    for i, (name, log) in enumerate(logs.items()):
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        axes = figure.add_subplot(1, len(logs), i + 1)
        axes.plot([row["step"] for row in rows], [row["loss"] for row in rows])
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.set_ylabel("loss, mean of 50 steps")
    figure.savefig(path, dpi=110)
