"""Stage identity: greedy tokens of every algorithm, mode and graph setting, against none of them.

Real servers in float32 with the shipped tiny target and its drafts. Where windows are scheduled,
the same requests also run with half of the drafted tokens verified, and with all: the schedule
alone may find that one or the other always pays.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import sglang_dspark
from gpu_stages.servers import (
    Request,
    device_flags,
    generate_all,
    info,
    serve,
    speculative,
    tell,
)
from gpu_stages.settings import Result, Settings, one_line
from sglang_dspark.serving import Server

PACKAGE = Path(sglang_dspark.__file__).parent
TARGET = PACKAGE / "targets" / "tiny"
ALGORITHMS, MODES = ("DSPARK", "DFLASH", "EAGLE3"), ("compact", "static", "cap-accept")
# Prompt and output tokens: around pages, and one that starts from a single token.
LENGTHS = ((1, 24), (17, 12), (40, 30), (64, 9), (100, 40), (8, 60), (300, 33), (31, 50))
LENGTHS += ((65, 16), (5, 20), (200, 24), (16, 40))
TINY_REQUESTS, CONCURRENCY = 6, 8
FEW_TIERS = ["--speculative-verify-tiers", "20,60,128"]  # fewer cells to measure, more padding
# Products of float32 in whole: the tensor cores' short form (TF32) flips tokens by itself.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}


@dataclass(frozen=True)
class Combination:
    """graphs: CUDA graphs; on a CPU, where there are none, the tiers that stand in for them."""

    algorithm: str
    mode: str
    graphs: bool

    def __str__(self) -> str:
        return f"{self.algorithm} {self.mode} graphs {'on' if self.graphs else 'off'}"


@dataclass(frozen=True)
class Answer:
    """tokens: output ids. gaps: log-probability of the best token less that of the second one."""

    tokens: list[int]
    gaps: list[float]


def combinations(tiny: bool) -> list[Combination]:
    """The most telling first: a run may be cut off."""
    every = [Combination(a, m, g) for g in (True, False) for m in MODES for a in ALGORITHMS]
    return every[:1] if tiny else every


def run(settings: Settings, result: Result) -> None:
    chosen = combinations(settings.tiny)
    work = requests(TINY_REQUESTS if settings.tiny else len(LENGTHS))
    result.set(
        dtype="float32",
        flags=list(settings.identity_flags),
        requests=len(work),
        combinations=[],
        not_run=[asdict(c) for c in combinations(False) if c not in chosen],
    )
    with ThreadPoolExecutor(settings.parallel) as pool:
        plain = pool.submit(plain_answers, settings, work)
        checks = {pool.submit(check, settings, c, work, plain): c for c in chosen}
        for done in as_completed(checks):
            entry = asdict(checks[done])
            if (error := done.exception()) is not None:
                entry |= {"same": None, "error": one_line(error)}
            else:
                entry |= done.result()
            result.append("combinations", entry)
            if not entry["same"]:
                result.problem(f"{checks[done]}: {entry.get('error', 'other tokens than without')}")


def requests(count: int) -> list[Request]:
    """Half of them text that the target and its drafts know, the others random tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = tokenizer(argparse.ArgumentParser.__doc__ + (json.__doc__ or "")).input_ids
    rng, made = random.Random(0), []
    for i, (size, length) in enumerate(LENGTHS[:count]):
        start = rng.randrange(100)
        known = (text * 3)[start : start + size]
        unknown = [rng.randrange(2, 2000) for _ in range(size)]
        made.append(Request(known if i % 2 else unknown, length))
    return made


def server_flags(settings: Settings) -> list[str]:
    return [
        *("--model-path", str(TARGET), "--dtype", "float32", "--context-length", "1024"),
        *device_flags(settings, 16),
        *("--max-total-tokens", "16384"),
        *settings.identity_flags,
    ]


def plain_answers(settings: Settings, work: Sequence[Request]) -> list[Answer]:
    """Without speculation, one request at a time."""
    with serve(settings, "identity none", server_flags(settings), EXACT) as server:
        answers = generate_all(server, work, 1, return_logprob=True, top_logprobs_num=2)
    return [
        Answer(
            answer["output_ids"],
            [best[0] - second[0] for best, second in answer["meta_info"]["output_top_logprobs"]],
        )
        for answer in answers
    ]


def check(
    settings: Settings, what: Combination, work: Sequence[Request], plain: Future[list[Answer]]
) -> dict[str, Any]:
    """The entry of a combination: whether its tokens are those without speculation."""
    if plain.done():
        plain.result()  # there is nothing to compare with, if it has failed
    began = time.monotonic()
    flags = [*server_flags(settings), *combination_flags(what)]
    if settings.tiny:
        flags += FEW_TIERS
    with serve(settings, f"identity {what}", flags, EXACT) as server:
        cases = [run_case(server, work, plain.result(), budget) for budget in budgets(what)]
        said = info(server)
    return {
        "same": all(case["different"] == 0 for case in cases),
        "cases": cases,
        "cost_table": said["schedule"].get("cost table"),
        "tiers": said["schedule"].get("tiers"),
        "seconds": round(time.monotonic() - began, 1),
    }


def combination_flags(what: Combination) -> list[str]:
    draft = PACKAGE / "drafts" / f"tiny-{what.algorithm.lower()}"
    flags = [*speculative(draft, what.algorithm), "--speculative-verify-mode", what.mode]
    return flags if what.graphs else [*flags, "--cuda-graph-backend-decode", "disabled"]


def budgets(what: Combination) -> tuple[float | None, ...]:
    """Shares of the drafted tokens that are verified; None: what the schedule says."""
    return (None,) if what.mode == "static" else (None, 0.5, 1.0)


def run_case(
    server: Server, work: Sequence[Request], plain: Sequence[Answer], budget: float | None
) -> dict[str, Any]:
    if budget is not None:
        tell(server, dspark_force_budget_frac=budget)
    tell(server, dspark_clear_info_records=True)
    answers = generate_all(server, work, CONCURRENCY)
    found = [answer["output_ids"] for answer in answers]
    different = [i for i, answer in enumerate(plain) if found[i] != answer.tokens]
    said = info(server)
    case = {
        "budget": "auto" if budget is None else budget,
        "different": len(different),
        "accept_length": said["accept_length"],
        "rounds": said["rounds"],
        "windows_below_full": sum(
            window <= said["gamma"] for windows in said["windows_of_rounds"] for window in windows
        ),
    }
    if different:
        i = different[0]
        case["first_difference"] = {"request": i, **first_difference(plain[i], found[i])}
    return case


def first_difference(plain: Answer, found: Sequence[int]) -> dict[str, Any]:
    """Where an answer leaves the plain one. gap: how sure the target was there, in nats; what is
    below 1e-4 may be rounding, anything above is a fault."""
    pairs = enumerate(zip(plain.tokens, found, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(plain.tokens), len(found)))
    gap = plain.gaps[place] if place < len(plain.gaps) else None
    return {"place": place, "gap": None if gap is None else round(gap, 6)}
