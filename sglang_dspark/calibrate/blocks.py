"""Drafted blocks of recorded rounds, as the fit wants them: confidences and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from sglang_dspark.errors import ConfigError
from sglang_dspark.observe.record_file import (
    Bools,
    Floats,
    Header,
    Ints,
    RecordedRound,
    read_records,
)

Only = Literal["greedy", "sampled"]


@dataclass(frozen=True)
class Blocks:
    """n blocks of at most γ draft tokens.

    logits: [n, γ] float64, NaN where nothing was drafted. reach: [n], tokens that were verified;
    what became of the others is not known. survived: [n], tokens of these that were accepted, all
    before them included. request: [n], equal for blocks of one request.
    """

    logits: Floats
    reach: Ints
    survived: Ints
    request: Ints

    def __len__(self) -> int:
        return len(self.reach)

    @property
    def gamma(self) -> int:
        return int(self.logits.shape[1])

    def where(self, chosen: Bools) -> Blocks:
        """chosen: [n]."""
        return Blocks(
            self.logits[chosen], self.reach[chosen], self.survived[chosen], self.request[chosen]
        )

    def counts(self) -> list[int]:
        """Blocks whose outcome at position k is known, for each k."""
        return [int((self.reach > k).sum()) for k in range(self.gamma)]

    def split(self, held_out: float, seed: int) -> tuple[Blocks, Blocks]:
        """Those to fit on, and those of a share `held_out` of the requests, drawn by chance."""
        requests = np.unique(self.request)
        drawn = np.random.default_rng(seed).permutation(requests)
        chosen = np.isin(self.request, drawn[: round(held_out * len(requests))])
        return self.where(~chosen), self.where(chosen)


def load_blocks(paths: Sequence[Path], only: Only | None = None) -> tuple[Header, Blocks]:
    """All blocks with confidences in records files of one draft. only: requests of this kind.

    Raises ConfigError if the files are of different drafts or hold no such block.
    """
    headers, parts, rounds = [], [], 0
    for number, path in enumerate(paths):
        header, records = read_records(path)
        headers.append(header)
        _check_same_draft(headers[0], paths[0], header, path)
        for done in records:
            rounds += 1
            if (part := _blocks(done, header.gamma, number, only)) is not None:
                parts.append(part)
    names = ", ".join(map(str, paths))
    if not rounds:
        raise ConfigError(f"records {names}: hold no decode round; send the server some prompts")
    if not parts:
        kind = f"{only} " if only else ""
        raise ConfigError(
            f"records {names}: none of the {rounds} rounds has confidences of {kind}requests "
            "(rounds without a draft, or with penalties or grammars, have none)"
        )
    logits, reach, survived, request = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    _, request = np.unique(request, axis=0, return_inverse=True)
    return headers[0], Blocks(logits, reach, survived, request.reshape(-1).astype(np.int64))


def _check_same_draft(first: Header, first_path: Path, other: Header, path: Path) -> None:
    for name in ("algorithm", "gamma", "has_confidence_head"):
        here, there = getattr(first, name), getattr(other, name)
        if here != there:
            raise ConfigError(
                f"records {path}: {name} is {there}, but {here} in {first_path}; calibrate each "
                "draft on records of its own"
            )


def _blocks(
    done: RecordedRound, gamma: int, file: int, only: Only | None
) -> tuple[Floats, Ints, Ints, Ints] | None:
    """logits, reach, survived and [n, 3] request of a round; None if it has no confidences."""
    if done.logits is None or not done.logits.shape[1]:
        return None
    depth = done.logits.shape[1]
    chosen: Bools = np.array(np.isfinite(done.logits).all(axis=1), dtype=np.bool_)
    if only is not None:
        chosen &= done.sampled if only == "sampled" else ~done.sampled
    if not chosen.any():
        return None
    # Where every row was run, what lies behind a scheduled window is known too.
    whole = done.full and done.ceiling is not None
    survived = done.ceiling if whole and done.ceiling is not None else done.accepted
    reach = np.full_like(done.windows, depth) if whole else np.minimum(done.windows - 1, depth)
    logits = np.full((len(chosen), gamma), np.nan)
    logits[:, :depth] = done.logits
    request = np.stack([np.full_like(done.rows, file), done.rows, done.generations], axis=1)
    return logits[chosen], reach[chosen], survived[chosen], request[chosen]
