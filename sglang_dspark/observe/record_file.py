"""Rounds as a server wrote them down: the file's form, and its reader.

JSON lines. The first one says what was served:

    {"format": "sglang-dspark records", "version": 1,
     "config": {"algorithm", "mode", "gamma", "has_confidence_head"}, "schedule": {topic: text}}

whose schedule leaves out what the next round changes (how the cost table is corrected).
Each of the others is a decode round that is over, with the fields of `RecordedRound`. `null`
stands for what is not known, and inside of `logits` for what is not finite. No torch in here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from sglang_dspark.errors import ConfigError

FORMAT, VERSION = "sglang-dspark records", 1

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    """What was served. schedule: what the server said of its windows, by topic."""

    algorithm: str
    mode: str
    gamma: int
    has_confidence_head: bool
    schedule: dict[str, str]


@dataclass(frozen=True)
class RecordedRound:
    """A decode round of R requests.

    rows, generations: [R], together they tell requests apart. depth: D, draft tokens that were
    planned for each. budget: K, planned. tier: index into the grid, None without one.
    tokens: M of the verify forward, padding included. full: whether every row of every window was
    run. windows: [R], anchor included. accepted: [R] drafts. ceiling: [R], drafts that a full
    window would have taken; None where it was not run. predicted_s: step time by the table, 0
    without a prediction. measured_s: round to round, None if something came in between.
    logits: [R, drafted tokens], confidences as the draft has them, before any fit or temperature:
    the head's logits, or log-odds of the draft's greatest probability; NaN where not finite. None
    where there are none, and for requests with penalties or grammars. In cap-accept, which drafts
    all of gamma whatever was planned, it is wider than D. sampled: [R], not greedy. broken: [R],
    confidences that are not finite.
    """

    rows: Ints
    generations: Ints
    depth: int
    budget: int
    tier: int | None
    tokens: int
    full: bool
    windows: Ints
    accepted: Ints
    ceiling: Ints | None
    predicted_s: float
    measured_s: float | None
    logits: Floats | None
    sampled: Bools
    broken: Bools


def read_records(path: Path) -> tuple[Header, Iterator[RecordedRound]]:
    """The header, checked at once, and the rounds, read as they are asked for.

    A last line that breaks off, as a server leaves it that was killed while it wrote, is skipped
    with a warning. Anything else that is not as described is a ConfigError with its line number.
    """
    try:
        with path.open("rb") as file:
            first = file.readline()
    except FileNotFoundError:
        raise ConfigError(f"records {path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"records {path}: cannot be read ({error.strerror})") from error
    header = _header(first, path)
    return header, _rounds(path, header.gamma)


def _header(line: bytes, path: Path) -> Header:
    try:
        raw = orjson.loads(line)
    except orjson.JSONDecodeError:
        raw = None
    found = raw.get("format") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or found != FORMAT:
        raise ConfigError(
            f"{path}: is not a records file: line 1 must say format {FORMAT!r}"
            + (f", but says {found!r}" if found is not None else "")
        )
    if raw.get("version") != VERSION:
        raise ConfigError(
            f"records {path}: version is {raw.get('version')!r}; this release reads {VERSION}"
        )
    try:
        config = _of(dict, raw, "config")
        return Header(
            algorithm=_of(str, config, "algorithm"),
            mode=_of(str, config, "mode"),
            gamma=_count(config, "gamma", least=1),
            has_confidence_head=_of(bool, config, "has_confidence_head"),
            schedule=_of(dict, raw, "schedule"),
        )
    except KeyError as error:
        raise ConfigError(f"records {path}: line 1: {error.args[0]} is missing") from None
    except ValueError as error:
        raise ConfigError(f"records {path}: line 1: {error}") from None


def _rounds(path: Path, gamma: int) -> Iterator[RecordedRound]:
    with path.open("rb") as file:
        file.readline()
        for number, line in enumerate(file, 2):
            try:
                raw = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if line.endswith(b"\n"):
                    raise ConfigError(f"records {path}: line {number}: no JSON ({error})") from None
                logger.warning("records %s: line %d, the last, breaks off: skipped", path, number)
                return
            try:
                done = _round(raw, gamma)
            except KeyError as error:
                problem = f"{error.args[0]} is missing"
                raise ConfigError(f"records {path}: line {number}: {problem}") from None
            except ValueError as error:
                raise ConfigError(f"records {path}: line {number}: {error}") from None
            yield done


def _round(raw: Any, gamma: int) -> RecordedRound:
    if not isinstance(raw, dict):
        raise ValueError(f"holds a {type(raw).__name__}; must be an object")
    windows = _ints(raw, "windows", None, least=1, most=gamma + 1)
    requests = len(windows)
    measured, ceiling, tier = raw["measured_s"], raw["ceiling"], raw["tier"]
    return RecordedRound(
        rows=_ints(raw, "rows", requests),
        generations=_ints(raw, "generations", requests),
        depth=_count(raw, "depth", most=gamma),
        budget=_count(raw, "budget"),
        tier=None if tier is None else _count(raw, "tier"),
        tokens=_count(raw, "tokens"),
        full=_of(bool, raw, "full"),
        windows=windows,
        accepted=_ints(raw, "accepted", requests, most=gamma),
        ceiling=None if ceiling is None else _ints(raw, "ceiling", requests, most=gamma),
        predicted_s=_seconds(raw, "predicted_s"),
        measured_s=None if measured is None else _seconds(raw, "measured_s"),
        logits=_logits(raw["logits"], requests, gamma),
        sampled=_bools(raw, "sampled", requests),
        broken=_bools(raw, "broken", requests),
    )


def _of(kind: type, raw: Any, name: str) -> Any:
    value = raw[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}; must be a {kind.__name__}")
    return value


def _count(raw: Any, name: str, least: int = 0, most: int | None = None) -> int:
    value = raw[name]
    good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not good or (most is not None and value > most):
        upto = "on" if most is None else f"to {most}"
        raise ValueError(f"{name} is {value!r}; must be a whole number from {least} {upto}")
    return int(value)


def _seconds(raw: Any, name: str) -> float:
    value = raw[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{name} is {value!r}; must be seconds, from 0 on")
    return float(value)


def _ints(raw: Any, name: str, length: int | None, least: int = 0, most: int | None = None) -> Ints:
    values = _array(raw[name], name, "i", (length,))
    if len(values) and (values.min() < least or (most is not None and values.max() > most)):
        upto = "on" if most is None else f"to {most}"
        raise ValueError(f"{name} is {raw[name]}; must be whole numbers from {least} {upto}")
    return values.astype(np.int64)


def _bools(raw: Any, name: str, length: int) -> Bools:
    return _array(raw[name], name, "b", (length,)).astype(bool)


def _logits(value: Any, requests: int, gamma: int) -> Floats | None:
    if value is None:
        return None
    logits: Floats = _array(value, "logits", "f", (requests, None), np.float64)
    if logits.shape[1] > gamma:
        raise ValueError(f"logits has {logits.shape[1]} columns; must be at most gamma, {gamma}")
    return logits


def _array(
    value: Any, name: str, kind: str, shape: tuple[int | None, ...], dtype: Any = None
) -> npt.NDArray[Any]:
    """A rectangular array; None in `shape` is any size."""
    try:
        array = np.array(value, dtype=dtype)
    except (TypeError, ValueError):
        array = np.empty(0, dtype=object)
    known = len(array.shape) == len(shape) and all(
        want in (None, found) for want, found in zip(shape, array.shape, strict=True)
    )
    if not known or (array.size and array.dtype.kind != kind):
        sizes = " x ".join("n" if size is None else str(size) for size in shape)
        what = {"i": "whole numbers", "b": "true or false", "f": "numbers"}[kind]
        raise ValueError(f"{name} is {str(value)[:80]}; must be {sizes} {what}")
    return array
