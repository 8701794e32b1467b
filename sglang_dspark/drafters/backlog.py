"""Rows whose features only a draft will read: kept, and turned into the draft's KV together.

In rounds without a draft nothing reads the draft's KV. On a CPU, writing it for a few rows costs
nearly what it costs for many (the weights are read, a dozen small operations called), so it waits
for the next draft, the next prefill, or until the backlog is full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

MAX_ROUNDS = 12
MAX_ROWS = 256


@dataclass(frozen=True)
class ContextRows:
    """M rows of one verify forward, padding included.

    features: [M, F * H] of the target. positions, slots: [M] int64; slots of the draft's KV pool.
    """

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    def __len__(self) -> int:
        return len(self.positions)


Rows = TypeVar("Rows", bound=ContextRows)


class Backlog(Generic[Rows]):
    """write: takes the rows of several rounds, oldest first.

    A slot may have been handed on to another request while its row was waiting: that request's own
    rows come later, so parts have to be written in order.
    """

    def __init__(self, write: Callable[[list[Rows]], None]) -> None:
        self._write = write
        self._waiting: list[Rows] = []

    def add(self, rows: Rows, *, wait: bool) -> None:
        self._waiting.append(rows)
        full = len(self._waiting) == MAX_ROUNDS or sum(map(len, self._waiting)) >= MAX_ROWS
        if full or not wait:
            self.flush()

    def flush(self) -> None:
        """Before anything else writes or reads the draft's KV."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._write(waiting)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
