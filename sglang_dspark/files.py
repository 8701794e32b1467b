"""Reading what users hand us, and writing what they ask for."""

from __future__ import annotations

import json
import os
import tempfile
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


def check_target(path: Path, flag: str) -> None:
    """Raise ConfigError unless `path`, given with `flag`, is one that a file can be written to."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} is {path}: the folder {folder} does not exist")
    if path.is_dir():
        raise ConfigError(f"{flag} is {path}: this is a folder; must name a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} is {path}: not writable")


def check_new_file(path: Path, flag: str) -> None:
    """The same for a file that must not hold anything yet."""
    check_target(path, flag)
    if path.exists() and path.stat().st_size:
        raise ConfigError(
            f"{flag} is {path}: this file holds something already; name another, or remove it"
        )


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it, or the file as it was before."""
    handle, temp = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with os.fdopen(handle, "wb") as output:
            output.write(content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temp, 0o666 & ~umask)  # mkstemp makes it private
        os.replace(temp, path)
    except BaseException:
        Path(temp).unlink(missing_ok=True)
        raise
