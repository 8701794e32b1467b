"""Reading what users hand us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError


def read_json_object(file: Path, missing: str) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError; `missing` is its text if there is no file."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(missing) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: is not readable JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: must hold a JSON object, but holds a {type(raw).__name__}")
    return raw
