"""Cost tables as JSON files: ours, and both forms that SGLang 0.5.23's profiler writes.

Ours:

    {"format": "sglang-dspark cost table", "version": 1,
     "fingerprint": {the fields of Fingerprint},
     "model": {the fields of CostModel}, "plain_model": the same of rounds without a draft,
     or null, "median_error": 0.03, "cells": 120,
     "report": {what the profiler found out beside it: see `profiling.effect`, `.validation`}}

SGLang's: SpsCostTable (steps per second over batch tokens; a step function) and
SpsAdditiveCostTable (bias + α(R) + θ(M)). Neither has a context term nor a fingerprint.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from cost_tables.model import SLOPES, CostModel, Floats, RoundCost

FORMAT, VERSION = "sglang-dspark cost table", 1
# The end of what `host.platform.describe_cpu` says.
_CPU_KIND = re.compile(r"\(family \d+, model \d+\), \d+ cores$")


class TableError(ValueError):
    """A table that cannot be used; the message names file, field, value and what is allowed."""


@dataclass(frozen=True)
class Fingerprint:
    """What a table was measured on. A table serves where all of it is equal.

    device: name of the GPU or CPU. model: hidden size, layers and vocabulary of the target and the
    draft's layers, as text. dtype, tp, gamma, backend (of attention): as served."""

    device: str
    model: str
    dtype: str
    tp: int
    gamma: int
    backend: str

    def differences(self, other: Fingerprint) -> list[str]:
        """`field: this against that` for every field that differs."""
        return [
            f"{f.name}: {getattr(self, f.name)} against {getattr(other, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]

    def serves(self, here: Fingerprint) -> bool:
        """Whether a table made on `self` says something of `here`: it is the same, or near it.

        Near are another device of the same family, and a table for more draft tokens than `here`
        has: T knows γ only by the sizes up to which it was measured. All else (target, draft,
        dtype, tp, backend, a CPU's cores) gives T another shape, which correcting it by tier while
        serving cannot mend.
        """
        alike = replace(self, device=here.device, gamma=here.gamma) == here
        return alike and self.gamma >= here.gamma and family(self.device) == family(here.device)


def family(device: str) -> str:
    """What the names of devices have in common whose step times are alike.

    CPUs: family and model number, which tell the microarchitecture whatever it is sold as, and the
    cores. GPUs: all up to the chip's name, so not form factor nor memory: "NVIDIA A100-SXM4-80GB"
    and "NVIDIA A100 80GB PCIe" are of one family. A slice of a GPU (MIG) is like nothing else.
    """
    words = device.split()
    if words[-1:] == ["cores"]:
        found = _CPU_KIND.search(device)
        return found.group() if found else device
    numbered = [i for i, word in enumerate(words) if any(map(str.isdigit, word))]
    if not numbered or "MIG" in words:
        return device
    chip = numbered[0]
    return " ".join([*words[:chip], words[chip].split("-")[0]])


@dataclass(frozen=True)
class Table:
    """A loaded table. fingerprint and median_error are None where the file does not say.

    report: what the profiler found out when it made the table; empty where nothing is told."""

    cost: RoundCost
    fingerprint: Fingerprint | None
    median_error: float | None
    source: str
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepFunction:
    """SGLang's SpsCostTable: the rate of the largest probe that is not above the token count."""

    tokens: tuple[int, ...]
    steps_per_second: tuple[float, ...]

    def seconds(
        self, requests: int, tokens: Floats, context: float, drafted: Floats | float = 0.0
    ) -> Floats:
        place = np.searchsorted(self.tokens, tokens, side="right") - 1
        rates = np.asarray(self.steps_per_second)[place.clip(min=0)]
        seconds: Floats = 1 / rates
        return seconds


def save_table(
    path: Path,
    model: CostModel,
    fingerprint: Fingerprint,
    median_error: float,
    cells: int,
    plain: CostModel | None = None,
    report: dict[str, Any] | None = None,
) -> None:
    """Atomic. median_error: relative, on held-out cells. cells: how many were measured.
    plain: of rounds without a draft. report: see `Table`."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": asdict(fingerprint),
        "model": asdict(model),
        "plain_model": None if plain is None else asdict(plain),
        "median_error": median_error,
        "cells": cells,
        "report": report or {},
    }
    temp = path.with_name(path.name + ".tmp")
    temp.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temp, path)


def load_table(path: Path) -> Table:
    """Read any of the three forms. Raises TableError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TableError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: is not readable JSON ({error})") from error
    if not isinstance(raw, dict):
        raise TableError(f"{path}: must hold a JSON object, but holds a {type(raw).__name__}")
    try:
        if "bias_seconds" in raw:
            return Table(RoundCost(_additive(raw)), None, None, f"{path} (SGLang, additive)")
        if "sample_batch_tokens" in raw:
            return Table(
                RoundCost(_step_function(raw)), None, None, f"{path} (SGLang, steps per second)"
            )
        return _ours(raw, path)
    except KeyError as error:
        raise TableError(f"{path}: field {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise TableError(f"{path}: {error}") from error


def _ours(raw: dict[str, Any], path: Path) -> Table:
    if raw.get("format") != FORMAT:
        raise ValueError(f"format is {raw.get('format')!r}; must be {FORMAT!r}, or one of SGLang's")
    if raw["version"] != VERSION:
        raise ValueError(f"version is {raw['version']}; this release reads version {VERSION}")
    error = _number(raw["median_error"], "median_error")
    plain = raw.get("plain_model")
    cost = RoundCost(_model(raw["model"]), None if plain is None else _model(plain))
    report = raw.get("report", {})
    if not isinstance(report, dict):
        raise ValueError(f"report is {report!r}; must be an object")
    return Table(cost, Fingerprint(**raw["fingerprint"]), error, str(path), report)


def _model(values: dict[str, Any]) -> CostModel:
    parts: dict[str, Any] = {
        name: tuple(_numbers(values[name], name))
        for part in ("request", "token", "draft")
        for name in (f"{part}_knots", f"{part}_seconds")
    }
    parts |= {name: _number(values.get(name, 0.0), name) for name in SLOPES}
    return CostModel(bias=_number(values["bias"], "bias"), **parts)


def _additive(raw: dict[str, Any]) -> CostModel:
    """SGLang's values are a fit without constraints: what falls is raised to what was before."""
    alpha, theta = (_numbers(raw[name], name) for name in ("alpha_seconds", "theta_seconds"))
    lowest = min(alpha) + min(theta)
    bias = _number(raw["bias_seconds"], "bias_seconds") + lowest
    if bias < 0:
        raise ValueError(f"bias_seconds with the lowest of both parts is {bias}; must be above 0")
    return CostModel(
        bias=bias,
        request_knots=tuple(_numbers(raw["bs_probes"], "bs_probes")),
        request_seconds=tuple(np.maximum.accumulate(np.array(alpha) - min(alpha)).tolist()),
        token_knots=tuple(_numbers(raw["m_probes"], "m_probes")),
        token_seconds=tuple(np.maximum.accumulate(np.array(theta) - min(theta)).tolist()),
    )


def _step_function(raw: dict[str, Any]) -> StepFunction:
    tokens = _numbers(raw["sample_batch_tokens"], "sample_batch_tokens")
    rates = _numbers(raw["sample_steps_per_sec"], "sample_steps_per_sec")
    if len(tokens) != len(rates) or not tokens:
        raise ValueError(
            f"sample_batch_tokens has {len(tokens)} entries and sample_steps_per_sec "
            f"{len(rates)}; must be as many, and at least one"
        )
    if tokens != sorted(set(tokens)):
        raise ValueError(f"sample_batch_tokens is {tokens}; must ascend")
    if min(rates) <= 0:
        raise ValueError(f"sample_steps_per_sec is {rates}; must be above 0")
    return StepFunction(tuple(map(int, tokens)), tuple(rates))


def _numbers(value: Any, name: str) -> list[float]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r}; must be a list of numbers")
    return [_number(each, name) for each in value]


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value):
        raise ValueError(f"{name} holds {value!r}; must be a finite number")
    return float(value)
