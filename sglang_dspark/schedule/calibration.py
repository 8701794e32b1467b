"""From confidence logits to survival probabilities, calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import read_json_object


def survivals(
    confidence_logits: torch.Tensor, temperatures: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """a_k = Π_{i<=k} sigmoid(logit_i / t_i).

    confidence_logits float32 [R, γ], temperatures float32 [γ] (STS; ones change nothing). Rows with
    a NaN or an infinity get 1 everywhere: the full window. Returns float32 [R, γ].
    """
    chances = (confidence_logits / temperatures).sigmoid()
    broken = ~torch.isfinite(confidence_logits).all(dim=-1, keepdim=True)
    return torch.where(broken, 1.0, chances).cumprod(dim=-1)


def read_temperatures(
    path: Path, gamma: int, made_for: Mapping[str, object] | None = None
) -> list[float]:
    """Per-position temperatures from a calibration file: ours or SGLang's, `temperatures` in both.

    made_for: fields that must have these values, if the file (one of ours) has them: another
    draft's logits have other temperatures.
    Raises ConfigError unless the file holds exactly γ finite numbers above 0.
    """
    raw = read_json_object(path, f"calibration {path}: no such file")
    for name, served in (made_for or {}).items():
        if name in raw and raw[name] != served:
            raise ConfigError(
                f"calibration {path}: {name} is {raw[name]}, but the served draft's is {served}; "
                "fit it on records of this draft"
            )
    values = raw.get("temperatures")
    if not isinstance(values, list) or len(values) != gamma:
        found = f"{len(values)} entries" if isinstance(values, list) else repr(values)
        raise ConfigError(
            f"calibration {path}: temperatures is {found}; must be {gamma} numbers, one a position"
        )
    for value in values:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not 0 < value < float("inf"):
            raise ConfigError(
                f"calibration {path}: temperatures holds {value!r}; must be a finite number above 0"
            )
    return [float(value) for value in values]
