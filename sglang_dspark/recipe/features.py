"""Stage 2: one target forward per conversation, cached on disk for every epoch of training.

A shard is one safetensors file (one per generated batch) of conversations laid end to end:

    ids           int32 [N]          tokens
    features      bfloat16 [N, F*H]  outputs of the target layers `target_layer_ids`
    lengths       int32 [C]          tokens of each conversation, in order; they sum to N
    answer_starts int32 [C]          where the assistant's part begins; loss is taken from there on
    topk_ids      int32 [M, k]       the target's most likely next tokens after each answer token
    topk_probs    bfloat16 [M, k]    their probabilities at temperature 1, over all of V

M counts answer tokens only: anchors are answer tokens, so nothing else is ever predicted.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.recipe.generate import Conversation, read_conversations_file
from sglang_dspark.recipe.target import FastLlama, left_padded_mask


@dataclass(frozen=True)
class Example:
    """One conversation with what training needs of the target. A answer tokens, T in all."""

    ids: Tensor  # int64 [T]
    features: Tensor  # bfloat16 [T, F * H]
    answer_start: int
    topk_ids: Tensor  # int64 [A, k]; row i belongs to position answer_start + i
    topk_probs: Tensor  # float32 [A, k]


@torch.inference_mode()
def extract(
    target: FastLlama, conversation: Conversation, layer_ids: tuple[int, ...], top_k: int
) -> Example:
    """Run the target once over `conversation`."""
    ids = torch.tensor(conversation.ids, device=target.device)[None]
    length = ids.shape[1]
    mask = left_padded_mask(torch.zeros(1, dtype=torch.int64, device=target.device), length, length)
    positions = torch.arange(length, device=target.device)[None]
    cache = target.new_cache(1, length)
    hidden, captured = target.forward(ids, positions, mask, cache, layer_ids)
    answer = hidden[0, conversation.answer_start :]
    probs = target.logits(answer).float().softmax(dim=-1)
    topk_probs, topk_ids = probs.topk(top_k, dim=-1)
    return Example(
        ids=ids[0].cpu(),
        features=torch.cat(captured, dim=-1)[0].bfloat16().cpu(),
        answer_start=conversation.answer_start,
        topk_ids=topk_ids.cpu(),
        topk_probs=topk_probs.cpu(),
    )


def write_features(
    target: FastLlama, data: Path, folder: Path, layer_ids: tuple[int, ...], top_k: int
) -> None:
    """One shard in `folder` for every batch file of `data`; shards that exist are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    pending = [
        (source, folder / f"{source.stem}.safetensors")
        for source in sorted(data.glob("batch-*.jsonl"))
    ]
    pending = [(source, shard) for source, shard in pending if not shard.exists()]
    console = Console(stderr=True)
    for source, shard in track(pending, "features", console=console, disable=not pending):
        examples = [
            extract(target, conversation, layer_ids, top_k)
            for conversation in read_conversations_file(source)
            if len(conversation.ids) - conversation.answer_start >= 2
        ]
        write_shard(shard, examples)


def write_shard(path: Path, examples: list[Example]) -> None:
    """Atomic, so that a shard which exists is whole."""
    temp = path.with_suffix(".tmp")
    save_file(
        {
            "ids": torch.cat([e.ids for e in examples]).int(),
            "features": torch.cat([e.features for e in examples]),
            "lengths": torch.tensor([len(e.ids) for e in examples], dtype=torch.int32),
            "answer_starts": torch.tensor([e.answer_start for e in examples], dtype=torch.int32),
            "topk_ids": torch.cat([e.topk_ids for e in examples]).int(),
            "topk_probs": torch.cat([e.topk_probs for e in examples]).bfloat16(),
        },
        temp,
    )
    os.replace(temp, path)


def read_shard(path: Path) -> Iterator[Example]:
    """The conversations of one shard; features stay views of the mapped file."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    token = answer = 0
    for length, start in zip(
        tensors["lengths"].tolist(), tensors["answer_starts"].tolist(), strict=True
    ):
        rows = slice(answer, answer + length - start)
        yield Example(
            ids=tensors["ids"][token : token + length].long(),
            features=tensors["features"][token : token + length],
            answer_start=start,
            topk_ids=tensors["topk_ids"][rows].long(),
            topk_probs=tensors["topk_probs"][rows].float(),
        )
        token, answer = token + length, rows.stop


def read_features(folder: Path) -> list[Example]:
    """Every conversation of the folder, in the order of its shards."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{folder} holds no *.safetensors shard; run the features stage")
    return [example for shard in shards for example in read_shard(shard)]


def select_layers(
    examples: list[Example], cached: tuple[int, ...], wanted: tuple[int, ...]
) -> list[Example]:
    """The examples with the features of `wanted` layers only, a part of the `cached` ones."""
    if wanted == cached:
        return examples
    missing = [layer for layer in wanted if layer not in cached]
    if missing:
        raise ValueError(f"features of layers {missing} are not cached; cached: {list(cached)}")
    width = examples[0].features.shape[1] // len(cached)
    places = torch.tensor([cached.index(layer) for layer in wanted])
    columns = (places[:, None] * width + torch.arange(width)).flatten()
    return [dataclasses.replace(e, features=e.features[:, columns]) for e in examples]
