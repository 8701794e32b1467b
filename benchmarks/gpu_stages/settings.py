"""What a stage is told, and where it writes what it finds."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_dspark.files import replace_file


@dataclass(frozen=True)
class Settings:
    """The same for all stages, but for `ends`.

    work: folder of checkpoints and logs. out: the JSON of the run; tables are written beside it.
    ends: when the stage is stopped, seconds of time.time(). parallel: servers that may be up at a
    time. simulate: survival probabilities by position, None: acceptance is real.
    """

    tiny: bool
    work: Path
    out: Path
    ends: float
    serve_flags: tuple[str, ...] = ()
    identity_flags: tuple[str, ...] = ()
    builtin_flags: tuple[str, ...] = ()
    parallel: int = 1
    simulate: tuple[float, ...] | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the stage is stopped."""
        return self.ends - time.time()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def load(cls, path: Path) -> Settings:
        values = json.loads(path.read_text())
        for field in fields(cls):
            if isinstance(values[field.name], list):
                values[field.name] = tuple(values[field.name])
        return cls(**values | {name: Path(values[name]) for name in ("work", "out")})


class Result:
    """The findings of a stage, on disk after every change. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self.problems: list[str] = []
        self._path = path
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._save()

    def set(self, **values: Any) -> None:
        with self._lock:
            self._values |= values
            self._save()

    def append(self, name: str, value: Any) -> None:
        with self._lock:
            self._values.setdefault(name, []).append(value)
            self._save()

    def get(self, name: str) -> Any:
        with self._lock:
            return self._values[name]

    def problem(self, text: str) -> None:
        """Something is wrong: the stage has failed, whatever else it finds."""
        with self._lock:
            self.problems.append(text)
            self._save()

    def _save(self) -> None:
        content = {"problems": self.problems, "result": self._values}
        replace_file(self._path, json.dumps(content).encode())


def one_line(error: BaseException) -> str:
    """The error's last line, which says what SGLang stumbled over, behind its first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(lines) < 2 else f"{text} ... {lines[-1]}"
