"""What the demo found out: from raw measurements to the table and the JSON file.

Words: a *round* is one draft + verify step of a request. Position k (1..gamma) of its block is
*reached* if every position before it was accepted.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from sglang_dspark.files import replace_file


@dataclass(frozen=True)
class Repetition:
    """One timed pair of requests: the whole answer, and only its first token."""

    output_ids: tuple[int, ...]
    seconds: float
    first_token_seconds: float

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: tokens after the first, over the time that they add."""
        decode_s = self.seconds - self.first_token_seconds
        return (len(self.output_ids) - 1) / decode_s if decode_s > 0 else None


@dataclass(frozen=True)
class Measurement:
    """Everything measured on one server.

    output_ids: tokens of the answer that was streamed.
    histogram:  rounds of that answer by the number of drafts they accepted; empty without
        speculation (SGLang's `spec_correct_drafts_histogram`).
    """

    launch_command: str
    text: str
    output_ids: tuple[int, ...]
    histogram: tuple[int, ...]
    repetitions: tuple[Repetition, ...]

    @property
    def tokens_per_s(self) -> float | None:
        """The median of the repetitions."""
        rates = [r.tokens_per_s for r in self.repetitions if r.tokens_per_s is not None]
        return statistics.median(rates) if rates else None

    @property
    def answers(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of every full answer that this server gave."""
        return (self.output_ids, *(r.output_ids for r in self.repetitions))


@dataclass(frozen=True)
class DemoResult:
    """Both servers side by side."""

    algorithm: str
    mode: str
    gamma: int
    dtype: str
    temperature: float
    max_new_tokens: int
    prompt: str
    device: str
    speculative: Measurement
    baseline: Measurement
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def tokens_equal(self) -> bool | None:
        """Whether every answer of both servers has the same tokens; None if they are random."""
        if self.temperature > 0:
            return None
        return len({*self.speculative.answers, *self.baseline.answers}) == 1

    @property
    def accept_length(self) -> float | None:
        return accept_length(self.speculative.histogram)

    @property
    def accept_rate_by_position(self) -> list[float | None]:
        return accept_rate_by_position(self.speculative.histogram, self.gamma)

    @property
    def speedup(self) -> float | None:
        ours, theirs = self.speculative.tokens_per_s, self.baseline.tokens_per_s
        return ours / theirs if ours is not None and theirs is not None else None

    def to_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "mode": self.mode,
            "gamma": self.gamma,
            "tokens_equal": self.tokens_equal,
            "num_tokens": len(self.speculative.output_ids),
            "accept_length": self.accept_length,
            "accept_rate_by_position": self.accept_rate_by_position,
            "correct_drafts_histogram": list(self.speculative.histogram),
            "tokens_per_s": self.speculative.tokens_per_s,
            "baseline_tokens_per_s": self.baseline.tokens_per_s,
            "speedup": self.speedup,
            "tokens_per_s_of_repetitions": [r.tokens_per_s for r in self.speculative.repetitions],
            "baseline_tokens_per_s_of_repetitions": [
                r.tokens_per_s for r in self.baseline.repetitions
            ],
            "dtype": self.dtype,
            "temperature": self.temperature,
            "max_new_tokens": self.max_new_tokens,
            "prompt": self.prompt,
            "text": self.speculative.text,
            "output_ids": list(self.speculative.output_ids),
            "baseline_output_ids": list(self.baseline.output_ids),
            "launch_command": self.speculative.launch_command,
            "baseline_launch_command": self.baseline.launch_command,
            "device": self.device,
            "versions": self.versions,
        }

    def table(self) -> Table:
        ours, theirs = self.speculative, self.baseline
        table = Table(
            caption="Decode tokens/s leave out the prompt and the first token. Accepted at a "
            "position: of the rounds that accepted every position before it.",
            caption_justify="left",
        )
        table.add_column("")
        table.add_column(f"{self.algorithm} ({self.mode})", justify="right")
        table.add_column("no speculation", justify="right")
        name = f"decode tokens/s, median of {len(ours.repetitions)}"
        table.add_row(name, _number(ours.tokens_per_s, ".1f"), _number(theirs.tokens_per_s, ".1f"))
        table.add_row("speed", _number(self.speedup, ".2f", "x"), "1.00x")
        table.add_row("accept length, tokens a round", _number(self.accept_length, ".2f"), "-")
        rates = " ".join(_number(r and 100 * r, ".0f") for r in self.accept_rate_by_position)
        table.add_row(f"accepted at position 1..{self.gamma}, %", rates, "-")
        table.add_row("tokens", str(len(ours.output_ids)), str(len(theirs.output_ids)))
        table.add_row("same tokens", self._verdict(), "")
        return table

    def _verdict(self) -> str:
        if self.tokens_equal is None:
            return "not compared: sampled"
        if self.tokens_equal:
            return "yes, in every run"
        for other in (*self.baseline.answers, *self.speculative.answers):
            position = first_difference(self.speculative.output_ids, other)
            if position is not None:
                return f"NO, from token {position} on"
        raise AssertionError("unequal answers without a difference")

    def write(self, file: Path) -> None:
        """Write the JSON file so that a reader sees all of it or the file as it was before."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        replace_file(file, text.encode())


def accept_length(histogram: Sequence[int]) -> float | None:
    """Mean tokens that a round commits, bonus included; None without a round."""
    rounds = sum(histogram)
    return 1 + sum(k * n for k, n in enumerate(histogram)) / rounds if rounds else None


def accept_rate_by_position(histogram: Sequence[int], gamma: int) -> list[float | None]:
    """P(position k accepted | all before accepted) for k = 1..gamma; None where never reached.

    histogram: rounds by accepted drafts, as long as its last entry that is not zero asks for.
    """
    reached = [sum(histogram[k:]) for k in range(gamma + 1)]
    return [reached[k] / reached[k - 1] if reached[k - 1] else None for k in range(1, gamma + 1)]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """1-based place of the first token in which two answers differ, None if in none."""
    for i, (a, b) in enumerate(zip(one, other, strict=False), 1):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other)) + 1


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"
