"""Stage 1: the target writes its own training data, on an SGLang server, many rows at a time.

A batch is one list of prompts (subjects.py says which) and one answer to each, greedy for more
than half of the rows and sampled for the rest, since a draft serves both. Each batch has a seed and
a file of its own, so the stage resumes.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_dspark.serving import Server


@dataclass(frozen=True)
class GenerateConfig:
    """batch_rows: prompts sent together. max_answer_tokens: cap of an answer.
    answer_temperatures: one is drawn for each row, 0 is greedy. seed: of all batches."""

    batch_rows: int = 64
    max_answer_tokens: int = 192
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.6, 1.0)
    seed: int = 0


@dataclass(frozen=True)
class Prompt:
    kind: str
    ids: list[int]


@dataclass(frozen=True)
class Conversation:
    """One row of data: ids[answer_start:] is what the target said."""

    kind: str
    temperature: float
    ids: list[int]
    answer_start: int


# Makes the prompts of one batch; may ask the server to write parts of them.
PromptSource = Callable[[Server, random.Random, int], list[Prompt]]


def target_server(target: Path, log: Path, rows: int) -> Server:
    """A server of the target alone, in bfloat16, that decodes `rows` requests at a time."""
    args = ["--model-path", str(target), "--dtype", "bfloat16", "--skip-server-warmup"]
    return Server([*args, "--max-running-requests", str(rows)], log=log)


def complete(
    server: Server, prompts: list[list[int]], max_new_tokens: int, sampling: list[dict[str, Any]]
) -> list[list[int]]:
    """The new tokens of every prompt, a stop token included. sampling: one dict a prompt."""
    if not prompts:
        return []
    params = [{"max_new_tokens": max_new_tokens, **each} for each in sampling]
    request = {"input_ids": prompts, "sampling_params": params}
    answers = server.post("/generate", request, timeout_s=3600.0)
    return [list(answer["output_ids"]) for answer in answers]


def generate_batch(
    server: Server, source: PromptSource, config: GenerateConfig, index: int
) -> list[Conversation]:
    """The conversations of batch `index`."""
    rng = random.Random(f"{config.seed}/{index}")
    prompts = source(server, rng, config.batch_rows)
    temperatures = [rng.choice(config.answer_temperatures) for _ in prompts]
    sampling = [{"temperature": temperature} for temperature in temperatures]
    answers = complete(server, [p.ids for p in prompts], config.max_answer_tokens, sampling)
    return [
        Conversation(prompt.kind, temperature, prompt.ids + answer, len(prompt.ids))
        for prompt, temperature, answer in zip(prompts, temperatures, answers, strict=True)
    ]


def generate(
    target: Path,
    source: PromptSource,
    folder: Path,
    config: GenerateConfig,
    wanted_tokens: int,
) -> int:
    """Write batch-NNNN.jsonl files until they hold `wanted_tokens` answer tokens in all.

    Files that exist count and are kept. Returns the number of answer tokens in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = answer_tokens(read_conversations(folder))
    if tokens >= wanted_tokens:
        return tokens
    columns = (BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with (
        target_server(target, folder / "server.log", config.batch_rows) as server,
        Progress(TextColumn("generate"), *columns, console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("", total=wanted_tokens, completed=tokens, note="")
        index = 0
        while tokens < wanted_tokens:
            path = folder / f"batch-{index:04d}.jsonl"
            index += 1
            if path.exists():
                continue
            start = time.monotonic()
            conversations = generate_batch(server, source, config, index - 1)
            write_jsonl(path, [asdict(conversation) for conversation in conversations])
            new = answer_tokens(conversations)
            tokens += new
            note = f"{tokens} tokens, {new / (time.monotonic() - start):.0f} tokens/s"
            progress.update(task, completed=tokens, note=note)
    return tokens


def answer_tokens(conversations: list[Conversation]) -> int:
    return sum(len(c.ids) - c.answer_start for c in conversations)


def read_conversations(folder: Path) -> list[Conversation]:
    """Every conversation of the folder, in the order of its files."""
    return [
        c for path in sorted(folder.glob("batch-*.jsonl")) for c in read_conversations_file(path)
    ]


def read_conversations_file(path: Path) -> list[Conversation]:
    return [Conversation(**json.loads(line)) for line in path.read_text().splitlines()]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Atomic, so that a file which exists is whole."""
    temp = path.with_suffix(".tmp")
    temp.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(temp, path)
