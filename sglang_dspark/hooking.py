"""What a hook into SGLang is. The table of all of them stands in `plugin.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Hook:
    """One function of SGLang that we wrap or replace, and the reason why.

    target: dotted path of a function or method of SGLang 0.5.23.
    kind:   AROUND `fn(original, *a, **k)`, AFTER `fn(result, *a, **k) -> new | None`,
            BEFORE `fn(*a, **k) -> (a, k) | None`, REPLACE `fn(*a, **k)`.
    """

    target: str
    kind: Literal["AROUND", "AFTER", "BEFORE", "REPLACE"]
    fn: Callable[..., Any]
    why: str
