"""Made-up acceptance: which draft tokens survive is drawn, not verified."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SimulatedAcceptance:
    """survival: gamma probabilities, of token k given that all before it survived."""

    def __init__(
        self, survival: Sequence[float], device: torch.device, generator: torch.Generator
    ) -> None:
        self._survival = torch.tensor(survival, device=device)
        self._generator = generator

    def toss(self, coins: torch.Tensor, drafted: int) -> None:
        """Fill coins [R, gamma] float32 for blocks of which `drafted` tokens were proposed."""
        coins.uniform_(generator=self._generator)
        coins[:, drafted:] = 1.0

    def survives(self, coins: torch.Tensor) -> torch.Tensor:
        """[R, gamma] bool"""
        return coins < self._survival
