"""The arms of the stage throughput: flags and environment of each, and the table for SGLang's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cost_tables.profiling.cell_file import read_cells
from cost_tables.profiling.fitting import cell_times
from gpu_stages.pair import Pair, accept_length
from gpu_stages.servers import speculative, without_us
from gpu_stages.settings import Settings

TABLE_FLAG = "--speculative-dspark-sps-table-path"
FEWEST_CELLS = 4  # of SGLang's fit
TINY_ARMS = ("none", "ours compact")


@dataclass(frozen=True)
class Arm:
    """flags: beside those that all servers have. environ: beside ours."""

    name: str
    flags: list[str]
    environ: dict[str, str] = field(default_factory=dict)

    def describe_environ(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.environ.items()]


def arms_of(
    settings: Settings, pair: Pair, table: Path | None, known: Path | None, reason: str = ""
) -> tuple[list[Arm], dict[str, str]]:
    """The arms that can be run, and why the others cannot.

    table: ours. known: the same cells in SGLang's format; reason: why there is no such file.
    """
    draft, simulate = speculative(pair.draft), settings.simulate
    ours = [*draft, *_simulated(settings)]
    compact = [*ours, "--speculative-verify-mode", "compact"]
    if table is not None:
        compact += [TABLE_FLAG, str(table)]
    alone = {**without_us(), **_sglang_simulation(settings)}
    builtin = [*draft, *settings.builtin_flags]
    arms = [
        Arm("none", []),
        Arm("SGLang static", builtin, {**alone, "SGLANG_RAGGED_VERIFY_MODE": "static"}),
        Arm(
            "SGLang compact",
            [*builtin, TABLE_FLAG, str(known)],
            {**alone, "SGLANG_RAGGED_VERIFY_MODE": "compact"},
        ),
        Arm("ours static", ours),
        Arm("ours compact", compact),
    ]
    left_out = {}
    if simulate is not None:
        left_out["SGLang compact"] = "SGLang refuses to simulate where windows are trimmed"
    elif known is None:
        left_out["SGLang compact"] = reason
    if settings.tiny:
        left_out |= {arm.name: "--tiny" for arm in arms if arm.name not in TINY_ARMS}
        left_out |= dict.fromkeys(("SGLang static", "SGLang compact"), "not served on a CPU")
    return [arm for arm in arms if arm.name not in left_out], left_out


def sglang_table(table: Path | None, file: Path) -> tuple[Path | None, str]:
    """SGLang's own fit of the cells from which `table` was fitted, or None and the reason.

    Of rounds that draft whole blocks, as SGLang's always do, at the shortest context.
    """
    if table is None:
        return None, "no table of the stage profile: without one it verifies everything"
    header, rows = read_cells(table.with_suffix(".csv"))
    times = [t for t in cell_times(rows) if t.cell.depth == header.fingerprint.gamma]
    shortest = min((t.cell.context for t in times), default=0)
    cells = [
        {"bs": t.cell.requests, "M": t.cell.tokens, "T": t.seconds}
        for t in times
        if t.cell.context == shortest
    ]
    if len(cells) < FEWEST_CELLS:
        return None, f"{len(cells)} cells of whole blocks; SGLang's fit needs {FEWEST_CELLS}"
    try:
        # Here, since what it imports fails where CUDA_VISIBLE_DEVICES is no number.
        from sglang.benchmark.dspark_sps_profiler import build_additive_table_from_cells

        fitted = build_additive_table_from_cells(cells=cells)
    except ValueError as error:  # noise can make its fit one that it refuses
        return None, f"SGLang's fit of {len(cells)} cells: {error}"
    file.write_text(fitted.to_json())
    return file, ""


def _simulated(settings: Settings) -> list[str]:
    if settings.simulate is None:
        return []
    chances = ",".join(f"{chance:g}" for chance in settings.simulate)
    return ["--speculative-simulate-acceptance", chances]


def _sglang_simulation(settings: Settings) -> dict[str, str]:
    """All requests of a round accept as many tokens, the mean's floor or the next: SGLang knows no
    probabilities by position."""
    if settings.simulate is None:
        return {}
    return {"SGLANG_SIMULATE_ACC_LEN": f"{accept_length(settings.simulate):.4f}"}
