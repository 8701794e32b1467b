"""A target of two million parameters, trained in minutes on text that every Python carries.

The text is the beginning of the language reference behind `help()` (pydoc_data.topics). The model
learns it nearly by heart, so its own continuations are easy to draft; on other text they are not.
That gives tests and benchmarks what a small chat model cannot: high and mixed acceptance.

The trained target ships with the package (targets/tiny); `train_tiny_target` made it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_dspark.recipe.prompts import PROMPTS

FOLDER = Path(__file__).parent.parent / "targets" / "tiny"
EOS_TOKEN, MASK_TOKEN = "<|end|>", "<|mask|>"
VOCAB_SIZE = 2048
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
CONTEXT = 256
# As much as drafts of a million parameters learn in minutes.
TEXT_CHARACTERS = 120_000
# Topics whose first words serve as held-out prompts of the model's own kind are trained on too:
# what is held out is the place where the excerpt starts.
HELD_OUT_PROMPTS = 20


def prepare_tiny_target() -> Path:
    """The folder of the shipped target."""
    if not (FOLDER / "model.safetensors").exists():
        raise FileNotFoundError(f"{FOLDER}: no model.safetensors; `train_tiny_target` makes it")
    return FOLDER


def help_text() -> str:
    """The help topics of this Python in alphabetical order, TEXT_CHARACTERS of them."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

    return "\n".join(topics[name] for name in sorted(topics))[:TEXT_CHARACTERS]


def training_ids(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(help_text(), add_special_tokens=False, verbose=False).input_ids
    return ids


def held_out_prompts(tokenizer: Any) -> dict[str, list[list[int]]]:
    """help: excerpts that start at places of their own (never those of the training data's random
    draws, which are 8 to 48 tokens; these are 64). other: the demo model's prompts."""
    ids = training_ids(tokenizer)
    step = len(ids) // (HELD_OUT_PROMPTS + 1)
    own = [ids[i * step : i * step + 64] for i in range(1, HELD_OUT_PROMPTS + 1)]
    texts = [text for of_kind in PROMPTS.values() for text in of_kind[:5]]
    other = [list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    return {"help": own, "other": other}


def train_tokenizer() -> Any:
    """Byte-level BPE of 2048 tokens on the help text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN, MASK_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([help_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS_TOKEN, pad_token=EOS_TOKEN
    )


def train_tiny_target(
    folder: Path, steps: int, rows: int = 8, learning_rate: float = 2e-3, seed: int = 0
) -> float:
    """Train and write the target; returns the mean loss of the last 50 steps, nats a token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer()
    ids = torch.tensor(training_ids(tokenizer))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        **SHAPE,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("tiny target", total=steps, note="")
        for step in range(steps):
            rate = learning_rate * min(1.0, (step + 1) / 100)
            rate *= 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = rate
            starts = torch.randint(len(ids) - CONTEXT - 1, (rows,), generator=generator)
            block = torch.stack([ids[start : start + CONTEXT + 1] for start in starts.tolist()])
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=block[:, :-1]).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), block[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            progress.update(task, advance=1, note=f"loss {losses[-1]:.3f}")
    _save(model, tokenizer, folder)
    return sum(losses[-50:]) / len(losses[-50:])


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """As one atomic step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tiny-") as parent:
        temp = Path(parent) / "target"
        model.to(torch.bfloat16).save_pretrained(temp)
        tokenizer.save_pretrained(temp)
        config = json.loads((temp / "config.json").read_text())
        (temp / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in temp.iterdir():
            file.chmod(0o644)
        os.replace(temp, folder)
