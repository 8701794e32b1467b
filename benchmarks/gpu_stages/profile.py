"""Stage profile: a cost table of a model of Qwen3-8B's shape, fit for shipping.

The server runs in the profiling mode, and the sweep is that of `sglang-dspark profile-sps --quick`.
With time to spare, a second server says what it measures by itself when it starts.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cost_tables import profile_sps
from cost_tables.files import Fingerprint, Table, load_table
from cost_tables.profiling.cell_file import read_cells
from cost_tables.profiling.launch import launch_arguments
from gpu_stages.pair import Pair, prepare_pair
from gpu_stages.servers import device_flags, info, serve, speculative
from gpu_stages.settings import Result, Settings

COUNTS, TINY_COUNTS = (1, 8, 32, 64), (1, 4)
QUICK_S = 60 * profile_sps.QUICK_MINUTES
END_S = 20.0  # to fit, plot and write, and to end the server
START_UP_S = 80.0  # a server's start, with its measurement


def run(settings: Settings, result: Result) -> None:
    pair = prepare_pair(settings)
    with serve(settings, "profile", launch_arguments(server_flags(settings, pair))) as server:
        fingerprint = Fingerprint(**info(server)["profile"]["fingerprint"])
        name = table_name(fingerprint, pair.shape.name)
        result.set(fingerprint=asdict(fingerprint), table=name)
        table = settings.out.parent / name
        # The log of the stage has what the profiler prints.
        if profile_sps.main(sweep_arguments(settings, server.url, table)) != 0:
            result.problem("the sweep did not come to its end; see the log")
            return
    result.set(**figures(table, pair))
    remember(settings, table)
    start_up(settings, pair, result)


def server_flags(settings: Settings, pair: Pair) -> list[str]:
    """Of a server with our worker; `launch_arguments` adds the profiling mode."""
    counts = TINY_COUNTS if settings.tiny else COUNTS
    return [
        *("--model-path", str(pair.target), "--dtype", pair.shape.dtype),
        *speculative(pair.draft),
        *device_flags(settings, counts[-1]),
        *("--context-length", "2048", "--max-total-tokens", "8192" if settings.tiny else "65536"),
        *settings.serve_flags,
    ]


def sweep_arguments(settings: Settings, url: str, table: Path) -> list[str]:
    counts = TINY_COUNTS if settings.tiny else COUNTS
    arguments = ["--url", url, "-o", str(table), "--overwrite", "--quick"]
    arguments += ["--requests", ",".join(map(str, counts))]
    if settings.tiny:
        return [*arguments, "--minutes", "0.1", "--contexts", "32"]
    # The sweep may take 1.25 times what it is given.
    seconds = min(QUICK_S, (settings.left_s - END_S) / 1.25)
    if seconds <= 0:
        raise TimeoutError("the server is up, but no time is left for the sweep")
    return [*arguments, "--minutes", f"{seconds / 60:.2f}"]


def table_name(fingerprint: Fingerprint, model: str) -> str:
    """By device, model, attention backend and γ, as files of shipped tables are named."""
    parts = (fingerprint.device, model, fingerprint.backend, f"g{fingerprint.gamma}")
    return "-".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts) + ".json"


def figures(table: Path, pair: Pair) -> dict[str, Any]:
    """What the table says, for those who only read the JSON."""
    loaded = load_table(table)
    _, rows = read_cells(table.with_suffix(".csv"))
    return {
        "median_error": loaded.median_error,
        "cells": len({row.cell for row in rows}),
        "visits": len(rows),
        "step_ms": step_times(loaded, pair.shape.gamma, {row.cell.requests for row in rows}),
    }


def step_times(table: Table, gamma: int, counts: set[int]) -> list[dict[str, float]]:
    """T of a round without a draft, of anchors only and of whole windows, milliseconds, at 256
    context tokens a request."""
    times = []
    for requests in sorted(counts):
        context, drafted = 256.0 * requests, float(requests * gamma)
        tokens = np.array([requests, requests * (gamma + 1)], dtype=np.float64)
        shortest, whole = table.cost.drafted.seconds(requests, tokens, context, drafted)
        entry = {"requests": requests, "anchors": shortest, "whole": whole}
        if table.cost.plain is not None:
            entry["plain"] = table.cost.plain.seconds(requests, tokens[:1], context)[0]
        times.append(
            {
                key: int(t) if key == "requests" else round(1e3 * float(t), 3)
                for key, t in entry.items()
            }
        )
    return times


def start_up(settings: Settings, pair: Pair, result: Result) -> None:
    """What a server without a table measures when it starts."""
    if settings.tiny or settings.left_s < START_UP_S:
        why = "--tiny: one start less" if settings.tiny else f"{settings.left_s:.0f} s were left"
        result.set(start_up={"skipped": why})
        return
    flags = [*server_flags(settings, pair), "--speculative-verify-mode", "compact"]
    with serve(settings, "start-up", flags) as server:
        result.set(start_up=info(server)["schedule"])


# --- for the stage behind ------------------------------------------------------------------------


def remember(settings: Settings, table: Path) -> None:
    (settings.work / "table.txt").write_text(str(table))


def made_table(settings: Settings) -> Path | None:
    """The table that this stage has written, in this run or in another with the same folder."""
    note = settings.work / "table.txt"
    table = Path(note.read_text()) if note.exists() else None
    return table if table is not None and table.exists() else None
