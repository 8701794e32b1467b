"""The headers of a draft's weight files, and whether they hold what its config.json promises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from sglang_dspark.drafters.checkpoints.description import DraftCheckpoint, Shape
from sglang_dspark.errors import ConfigError

if TYPE_CHECKING:
    import torch

Integers = npt.NDArray[np.integer[Any]]

# Weights that a checkpoint may carry and we load only if it is its own: the target's, copies of
# them that only training needs, and the two maps between vocabularies, one of which is enough.
_IGNORED = (
    *("embed_tokens.", "lm_head.", "target_embed_tokens.", "target_lm_head."),
    *("verifier_lm_head.", "verifier_norm.", "rotary_emb.", "t2d", "d2t", "unused."),
)


def weight_files(path: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint folder; without any, PyTorch's, as SafeAILab publishes
    its drafts. Raises ConfigError if there are none of either."""
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        if files := sorted(Path(path).glob(pattern)):
            return files
    raise ConfigError(f"{path}: holds no *.safetensors file, so the draft has no weights")


def weight_shapes(path: str | Path) -> dict[str, Shape]:
    """Shape of every weight of a checkpoint folder, by its name in the files."""
    shapes: dict[str, Shape] = {}
    for file in weight_files(path):
        try:
            shapes |= _pickled_shapes(file) if file.suffix == ".bin" else _shapes(file)
        except Exception as error:  # safetensors and pickle raise their own types, OSError, ...
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            kind = "PyTorch" if file.suffix == ".bin" else "safetensors"
            raise ConfigError(f"{file}: is not a readable {kind} file ({reason})") from error
    return shapes


def _shapes(file: Path) -> dict[str, Shape]:
    with safe_open(str(file), framework="numpy") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}


def _pickled_shapes(file: Path) -> dict[str, Shape]:
    return {name: tuple(weight.shape) for name, weight in read_pickle(file).items()}


def read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """The weights of a file of PyTorch, mapped into memory and not read before they are used."""
    import torch

    weights: dict[str, torch.Tensor] = torch.load(
        file, map_location="cpu", weights_only=True, mmap=True
    )
    return weights


def check_weights(checkpoint: DraftCheckpoint) -> None:
    """Raise `ConfigError` if a weight is missing, unknown, there twice, or of another shape."""
    path = checkpoint.path
    expected = checkpoint.weights()
    found: dict[str, tuple[str, Shape]] = {}
    for name, shape in sorted(weight_shapes(path).items()):
        ours = checkpoint.rename(name)
        if ours in found:
            raise ConfigError(f"{path}: weights {found[ours][0]} and {name} are one, {ours}")
        found[ours] = (name, shape)
    for ours, shape in sorted(expected.items()):
        if ours not in found:
            raise ConfigError(f"{path}: weight {checkpoint.name_in_files(ours)} {shape} is missing")
        name, is_shape = found[ours]
        if is_shape != shape:
            raise ConfigError(
                f"{path}: weight {name} has shape {is_shape}, but config.json asks for {shape}"
            )
    unknown = [
        name
        for ours, (name, _) in found.items()
        if ours not in expected and not ours.startswith(_IGNORED)
    ]
    if unknown:
        raise ConfigError(
            f"{path}: weight {unknown[0]} has no place in a {checkpoint.architecture} with "
            f"{_contents(checkpoint)}"
            + (f" ({len(unknown)} such weights)" if len(unknown) > 1 else "")
        )
    if checkpoint.maps_vocabulary:
        _check_vocabulary(checkpoint)


def _check_vocabulary(checkpoint: DraftCheckpoint) -> None:
    """Whether d2t is what the layout says: offsets to the draft's ids, or the target's ids."""
    maps = _read_integers(checkpoint, ("d2t", "t2d"))
    d2t, vocabulary = maps["d2t"].astype(np.int64), checkpoint.vocab_size
    ids = d2t + np.arange(len(d2t)) if checkpoint.d2t_offsets else d2t
    kind = "target id - draft id" if checkpoint.d2t_offsets else "the target's ids"
    reason = ""
    if ids.min() < 0 or ids.max() >= vocabulary:
        reason = f"names tokens {ids.min()} to {ids.max()} of the target, which has {vocabulary}"
    elif len(np.unique(ids)) < len(ids):
        reason = "names a token of the target twice"
    elif "t2d" in maps and maps["t2d"].shape == (vocabulary,) and not maps["t2d"][ids].all():
        reason = "names tokens that t2d does not"
    if reason:
        raise ConfigError(f"{checkpoint.path}: weight d2t {reason}; it must hold {kind}")


def _read_integers(checkpoint: DraftCheckpoint, names: tuple[str, ...]) -> dict[str, Integers]:
    found: dict[str, Integers] = {}
    for file in weight_files(checkpoint.path):
        if file.suffix == ".bin":
            pickled = read_pickle(file)
            found |= {ours: pickled[ours].numpy() for ours in names if ours in pickled}
            continue
        with safe_open(str(file), framework="numpy") as weights:
            for name in weights.keys():
                if (ours := checkpoint.rename(name)) in names:
                    found[ours] = weights.get_tensor(name)
    return found


def _contents(checkpoint: DraftCheckpoint) -> str:
    layers = f"{checkpoint.num_layers} layers"
    if checkpoint.chain:
        return f"{layers}, attention bias {checkpoint.attention_bias}"
    head = f"head {checkpoint.markov_head_type}" if checkpoint.markov_rank else "no sequential head"
    confidence = "" if checkpoint.has_confidence_head else " and no confidence head"
    return f"{layers}, {head}{confidence}"
