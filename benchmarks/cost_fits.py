"""How well two fits predict cells that they have not seen: ours, and SGLang's additive one.

    python benchmarks/cost_fits.py TABLE.csv          # the cells that profile_sps has measured

Both are fitted on the same cells and judged on the same ones, each held out once: all rounds with a
draft, and those at full depth only, which is all that SGLang's profiler measures. SGLang's fit is
its own code, called as its profiler does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from sglang.benchmark.dspark_sps_profiler import build_additive_table_from_cells, fitted_step_time

from cost_tables.model import Floats
from cost_tables.profiling.cell_file import Row, read_cells
from cost_tables.profiling.fitting import CellTime, fit_cells, folds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("cells", type=Path, metavar="TABLE.csv")
    args = parser.parse_args()
    header, rows = read_cells(args.cells)
    gamma = header.fingerprint.gamma
    report = {
        "fingerprint": vars(header.fingerprint),
        "every_depth": compare([row for row in rows if row.cell.depth]),
        "full_depth": compare([row for row in rows if row.cell.depth == gamma]),
    }
    print(json.dumps(report, indent=1))


def compare(rows: list[Row]) -> dict[str, Any]:
    part = fit_cells(rows).drafted
    return {
        "cells": len(part.times),
        "ours": summary(part.held_out),
        "sglang_additive": summary(sglang_errors(part.times)),
    }


def sglang_errors(times: tuple[CellTime, ...]) -> Floats:
    """|predicted - measured| / measured of each cell, float64 [n]."""
    errors = np.zeros(len(times))
    for held_out in folds(len(times)):
        kept = [time for i, time in enumerate(times) if i not in held_out]
        table = build_additive_table_from_cells(
            cells=[{"bs": t.cell.requests, "M": t.cell.tokens, "T": t.seconds} for t in kept]
        )
        for i in held_out:
            cell, seconds = times[i].cell, times[i].seconds
            predicted = fitted_step_time(table=table, bs=cell.requests, m=cell.tokens)
            errors[i] = abs(predicted / seconds - 1)
    return errors


def summary(errors: Floats) -> dict[str, float]:
    """Relative errors: median, and what 9 of 10 stay below."""
    median, high = np.percentile(errors, [50, 90])
    return {"median": round(float(median), 4), "in_9_of_10": round(float(high), 4)}


if __name__ == "__main__":
    main()
