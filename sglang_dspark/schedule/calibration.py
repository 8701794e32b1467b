"""From confidence logits to survival probabilities, calibrated.

A calibration is a temperature and a shift for every position, logit_k / t_k + s_k. Shifts of 0 are
the paper's sequential temperature scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import read_json_object


@dataclass(frozen=True)
class Scaling:
    """temperatures, shifts: one a position."""

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...]

    @classmethod
    def identity(cls, gamma: int) -> Scaling:
        return cls((1.0,) * gamma, (0.0,) * gamma)

    @property
    def shifted(self) -> bool:
        return any(self.shifts)


@dataclass(frozen=True)
class Rescale:
    """A calibration as arrays, of torch on the device or of numpy on the host.

    temperatures, shifts: [γ], the second None if all are 0. evidence_shifts: [γ, F], what is added
    to the evidence of a draft without a head; None likewise.
    """

    temperatures: Any
    shifts: Any
    evidence_shifts: Any

    def head(self, logits: Any) -> Any:
        """A confidence head's logits [R, D]."""
        depth = logits.shape[1]
        scaled = logits / self.temperatures[:depth]
        return scaled if self.shifts is None else scaled + self.shifts[:depth]

    def evidence(self, evidence: Any) -> Any:
        """[R, D, F]; the log-odds in it are a headless draft's confidence."""
        depth = evidence.shape[1]
        scaled = evidence / self.temperatures[:depth, None]
        return scaled if self.evidence_shifts is None else scaled + self.evidence_shifts[:depth]


def survivals(confidence_logits: torch.Tensor) -> torch.Tensor:
    """a_k = Π_{i<=k} sigmoid(logit_i), of calibrated logits.

    confidence_logits float32 [R, γ]. Rows with a NaN or an infinity get 1 everywhere: the full
    window. Returns float32 [R, γ].
    """
    chances = confidence_logits.sigmoid()
    broken = ~torch.isfinite(confidence_logits).all(dim=-1, keepdim=True)
    return torch.where(broken, 1.0, chances).cumprod(dim=-1)


def read_calibration(
    path: Path, gamma: int, made_for: Mapping[str, object] | None = None
) -> Scaling:
    """Of a calibration file: ours or SGLang's, `temperatures` in both, `shifts` in some of ours.

    made_for: fields that must have these values, if the file (one of ours) has them: another
    draft's logits have other temperatures.
    Raises ConfigError unless temperatures are exactly γ finite numbers above 0, and shifts, if
    there are any, γ finite numbers.
    """
    raw = read_json_object(path, f"calibration {path}: no such file")
    for name, served in (made_for or {}).items():
        if name in raw and raw[name] != served:
            raise ConfigError(
                f"calibration {path}: {name} is {raw[name]}, but the served draft's is {served}; "
                "fit it on records of this draft"
            )
    temperatures = _numbers(path, raw, "temperatures", gamma)
    if (least := min(temperatures)) <= 0:
        raise ConfigError(
            f"calibration {path}: temperatures holds {least:g}; must be a finite number above 0"
        )
    if "shifts" not in raw:
        return Scaling(temperatures, (0.0,) * gamma)
    return Scaling(temperatures, _numbers(path, raw, "shifts", gamma))


def _numbers(path: Path, raw: Mapping[str, Any], name: str, gamma: int) -> tuple[float, ...]:
    values = raw.get(name)
    if not isinstance(values, list) or len(values) != gamma:
        found = f"{len(values)} entries" if isinstance(values, list) else repr(values)
        raise ConfigError(
            f"calibration {path}: {name} is {found}; must be {gamma} numbers, one a position"
        )
    for value in values:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value):
            above = " above 0" if name == "temperatures" else ""
            raise ConfigError(
                f"calibration {path}: {name} holds {value!r}; must be a finite number{above}"
            )
    return tuple(float(value) for value in values)
