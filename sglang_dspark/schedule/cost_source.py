"""Where the cost table comes from: a file, a shipped table that fits, or a measurement."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cost_tables.files import Fingerprint, load_table
from cost_tables.measure import Measured
from cost_tables.model import FlatCost, RoundCost
from sglang_dspark.config import TABLE_FLAG, ScheduleConfig
from sglang_dspark.errors import ConfigError

SHIPPED = Path(__file__).parent.parent / "tables"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CostSource:
    """A table and, for the log and /server_info, its origin with the error it is known to have."""

    cost: RoundCost
    about: str


def find_cost(
    config: ScheduleConfig, here: Fingerprint, measure: Callable[[], Measured]
) -> CostSource:
    """The first of: the file of the flag, a shipped table made on the like of `here`, `measure`.

    Raises ConfigError if the file was made elsewhere: its times would be wrong without a sign.
    """
    if config.budget != "auto":
        return CostSource(RoundCost(FlatCost()), f"none, the budget is fixed to {config.budget}")
    table = config.table
    if table is not None:
        if table.fingerprint is None:
            return CostSource(table.cost, f"{table.source}; it does not say where it was measured")
        if differences := table.fingerprint.differences(here):
            raise ConfigError(
                f"{TABLE_FLAG} {table.source} was measured elsewhere: {'; '.join(differences)} "
                "(table against this server); leave the flag out to measure at start-up"
            )
        return CostSource(table.cost, f"{table.source}, {_error(table.median_error)}")
    for path in sorted(SHIPPED.glob("*.json")):
        shipped = load_table(path)
        if shipped.fingerprint == here:
            return CostSource(
                shipped.cost,
                f"shipped with sglang-dspark, {path.name}, {_error(shipped.median_error)}",
            )
    made = measure()
    return CostSource(
        made.cost,
        f"measured now, {made.cells} cells in {made.seconds:.1f} s, {_error(made.median_error)}",
    )


def _error(median_error: float | None) -> str:
    if median_error is None:
        return "error not stated"
    return f"median error {median_error:.1%} on held-out cells"
