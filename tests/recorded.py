"""Records of rounds of which every figure is known by heart, as a server writes them down."""

from __future__ import annotations

from typing import Any

HEADER = {
    "format": "sglang-dspark records",
    "version": 1,
    "config": {
        "algorithm": "DSPARK",
        "mode": "compact",
        "gamma": 3,
        "has_confidence_head": True,
    },
    "schedule": {"tiers": "4, 8 tokens, up to 2 requests", "budget": "auto"},
}


def header(mode: str = "compact", **config: Any) -> dict[str, Any]:
    return {**HEADER, "config": {**HEADER["config"], "mode": mode, **config}}


def round_of(windows: list[int], accepted: list[int], **changes: Any) -> dict[str, Any]:
    requests = len(windows)
    return {
        "rows": list(range(requests)),
        "generations": [7] * requests,
        "depth": 3,
        "budget": sum(windows) - requests,
        "tier": 0,
        "tokens": sum(windows),
        "full": False,
        "windows": windows,
        "accepted": accepted,
        "ceiling": None,
        "predicted_s": 0.0,
        "measured_s": None,
        "logits": None,
        "sampled": [False] * requests,
        "broken": [False] * requests,
        **changes,
    }


# gamma 3. Two drafted rounds of two requests, one without a draft.
COMPACT = (
    round_of([3, 1], [2, 0], tokens=4, predicted_s=0.010, measured_s=0.012),
    round_of([4, 3], [1, 0], tokens=8, predicted_s=0.020, measured_s=0.016),
    round_of([1, 1], [0, 0], tokens=4, depth=0, predicted_s=0.006, measured_s=0.006),
)
# What is committed ends with the window; the ceiling is what all four tokens would have given.
CAP_ACCEPT = (
    round_of([3, 1], [2, 0], tokens=8, full=True, ceiling=[3, 0]),
    round_of([2, 4], [1, 1], tokens=8, full=True, ceiling=[3, 1]),
)
STATIC = (
    round_of([4, 4], [3, 0], tokens=8, full=True, ceiling=[3, 0], tier=None),
    round_of([4], [1], tokens=4, full=True, ceiling=[1], tier=None),
)
