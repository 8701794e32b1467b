"""Where the cost table comes from: a file, a shipped table that fits, or a measurement."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cost_tables
from cost_tables.files import Fingerprint, Table, load_table
from cost_tables.measure import Measured
from cost_tables.model import FlatCost, RoundCost
from sglang_dspark.config import MEASURE, TABLE_FLAG, ScheduleConfig
from sglang_dspark.errors import ConfigError

SHIPPED = Path(cost_tables.__file__).parent / "tables"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CostSource:
    """A table and, for the log and /server_info, its origin with the error it is known to have."""

    cost: RoundCost
    about: str


def find_cost(
    config: ScheduleConfig, here: Fingerprint, measure: Callable[[], Measured]
) -> CostSource:
    """The first of: the file of the flag; a shipped table made on the like of `here`; a shipped one
    that is near, with a warning; `measure`. What is near says `Fingerprint.serves`.

    Raises ConfigError if the file was made elsewhere: its times would be wrong without a sign.
    """
    if config.budget != "auto":
        return CostSource(RoundCost(FlatCost()), f"none, the budget is fixed to {config.budget}")
    if config.table is not None:
        return _given(config.table, here)
    if not config.measure and (found := _shipped(here, refined=config.refine)) is not None:
        return found
    made = measure()
    return CostSource(
        made.cost,
        f"measured now, {made.cells} cells in {made.seconds:.1f} s, {_error(made.median_error)}",
    )


def _given(table: Table, here: Fingerprint) -> CostSource:
    if table.fingerprint is None:
        return CostSource(table.cost, f"{table.source}; it does not say where it was measured")
    if differences := table.fingerprint.differences(here):
        raise ConfigError(
            f"{TABLE_FLAG} {table.source} was measured elsewhere: {'; '.join(differences)} "
            f"(table against this server); leave the flag out, or give {MEASURE!r} to measure now"
        )
    return CostSource(table.cost, f"{table.source}, {_error(table.median_error)}")


def _shipped(here: Fingerprint, refined: bool) -> CostSource | None:
    """The shipped table that differs least from `here`; one that differs, only if step times
    measured while serving correct it."""
    found: list[tuple[int, int, list[str], Table]] = []
    for path in sorted(SHIPPED.glob("*.json")):
        table = load_table(path)
        if table.fingerprint is not None and table.fingerprint.serves(here):
            differences = table.fingerprint.differences(here)
            found.append((len(differences), table.fingerprint.gamma, differences, table))
    if not found:
        return None
    *_, differences, table = min(found, key=lambda each: each[:2])
    name, differing = Path(table.source).name, "; ".join(differences)
    error = _error(table.median_error)
    if not differing:
        return CostSource(table.cost, f"shipped with sglang-dspark, {name}, {error}")
    if not refined:
        return None
    logger.warning(
        "sglang-dspark: the cost table is %s, shipped with sglang-dspark, which was measured on "
        "something near, but not on this: %s (table against this server). Step times measured "
        "while serving correct it; %s %s measures a table at start-up instead.",
        name,
        differing,
        TABLE_FLAG,
        MEASURE,
    )
    return CostSource(
        table.cost, f"shipped with sglang-dspark, {name}, made near here ({differing}), {error}"
    )


def _error(median_error: float | None) -> str:
    if median_error is None:
        return "error not stated"
    return f"median error {median_error:.1%} on held-out cells"
