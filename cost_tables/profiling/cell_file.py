"""The measured cells as a CSV file, appended visit by visit, from which a sweep can go on.

The first line is a comment that holds, as JSON, what the cells were measured on and how. A row is
one visit of a cell; `rounds_ms` are its rounds, separated by spaces.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cost_tables.files import Fingerprint
from cost_tables.measure import Cell
from cost_tables.profiling.errors import ProfileError

FORMAT, VERSION = "sglang-dspark cells", 1
COLUMNS = ("requests", "tokens", "depth", "prompt", "context", "rounds_ms")


@dataclass(frozen=True)
class Row:
    """A visit. context: KV tokens of the whole batch. seconds: of each round that counts."""

    cell: Cell
    context: float
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Header:
    """seed: of the order of visits."""

    fingerprint: Fingerprint
    seed: int


class CellFile:
    """An open file; every row is on disk when `append` returns."""

    def __init__(self, path: Path, header: Header, rows: Iterable[Row] = ()) -> None:
        """Written anew, with `rows`, in one step: an interruption leaves the old file."""
        self.path = path
        about = {"format": FORMAT, "version": VERSION, **asdict(header)}
        lines = [f"# {json.dumps(about)}\n", ",".join(COLUMNS) + "\n", *map(_line, rows)]
        temp = path.with_name(path.name + ".tmp")
        temp.write_text("".join(lines))
        os.replace(temp, path)
        self._file = path.open("a")

    def append(self, row: Row) -> None:
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_cells(path: Path) -> tuple[Header, list[Row]]:
    """Raises ProfileError. A last line that was cut off is left out."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ProfileError(f"{path}: is not readable ({error.strerror})") from error
    lines = text[: text.rfind("\n") + 1].splitlines()
    try:
        about = json.loads(lines[0].removeprefix("# "))
        if (about["format"], about["version"]) != (FORMAT, VERSION):
            raise ValueError
        header = Header(Fingerprint(**about["fingerprint"]), int(about["seed"]))
    except (ValueError, KeyError, TypeError, IndexError):
        raise ProfileError(
            f"{path}: line 1 is not the header of measured cells ({FORMAT}, version {VERSION})"
        ) from None
    return header, [_row(values, path, 3 + i) for i, values in enumerate(csv.reader(lines[2:]))]


def _line(row: Row) -> str:
    cell = row.cell
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(
        [
            *(cell.requests, cell.tokens, cell.depth, cell.context, round(row.context, 1)),
            " ".join(f"{1e3 * s:.3f}" for s in row.seconds),
        ]
    )
    return text.getvalue()


def _row(values: list[Any], path: Path, number: int) -> Row:
    try:
        *counts, context, rounds = values
        seconds = tuple(float(ms) / 1e3 for ms in rounds.split())
        if not seconds or not (np.isfinite(seconds).all() and min(seconds) > 0):
            raise ValueError
        return Row(Cell(*map(int, counts)), float(context), seconds)
    except (ValueError, TypeError):
        raise ProfileError(
            f"{path}: line {number} is {','.join(values)!r}; must be {','.join(COLUMNS)}, "
            "numbers above 0"
        ) from None
