"""How far predicted survival can be trusted: ECE, ROC-AUC, Brier score and the diagram."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BINS = 10


@dataclass(frozen=True)
class Bin:
    """Blocks whose predicted survival fell into one tenth of 0..1."""

    count: int
    predicted: float  # mean
    observed: float  # share that survived


@dataclass(frozen=True)
class Position:
    """One draft position. ece: expected calibration error, Σ count/n · |predicted - observed| over
    the bins. auc: P(a survivor's prediction exceeds a casualty's), None where one kind lacks."""

    count: int
    ece: float
    auc: float | None
    brier: float
    predicted: float
    observed: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Reliability:
    """Of a confidence source, before or after calibration, per draft position."""

    positions: tuple[Position, ...]

    @classmethod
    def measure(cls, survivals: Tensor, survived: Tensor) -> Reliability:
        """survivals float [n, γ]: predicted P(token k and all before it accepted). survived bool
        [n, γ]: whether they were."""
        pairs = zip(survivals.double().unbind(1), survived.unbind(1), strict=True)
        return cls(tuple(_position(predicted, observed) for predicted, observed in pairs))

    @property
    def ece(self) -> float:
        """Mean over positions."""
        return sum(p.ece for p in self.positions) / len(self.positions)

    def as_dict(self) -> dict[str, Any]:
        rows = [{**vars(p), "bins": [vars(b) for b in p.bins]} for p in self.positions]
        return {"ece": self.ece, "positions": rows}

    def plot(self, path: Path, title: str) -> None:
        """The reliability diagram, one panel a position, as PNG (or what the name's end says)."""
        from matplotlib.figure import Figure

        columns = 4
        rows = -(-len(self.positions) // columns)
        figure = Figure(figsize=(3 * columns, 3 * rows), layout="constrained")
        figure.suptitle(title)
        for k, position in enumerate(self.positions):
            axes = figure.add_subplot(rows, columns, k + 1)
            axes.plot([0, 1], [0, 1], color="0.7", linestyle="--", linewidth=1)
            largest = max(b.count for b in position.bins)
            axes.scatter(
                [b.predicted for b in position.bins],
                [b.observed for b in position.bins],
                s=[10 + 90 * b.count / largest for b in position.bins],
            )
            auc = "-" if position.auc is None else f"{position.auc:.2f}"
            axes.set_title(f"position {k + 1}: ECE {position.ece:.3f}, AUC {auc}", fontsize=9)
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1)
            if k % columns == 0:
                axes.set_ylabel("survived")
            if k >= len(self.positions) - columns:
                axes.set_xlabel("predicted survival")
        figure.savefig(path, dpi=110)


def _position(predicted: Tensor, survived: Tensor) -> Position:
    observed = survived.double()
    index = (predicted * BINS).long().clamp(0, BINS - 1)
    count = index.bincount(minlength=BINS)
    sums = [
        torch.zeros(BINS, dtype=torch.float64).index_add_(0, index, x)
        for x in (predicted, observed)
    ]
    bins = tuple(
        Bin(int(n), float(p / n), float(o / n))
        for n, p, o in zip(count, *sums, strict=True)
        if n > 0
    )
    total = len(predicted)
    return Position(
        count=total,
        ece=sum(b.count * abs(b.predicted - b.observed) for b in bins) / total,
        auc=roc_auc(predicted, survived),
        brier=float((predicted - observed).square().mean()),
        predicted=float(predicted.mean()),
        observed=float(observed.mean()),
        bins=bins,
    )


def roc_auc(scores: Tensor, positive: Tensor) -> float | None:
    """Area under the ROC curve by ranks (Mann-Whitney); ties count half. scores, positive [n]."""
    from scipy.stats import rankdata

    wanted = int(positive.sum())
    others = len(positive) - wanted
    if wanted == 0 or others == 0:
        return None
    ranks = torch.from_numpy(rankdata(scores.numpy()))
    return float((ranks[positive].sum() - wanted * (wanted + 1) / 2) / (wanted * others))
