"""What a server in profiling mode says of itself, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cost_tables.files import Fingerprint
from cost_tables.measure import Cell
from cost_tables.profiling.errors import ProfileError

BUDGET_FLAG = "--speculative-verify-budget"


@dataclass(frozen=True)
class Facts:
    """gamma: γ. tiers: token counts that a verify forward is padded to, ascending.

    max_requests: of a batch. pads_plain: whether rounds without a draft fill a tier too.
    max_context: KV tokens of one request at most. kv_tokens: of all requests together.
    """

    gamma: int
    fingerprint: Fingerprint
    tiers: tuple[int, ...]
    max_requests: int
    pads_plain: bool
    vocab_size: int
    max_context: int
    kv_tokens: int

    def tier(self, tokens: int) -> int:
        """Tokens of the smallest tier that holds so many."""
        return next(tier for tier in self.tiers if tier >= tokens)

    def plain_tokens(self, requests: int) -> int:
        """M of a round without a draft."""
        return self.tier(requests) if self.pads_plain else requests


def budget_of(cell: Cell) -> int:
    """K that fills the cell's tier, as far as the drafted tokens do."""
    return min(cell.tokens - cell.requests, cell.requests * cell.depth)


def read_facts(info: Any, source: str) -> Facts:
    """Facts from /server_info. source: the server, for errors. Raises ProfileError."""
    record = _record(info)
    if record is None:
        raise ProfileError(
            f"{source} does not serve a draft with sglang-dspark (no dspark_info_record in "
            "/server_info); start it with --speculative-algorithm and sglang-dspark installed"
        )
    if record.get("mode") != "compact":
        raise ProfileError(
            f"{source} runs in verify mode {record.get('mode')}; must be compact "
            f"(--speculative-verify-mode compact {BUDGET_FLAG} profile)"
        )
    if "profile" not in record:
        budget = str(record.get("schedule", {}).get("budget", "unknown")).split(",")[0]
        raise ProfileError(
            f"{source} is not in profiling mode: its verify budget is {budget}; start it with "
            f"{BUDGET_FLAG} profile"
        )
    said = record["profile"]
    return Facts(
        gamma=int(record["gamma"]),
        fingerprint=Fingerprint(**said["fingerprint"]),
        tiers=tuple(said["tiers"]),
        max_requests=int(said["max_requests"]),
        pads_plain=bool(said["pads_plain"]),
        vocab_size=int(said["vocab_size"]),
        max_context=int(said["max_context"]),
        kv_tokens=int(said["kv_tokens"]),
    )


def _record(info: Any) -> dict[str, Any] | None:
    """dspark_info_record as our worker writes it, of the first rank."""
    if not isinstance(info, dict):
        return None
    states = info.get("internal_states") or [{}]
    record = states[0].get("dspark_info_record")
    ours = isinstance(record, dict) and record.get("plugin") == "sglang-dspark"
    return record if ours else None
