"""A trained pair, the tiny target and its DSPARK draft, and requests, known to it and not."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from transformers import AutoTokenizer

import sglang_dspark
from servers import MICRO

PACKAGE = Path(sglang_dspark.__file__).parent
TARGET, DRAFT = PACKAGE / "targets" / "tiny", PACKAGE / "drafts" / "tiny-dspark"
ARGS = [*MICRO, "--max-running-requests", "16"]
# So few that much is padding.
COARSE = ["--speculative-verify-tiers", "20,60,128"]

LENGTHS = [
    *[(1, 24), (2, 1), (5, 2), (17, 3), (40, 7), (64, 8), (65, 9), (100, 15)],
    *[(200, 20), (300, 33), (16, 40), (31, 50), (8, 60), (3, 120), (100, 30), (100, 20)],
]


def mode(name: str, *more: str) -> list[str]:
    return ["--speculative-verify-mode", name, *more]


def budget(value: str) -> list[str]:
    return ["--speculative-verify-budget", value]


def requests() -> list[tuple[list[int], int]]:
    """Half of them help text, which the draft knows well, the others random tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = tokenizer(argparse.ArgumentParser.__doc__ + (json.__doc__ or "")).input_ids
    rng, made = random.Random(0), []
    for i, (size, length) in enumerate(LENGTHS):
        start = rng.randrange(100)
        known = (text * 3)[start : start + size]
        made.append((known if i % 2 else [rng.randrange(2, 2000) for _ in range(size)], length))
    return made


REQUESTS = requests()
