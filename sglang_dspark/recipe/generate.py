"""Stage 1: the target writes its own training data.

A batch is two decodes. First the chat template is filled up to the user's turn plus a short
opener (seeds.py), and the target continues it as the user. Then the template is closed and the
target answers, greedily for more than half of the rows and sampled for the rest, since a draft
serves both. Each batch has a seed and a file of its own, so the stage resumes and can be split
over processes.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.recipe.seeds import sample_opener
from sglang_dspark.recipe.target import FastLlama, left_padded_mask


@dataclass(frozen=True)
class GenerateConfig:
    """batch_rows: conversations decoded together. max_user_tokens, max_answer_tokens: caps a
    turn. user_temperature, user_top_k: sampling of the user turn; the cut keeps a small model on
    topic. answer_temperatures: one is drawn for each row, 0 is greedy. seed: of all batches."""

    batch_rows: int = 64
    max_user_tokens: int = 64
    max_answer_tokens: int = 192
    user_temperature: float = 0.9
    user_top_k: int = 40
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.6, 1.0)
    seed: int = 0


@dataclass(frozen=True)
class Conversation:
    """One row of data: ids[answer_start:] is what the target said as the assistant."""

    kind: str
    temperature: float
    ids: list[int]
    answer_start: int


@torch.inference_mode()
def decode(
    target: FastLlama,
    prompts: list[list[int]],
    temperatures: Tensor,  # float32 [B]; 0 is greedy
    max_new_tokens: int,
    stop_id: int,
    generator: torch.Generator,
    top_k: int = 0,
) -> list[list[int]]:
    """Continue every prompt until `stop_id` (kept, last) or max_new_tokens.

    Left padding and one static batch; finished rows are dropped whenever half of the rest is done.
    """
    rows, longest = len(prompts), max(map(len, prompts))
    device = target.device
    ids = torch.zeros(rows, longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
    pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    ids, temperatures = ids.to(device), temperatures.to(device)
    cache = target.new_cache(rows, longest + max_new_tokens)
    positions = (torch.arange(longest, device=device)[None] - pads[:, None]).clamp(min=0)
    hidden, _ = target.forward(ids, positions, left_padded_mask(pads, longest, longest), cache)
    outputs: list[list[int]] = [[] for _ in prompts]
    live = list(range(rows))  # cache row -> index of its prompt
    done = [False] * rows
    for _ in range(max_new_tokens):
        logits = target.logits(hidden[:, -1]).float()
        token = sample(logits, temperatures, generator, top_k)
        for index, value in zip(live, token.tolist(), strict=True):
            if not done[index]:
                outputs[index].append(value)
                done[index] = value == stop_id
        kept = [row for row, index in enumerate(live) if not done[index]]
        if not kept:
            break
        if 2 * len(kept) <= len(live):
            keep = torch.tensor(kept, device=device)
            cache.keep(keep)
            token, temperatures, pads = token[keep], temperatures[keep], pads[keep]
            live = [live[row] for row in kept]
        mask = left_padded_mask(pads, 1, cache.length + 1)
        hidden, _ = target.forward(token[:, None], (cache.length - pads)[:, None], mask, cache)
    return outputs


def sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator, top_k: int) -> Tensor:
    """One token a row. logits float32 [B, V], temperatures float32 [B] -> int64 [B].

    Inverts the cumulative distribution: one random number a row, where multinomial draws V.
    """
    greedy = logits.argmax(dim=-1)
    warm = (temperatures > 0).nonzero().squeeze(1)
    if len(warm) == 0:
        return greedy
    scaled = logits[warm] / temperatures[warm, None]
    if top_k:
        floor = scaled.topk(min(top_k, scaled.shape[-1]), dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    mass = (scaled - scaled.amax(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
    uniform = torch.rand(len(warm), 1, generator=generator, device=logits.device)
    # right=True: the first id whose cumulative mass exceeds the draw, so mass 0 is never chosen.
    drawn = torch.searchsorted(mass, uniform * mass[:, -1:], right=True).squeeze(1)
    greedy[warm] = drawn.clamp(max=logits.shape[-1] - 1)
    return greedy


def generate_batch(
    target: FastLlama, tokenizer: Any, config: GenerateConfig, index: int
) -> list[Conversation]:
    """The conversations of batch `index`; the same for the same config, index and machine."""
    rng = random.Random(f"{config.seed}/{index}")
    generator = torch.Generator(target.device).manual_seed(rng.getrandbits(62))
    openers = [sample_opener(rng) for _ in range(config.batch_rows)]
    before_user, after_user = _template_around_user(tokenizer)
    stop_id = int(tokenizer.eos_token_id)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    user_temperature = torch.full((config.batch_rows,), config.user_temperature)
    user_turns = decode(
        target,
        [encode(before_user + opener.rstrip(" ")) for _, opener, _ in openers],
        user_temperature,
        config.max_user_tokens,
        stop_id,
        generator,
        config.user_top_k,
    )
    prompts = []
    for (_, opener, suffix), turn in zip(openers, user_turns, strict=True):
        message = opener.rstrip(" ") + tokenizer.decode(turn, skip_special_tokens=True)
        prompts.append(encode(before_user + message.strip() + suffix + after_user))
    temperatures = torch.tensor([rng.choice(config.answer_temperatures) for _ in openers])
    answers = decode(target, prompts, temperatures, config.max_answer_tokens, stop_id, generator)
    return [
        Conversation(kind, float(temperature), prompt + answer, len(prompt))
        for (kind, _, _), temperature, prompt, answer in zip(
            openers, temperatures, prompts, answers, strict=True
        )
    ]


def generate(
    target: FastLlama,
    tokenizer: Any,
    folder: Path,
    config: GenerateConfig,
    batches: Iterable[int],
    max_seconds: float,
) -> int:
    """Write batch-NNNN.jsonl files until `batches` or the time is used up; finished ones are kept.

    Returns the number of answer tokens in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    for index in batches:
        path = folder / f"batch-{index:04d}.jsonl"
        if path.exists():
            continue
        if time.monotonic() - start > max_seconds:
            break
        begun = time.monotonic()
        conversations = generate_batch(target, tokenizer, config, index)
        write_jsonl(path, [asdict(conversation) for conversation in conversations])
        tokens = sum(len(c.ids) - c.answer_start for c in conversations)
        seconds = time.monotonic() - begun
        print(
            f"generate: batch {index}: {tokens} answer tokens in {seconds:.0f} s "
            f"({tokens / seconds:.0f} tokens/s), {(time.monotonic() - start) / 60:.1f} of at most "
            f"{max_seconds / 60:.1f} min",
            flush=True,
        )
    return sum(len(c.ids) - c.answer_start for c in read_conversations(folder))


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


def _template_around_user(tokenizer: Any) -> tuple[str, str]:
    """The chat template's text before and after the user's message."""
    mark = "\u0001"
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(mark)
    return before, after
