"""Stage 5: the folder that SGLang loads as a DSPARK draft.

Field names and weight names are those that SGLang 0.5.23's `Qwen3DSparkModel` and DeepSpec read.
embed_tokens and lm_head are left out: SGLang attaches the target's own.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.recipe.draft import DraftConfig, DraftModel


def hf_config(config: DraftConfig) -> dict[str, Any]:
    """config.json of the exported draft."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **config.as_dict(),
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dtype": "bfloat16",
    }


def export(draft: DraftModel, folder: Path, readme: str | None = None) -> None:
    """Write config.json, model.safetensors (bfloat16) and README.md as one atomic step.

    An earlier export in `folder` is replaced; an interruption leaves either the old or the new one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    old = temp.with_name(temp.name + "-old")
    try:
        weights = {
            name: value.detach().to("cpu", torch.bfloat16).contiguous()
            for name, value in draft.state_dict().items()
        }
        save_file(weights, temp / "model.safetensors", metadata={"format": "pt"})
        (temp / "config.json").write_text(json.dumps(hf_config(draft.config), indent=2) + "\n")
        if readme is not None:
            (temp / "README.md").write_text(readme)
        # mkdtemp and save_file make them private to the user; a draft is data to share.
        for path in temp.iterdir():
            path.chmod(0o644)
        temp.chmod(0o755)
        if folder.exists():
            os.replace(folder, old)
        os.replace(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def load_draft(folder: Path) -> DraftModel:
    """Read an exported draft back, in float32."""
    values = json.loads((folder / "config.json").read_text())
    if values.get("architectures") != ["Qwen3DSparkModel"]:
        raise ValueError(
            f"{folder}/config.json: architectures is {values.get('architectures')}, "
            "must be ['Qwen3DSparkModel']"
        )
    draft = DraftModel(DraftConfig.from_dict(values))
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft.float().eval()
