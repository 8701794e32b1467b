"""The folder that SGLang opens in place of a draft whose layout it does not know.

All drafts go through SGLang's DSPARK, so the folder's config.json looks like a DSPARK draft of it,
with one of our architectures and the whole description beside the fields that SGLang reads. The
weights are links to the original files: our models know the names in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_dspark import __version__
from sglang_dspark.drafters.checkpoints.description import DraftCheckpoint
from sglang_dspark.drafters.checkpoints.reading import TRANSLATED
from sglang_dspark.drafters.checkpoints.weights import read_pickle, weight_files
from sglang_dspark.errors import ConfigError

BLOCK_ARCHITECTURE, CHAIN_ARCHITECTURE = "SparkBlockDraft", "SparkChainDraft"
GEMMA4_BLOCK_ARCHITECTURE = "SparkGemma4BlockDraft"


def served_folder(
    checkpoint: DraftCheckpoint, root: Path | None = None, positions: int = 0
) -> Path:
    """A folder that SGLang 0.5.23 can open: the draft's own if it can, or else a translated one.

    root: where translated folders are kept; default `drafts` in the user's cache. A folder is
    written once and reused as long as the draft's files are the same. positions: those of the
    target. SGLang refuses a draft of fewer, as many published ones are; beyond its own, a draft
    proposes less well and no worse happens.
    """
    if positions > checkpoint.max_position_embeddings:
        checkpoint = replace(checkpoint, max_position_embeddings=positions)
    elif _opens_as_it_is(checkpoint):
        return Path(checkpoint.path)
    original = Path(checkpoint.path).resolve()
    root = root or default_root()
    folder = root / f"{original.name}-{_fingerprint(checkpoint, original)}"
    if folder.is_dir() and all(file.exists() for file in folder.iterdir()):
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # its links point nowhere
    try:
        root.mkdir(parents=True, exist_ok=True)
        temp = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root))
    except OSError as error:
        raise ConfigError(
            f"{root}: cannot be written ({error}), but {checkpoint.path} has to be translated for "
            "SGLang; set XDG_CACHE_HOME to a folder that can"
        ) from error
    try:
        content = json.dumps(served_config(checkpoint), indent=1) + "\n"
        (temp / "config.json").write_text(content)
        _place_weights(original, temp)
        temp.chmod(0o755)
        try:
            os.rename(temp, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return folder


def is_translated(path: str) -> bool:
    """Whether `served_folder` wrote this folder."""
    try:
        raw = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and TRANSLATED in raw


def default_root() -> Path:
    """`sglang-dspark/drafts` in the user's cache, per the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is invalid and has to be ignored.
    cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return cache / "sglang-dspark" / "drafts"


def served_config(checkpoint: DraftCheckpoint) -> dict[str, Any]:
    """config.json of the translated folder."""
    rope = {"rope_type": "default", **(checkpoint.rope_scaling or {})}
    return {
        "architectures": [_architecture(checkpoint)],
        "model_type": "qwen3",
        "vocab_size": checkpoint.vocab_size,
        "hidden_size": checkpoint.hidden_size,
        "intermediate_size": checkpoint.intermediate_size,
        "num_hidden_layers": checkpoint.num_layers,
        "num_attention_heads": checkpoint.num_heads,
        "num_key_value_heads": checkpoint.num_kv_heads,
        "head_dim": checkpoint.head_dim,
        "hidden_act": checkpoint.hidden_act,
        "attention_bias": checkpoint.attention_bias,
        "rms_norm_eps": checkpoint.rms_norm_eps,
        "rope_parameters": {**rope, "rope_theta": checkpoint.rope_theta},
        "max_position_embeddings": checkpoint.max_position_embeddings,
        "layer_types": ["full_attention"] * checkpoint.num_layers,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "dtype": checkpoint.dtype,
        "block_size": checkpoint.block_size,
        "target_layer_ids": list(checkpoint.target_layer_ids),
        "num_target_layers": checkpoint.num_target_layers,
        "sample_from_anchor": checkpoint.sample_from_anchor,
        # SGLang wants a mask token and a sequential head of every DSPARK draft. Our models look at
        # the description instead.
        "mask_token_id": checkpoint.mask_token_id or 0,
        "markov_rank": max(checkpoint.markov_rank, 1),
        "markov_head_type": checkpoint.markov_head_type or "vanilla",
        TRANSLATED: checkpoint.as_dict(),
    }


def _architecture(checkpoint: DraftCheckpoint) -> str:
    if checkpoint.chain:
        return CHAIN_ARCHITECTURE
    return GEMMA4_BLOCK_ARCHITECTURE if checkpoint.style == "gemma4" else BLOCK_ARCHITECTURE


def _opens_as_it_is(checkpoint: DraftCheckpoint) -> bool:
    return (checkpoint.architecture, checkpoint.algorithm) == ("Qwen3DSparkModel", "DSPARK")


def _fingerprint(checkpoint: DraftCheckpoint, original: Path) -> str:
    """Of the description, and of the names, sizes and times of the weight files."""
    files = [(file.name, file.stat()) for file in weight_files(original)]
    content = {
        "release": __version__,
        "description": checkpoint.as_dict(),
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files],
    }
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _place_weights(original: Path, folder: Path) -> None:
    for file in (*weight_files(original), *original.glob("*.safetensors.index.json")):
        if file.suffix == ".bin":
            _convert(file, folder / f"{file.stem}.safetensors")
            continue
        link = folder / file.name
        try:
            link.symlink_to(file.resolve())
        except OSError:  # a file system without links
            shutil.copy(file, link)


def _convert(pickled: Path, file: Path) -> None:
    from safetensors.torch import save_file

    # Copies, since safetensors refuses weights that share memory.
    save_file({name: weight.clone() for name, weight in read_pickle(pickled).items()}, file)
