"""A test's way to slow tiers of a running server down."""

from __future__ import annotations

import json
import time
from pathlib import Path


class TierDelays:
    """file: JSON, seconds by a tier's tokens, such as {"64": 0.02}; read again when it changes.

    A file that is not there slows nothing down. Tests replace it at once, so that no half is read.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read_at: int | None = None
        self._seconds: dict[str, float] = {}

    def __call__(self, tokens: int) -> None:
        try:
            changed = self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if changed != self._read_at:
            self._read_at, self._seconds = changed, json.loads(self._file.read_text())
        time.sleep(self._seconds.get(str(tokens), 0.0))
