"""A target and a DSPARK draft of any size, made in seconds, whose acceptance is known and real.

A load on random weights accepts nothing, and simulated acceptance is not the same thing in two
implementations. Here the shapes are those of a published model and so is all that runs, but the
weights are such that the text is known beforehand:

- Target: every layer computes as usual but adds next to nothing to the residual stream (elements
  of o_proj and down_proj are 1e-7, not 0.02), and the row of lm_head for token v is the embedding
  of v - 1. So behind token x always comes x + 1 (mod V).
- Draft: the final norm scales the backbone's part of the logits down to nothing, and the
  sequential head alone decides: W2[v] = W1[v - 1] says x + 1 as well, but for a random part of the
  tokens W1 is that of another token, and the draft is wrong behind those.
- Confidence: one column of W1 holds logit(P), and the confidence head reads only that. P is the
  share of tokens that the draft is right behind: it is HIGH in the lower half of the vocabulary and
  LOW in the upper one, and a text stays in its half. The head is calibrated, and knows no more.

Draft token k is then accepted with probability P given that all before it were, at every position.
Weights are random beyond that, so that the chip has no easier work than with a trained model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpu_stages.pair_weights import (
    HIGH,
    LOW,
    OFF_BY,
    Shape,
    draft_config,
    draft_weights,
    target_config,
    target_weights,
)
from gpu_stages.servers import Request
from gpu_stages.settings import Settings

QWEN3_8B = Shape(
    name="qwen3-8b",
    hidden=4096,
    intermediate=12288,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    draft_layers=5,
    target_layer_ids=(1, 9, 17, 25, 33),
    rank=256,
    gamma=7,
    dtype="bfloat16",
    positions=40960,
)
TINY = Shape(
    name="qwen3-tiny",
    hidden=256,
    intermediate=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocab=1024,
    draft_layers=1,
    target_layer_ids=(0, 2),
    rank=128,
    gamma=7,
    dtype="float32",
    positions=4096,
)


@dataclass(frozen=True)
class Pair:
    """Folders of the checkpoints."""

    shape: Shape
    target: Path
    draft: Path


def prepare_pair(settings: Settings) -> Pair:
    """Write the pair, or find it: a folder that was written to its end is left as it is."""
    shape = TINY if settings.tiny else QWEN3_8B
    folder = settings.work
    pair = Pair(shape, folder / shape.name, folder / f"{shape.name}-dspark")
    done = folder / f"{shape.name}.json"
    if not done.exists():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        generator = torch.Generator(device).manual_seed(0)
        _write(pair.target, target_config(shape))
        # Pickled, since there tensors may share memory: all layers are one, and the file is small.
        torch.save(target_weights(shape, generator), pair.target / "pytorch_model.bin")
        _write(pair.draft, draft_config(shape))
        save_file(draft_weights(shape, generator), pair.draft / "model.safetensors")
        done.write_text(json.dumps(asdict(shape)))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the servers need it
    return pair


def requests(shape: Shape, count: int, prompt: int, length: int, seed: int) -> list[Request]:
    """Half of them in the high half of the vocabulary, taking turns; with the text they get."""
    rng = random.Random(seed)
    half, made = shape.vocab // 2, []
    for i in range(count):
        first = (i % 2) * half + rng.randrange(half - length - OFF_BY - 1)
        tokens = [rng.randrange(shape.vocab - 1) for _ in range(prompt - 1)]
        expected = list(range(first + 1, first + 1 + length))
        made.append(Request([*tokens, first], length, expected))
    return made


def accept_length(chances: Iterable[float]) -> float:
    """τ of whole windows: 1 + Σ_k Π_{i <= k} P_i, bonus included."""
    total = survival = 1.0
    for chance in chances:
        survival *= chance
        total += survival
    return total


def mixed_accept_length(gamma: int) -> float:
    """τ of `requests`: as many tokens come from either half, so their rounds add up."""
    high, low = (accept_length([chance] * gamma) for chance in (HIGH, LOW))
    return 2 / (1 / high + 1 / low)


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
