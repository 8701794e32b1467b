from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recorded import HEADER


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a records file."""

    def write(rounds: Any, head: dict[str, Any] = HEADER, name: str = "rounds.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in (head, *rounds)))
        return path

    return write
