"""Ranks of a tensor-parallel group do the same: the first one decides, the others are told.

Each rank's confidences come out of its own kernels, and a difference in the last bit can change a
budget, a tier or a window's end. Ranks that disagree there wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from sglang_dspark.schedule.scheduler import Decision


class Agreement(Protocol):
    """How a rank comes to the group's decision. rank: this one's place in the group."""

    rank: int

    def decision(self, decide: Callable[[], Decision]) -> Decision:
        """What the group decides; `decide` is called on the rank that does."""

    def tensor(self, own: torch.Tensor) -> torch.Tensor:
        """The deciding rank's tensor, of the shape and type of `own`, on its device."""


class Alone:
    """One rank."""

    rank = 0

    def decision(self, decide: Callable[[], Decision]) -> Decision:
        return decide()

    def tensor(self, own: torch.Tensor) -> torch.Tensor:
        return own


class FirstRankDecides:
    """group: SGLang's GroupCoordinator of the tensor-parallel ranks.

    The decision goes over the group's CPU side (the host needs it before it can launch anything),
    tensors over its device side, queued like any other collective.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = int(group.rank_in_group)

    def decision(self, decide: Callable[[], Decision]) -> Decision:
        message = torch.zeros(5, dtype=torch.float64)
        if self.rank == 0:
            message = encode(decide())
        self._broadcast(message, self._group.cpu_group)
        return decode(message)

    def tensor(self, own: torch.Tensor) -> torch.Tensor:
        shared = own.contiguous()
        self._broadcast(shared, self._group.device_group)
        return shared

    def _broadcast(self, tensor: torch.Tensor, group: Any) -> None:
        torch.distributed.broadcast(tensor, src=self._group.ranks[0], group=group)


def encode(decision: Decision) -> torch.Tensor:
    """[5] float64, exact: counts are far below 2^53."""
    tier = -1 if decision.tier is None else decision.tier
    values = [decision.depth, decision.budget, tier, decision.expected_tokens, decision.seconds]
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def decode(message: torch.Tensor) -> Decision:
    depth, budget, tier, expected_tokens, seconds = message.tolist()
    known = int(tier) if tier >= 0 else None
    return Decision(int(depth), int(budget), known, expected_tokens, seconds)
