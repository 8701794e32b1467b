"""What a calibration is, as a table, as the JSON file that a server reads, and as a picture."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from sglang_dspark.calibrate.blocks import Blocks
from sglang_dspark.calibrate.fit import MIN_BLOCKS
from sglang_dspark.calibrate.reliability import BINS, Errors, bins_of, survivals
from sglang_dspark.observe.record_file import Floats, Header, Ints
from sglang_dspark.schedule.calibration import Scaling

FORMAT, VERSION = "sglang-dspark calibration", 1


@dataclass(frozen=True)
class Calibration:
    """Temperatures, shifts, and what held-out blocks say of them.

    counts: blocks that each position was fitted on. before, after: of the held-out blocks, as the
    draft says and scaled; None where no outcome is known.
    """

    header: Header
    scaling: Scaling
    counts: list[int]
    before: list[Errors | None]
    after: list[Errors | None]
    fitted: Blocks
    held_out: Blocks
    settings: dict[str, Any]

    @property
    def unfitted(self) -> list[int]:
        """Positions, 1-based, whose temperature is 1 for want of blocks."""
        return [k for k, count in enumerate(self.counts, 1) if count < MIN_BLOCKS]

    def means(self) -> tuple[float, float]:
        """ECE before and after, over the positions that a temperature was fitted for."""
        pairs = [
            (before.ece, after.ece)
            for before, after, count in zip(self.before, self.after, self.counts, strict=True)
            if before is not None and after is not None and count >= MIN_BLOCKS
        ]
        before, after = np.mean(pairs, axis=0)
        return float(before), float(after)

    def to_json(self) -> bytes:
        """SGLang 0.5.23 reads `temperatures` of it and wants numbers in `ece_before` and
        `ece_after`; so these end where nothing was held out any more."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "algorithm": self.header.algorithm,
            "has_confidence_head": self.header.has_confidence_head,
            "gamma": self.header.gamma,
            "temperatures": list(self.scaling.temperatures),
            **({"shifts": list(self.scaling.shifts)} if self.scaling.shifted else {}),
            "ece_before": [each.ece for each in self.before if each is not None],
            "ece_after": [each.ece for each in self.after if each is not None],
            "ece_by_chance": [each.chance for each in self.after if each is not None],
            "bins": BINS,
            "blocks": len(self.fitted) + len(self.held_out),
            "blocks_fitted": self.counts,
            "blocks_held_out": self.held_out.counts(),
            **self.settings,
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    def table(self) -> Table:
        before, after = self.means()
        table = Table(
            caption=f"ECE of the survival up to a position, {BINS} bins, on held-out requests: "
            f"{_percent(before)} before and {_percent(after)} after in the mean. By chance: what "
            "perfect confidences would show with so few blocks.",
            caption_justify="left",
        )
        shifted = ("shift",) if self.scaling.shifted else ()
        columns = ("position", "blocks", "held out", "temperature", *shifted)
        for name in (*columns, "ECE before", "after", "by chance"):
            table.add_column(name, justify="right")
        held_out = self.held_out.counts()
        pairs = zip(self.scaling.temperatures, self.scaling.shifts, strict=True)
        for k, (temperature, shift) in enumerate(pairs):
            old, new = self.before[k], self.after[k]
            cells = [
                old.ece if old else None,
                new.ece if new else None,
                new.chance if new else None,
            ]
            table.add_row(
                str(k + 1),
                str(self.counts[k]),
                str(held_out[k]),
                f"{temperature:.3f}" if k + 1 not in self.unfitted else "1 (too few)",
                *((f"{shift:+.3f}",) if shifted else ()),
                *("-" if cell is None else _percent(cell) for cell in cells),
            )
        return table

    def picture(self) -> bytes:
        """PNG: observed over predicted survival of the held-out blocks, one panel a position."""
        from matplotlib.figure import Figure

        shown = [k for k, count in enumerate(self.held_out.counts()) if count]
        columns = min(4, len(shown))
        rows = -(-len(shown) // columns)
        figure = Figure(figsize=(3 * columns, 3 * rows + 0.5), layout="constrained")
        figure.suptitle(
            f"{self.header.algorithm}: survival on held-out requests, before (grey) and after",
            fontsize=10,
        )
        identity = Scaling.identity(self.header.gamma)
        for place, k in enumerate(shown):
            axes = figure.add_subplot(rows, columns, place + 1)
            axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
            axes.plot([0, 1], [0, 1], color="0.7", linestyle="--", linewidth=1)
            for scaling, colour in ((identity, "0.5"), (self.scaling, "tab:blue")):
                predicted, observed, sizes = _curve(self.held_out, scaling, k)
                axes.scatter(predicted, observed, s=sizes, color=colour, alpha=0.8, linewidth=0)
            axes.set_title(f"position {k + 1}, t = {self.scaling.temperatures[k]:.2f}", fontsize=9)
            axes.set_xlabel("predicted", fontsize=8)
            axes.set_ylabel("survived", fontsize=8)
        output = io.BytesIO()
        figure.savefig(output, format="png", dpi=110)
        return output.getvalue()


def _curve(blocks: Blocks, scaling: Scaling, k: int) -> tuple[Floats, Floats, Floats]:
    """Of each bin that is not empty: mean prediction, share that survived, size of its dot."""
    seen = blocks.reach > k
    predicted = survivals(blocks.logits[seen], scaling)[:, k]
    place = bins_of(predicted)
    count: Ints = np.bincount(place, minlength=BINS)
    full = count > 0
    survived = np.bincount(place, weights=blocks.survived[seen] > k, minlength=BINS)
    said = np.bincount(place, weights=predicted, minlength=BINS)
    sizes = 8 + 80 * count[full] / count.max()
    return said[full] / count[full], survived[full] / count[full], sizes


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
