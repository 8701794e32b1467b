"""Which drafter serves which algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dspark.config import Algorithm
from sglang_dspark.drafters.base import Drafter
from sglang_dspark.drafters.dflash import DFlashDrafter
from sglang_dspark.drafters.dspark import DSparkDrafter
from sglang_dspark.drafters.eagle3 import Eagle3Drafter

if TYPE_CHECKING:
    import torch

    from sglang_dspark.config import SpecConfig
    from sglang_dspark.drafters.served import ServedDraft

DRAFTERS: dict[Algorithm, type[Drafter]] = {
    Algorithm.DSPARK: DSparkDrafter,
    Algorithm.DFLASH: DFlashDrafter,
    Algorithm.EAGLE3: Eagle3Drafter,
}


def make_drafter(config: SpecConfig, served: ServedDraft, generator: torch.Generator) -> Drafter:
    """See `Drafter`."""
    return DRAFTERS[config.algorithm](config, served, generator)
