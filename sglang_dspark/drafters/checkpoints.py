"""Draft checkpoints: read a layout into one internal description and check that it fits.

Reads config.json and the headers of the safetensors files only, so that a wrong draft stops the
launch within a second and before any weight is loaded.

Layout known today: DeepSpec's DSpark drafts (`Qwen3DSparkModel`): a stack of Qwen3 layers
(`layers.*`), the projection of the captured target features (`fc`, `hidden_norm`), the sequential
head (`markov_head.*`) and, optionally, the confidence head (`confidence_head.proj.*`). Embedding
and LM head are the target's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import read_json_object

if TYPE_CHECKING:
    from sglang_dspark.config import TargetModel

ARCHITECTURES = ("Qwen3DSparkModel",)
MARKOV_HEADS = ("vanilla", "gated", "rnn")
# Of the target, never loaded from a draft: weights that a checkpoint may carry and we skip.
_SHARED_WITH_TARGET = ("embed_tokens.", "lm_head.", "rotary_emb.")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DraftCheckpoint:
    """A DSPARK draft: what its config.json says, in the field's words.

    block_size:        gamma it was trained for (draft tokens per block).
    target_layer_ids:  0-based decoder layers of the target whose outputs it reads, increasing.
    num_target_layers: decoder layers of the target it was trained for.
    """

    path: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int
    markov_head_type: str
    has_confidence_head: bool
    confidence_with_markov: bool

    def check_fits(self, target: TargetModel) -> None:
        """Raise `ConfigError` unless the draft belongs to this target."""
        where = f"{self.path}/config.json"
        for field, own, of_target in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
        ):
            if own != of_target:
                raise ConfigError(
                    f"{where}: {field} is {own}, but the target (--model-path) has {of_target}: "
                    "this draft was made for another target"
                )
        # SGLang captures the output of layer k where layer k + 1 starts, so the last is out.
        last = target.num_layers - 2
        ids = self.target_layer_ids
        if any(not 0 <= i <= last for i in ids) or any(a >= b for a, b in itertools.pairwise(ids)):
            raise ConfigError(
                f"{where}: target_layer_ids is {list(ids)}; allowed are increasing ids of 0 to "
                f"{last} (the output of the target's last layer, {last + 1}, is not captured)"
            )
        if not 0 <= self.mask_token_id < target.vocab_size:
            raise ConfigError(
                f"{where}: mask_token_id is {self.mask_token_id}; "
                f"allowed are 0 to {target.vocab_size - 1}, the target's vocabulary"
            )

    def expected_weights(self) -> dict[str, Shape]:
        """Name and shape of every weight that the draft must carry."""
        h, m, r, v = self.hidden_size, self.intermediate_size, self.markov_rank, self.vocab_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights: dict[str, Shape] = {
            "fc.weight": (h, h * len(self.target_layer_ids)),
            "hidden_norm.weight": (h,),
            "norm.weight": (h,),
            "markov_head.markov_w1.weight": (v, r),
            "markov_head.markov_w2.weight": (v, r),
        }
        for i in range(self.num_layers):
            layer = f"layers.{i}."
            for name, rows, cols in (
                ("self_attn.q_proj", q, h),
                ("self_attn.k_proj", kv, h),
                ("self_attn.v_proj", kv, h),
                ("self_attn.o_proj", h, q),
            ):
                weights[f"{layer}{name}.weight"] = (rows, cols)
                if self.attention_bias:
                    weights[f"{layer}{name}.bias"] = (rows,)
            weights[layer + "self_attn.q_norm.weight"] = (self.head_dim,)
            weights[layer + "self_attn.k_norm.weight"] = (self.head_dim,)
            weights[layer + "mlp.gate_proj.weight"] = (m, h)
            weights[layer + "mlp.up_proj.weight"] = (m, h)
            weights[layer + "mlp.down_proj.weight"] = (h, m)
            weights[layer + "input_layernorm.weight"] = (h,)
            weights[layer + "post_attention_layernorm.weight"] = (h,)
        if self.markov_head_type == "gated":
            weights["markov_head.gate_proj.weight"] = (r, h + r)
            weights["markov_head.gate_proj.bias"] = (r,)
        if self.markov_head_type == "rnn":
            weights["markov_head.joint_proj.weight"] = (3 * r, 2 * r + h)
            weights["markov_head.joint_proj.bias"] = (3 * r,)
        if self.has_confidence_head:
            weights["confidence_head.proj.weight"] = (1, self.confidence_features)
            weights["confidence_head.proj.bias"] = (1,)
        return weights

    @property
    def confidence_features(self) -> int:
        """Input width of the confidence head: h_k, and W1[x_{k-1}] if it reads that too."""
        return self.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)

    def check_weights(self) -> None:
        """Raise `ConfigError` if a weight is missing, unknown or of another shape."""
        found = weight_shapes(self.path)
        expected = self.expected_weights()
        for name in sorted(expected):
            if name not in found:
                raise ConfigError(f"{self.path}: weight {name} {expected[name]} is missing")
            if found[name] != expected[name]:
                raise ConfigError(
                    f"{self.path}: weight {name} has shape {found[name]}, "
                    f"but config.json asks for {expected[name]}"
                )
        unknown = [
            name
            for name in sorted(found)
            if name not in expected and not name.startswith(_SHARED_WITH_TARGET)
        ]
        if unknown:
            raise ConfigError(
                f"{self.path}: weight {unknown[0]} has no place in a {self.architecture} with "
                f"{self.num_layers} layers, head {self.markov_head_type}"
                f"{'' if self.has_confidence_head else ' and no confidence head'}"
                + (f" ({len(unknown)} such weights)" if len(unknown) > 1 else "")
            )


def weight_shapes(path: str) -> dict[str, Shape]:
    """Shape of every weight of a checkpoint folder, by name without a leading `model.`."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path}: holds no *.safetensors file, so the draft has no weights")
    shapes: dict[str, Shape] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="numpy") as weights:
                for name in weights.keys():
                    shape = tuple(weights.get_slice(name).get_shape())
                    shapes[name.removeprefix("model.")] = shape
        except Exception as error:  # safetensors raises its own type, OSError or ValueError
            raise ConfigError(f"{file}: is not a readable safetensors file ({error})") from error
    return shapes


def read_checkpoint(path: str, *, flag: str) -> DraftCheckpoint:
    """Describe the draft in a local folder, or in a Hugging Face repository by its name."""
    folder = _local_folder(path, flag)
    missing = f"{flag} {path}: holds no config.json"
    raw = read_json_object(folder / "config.json", missing)
    return _parse(raw, folder)


def _local_folder(path: str, flag: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    # "owner/name" may be a repository of the hub; anything else was meant as a path.
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"{flag} is {path!r}: neither an existing folder nor a Hugging Face repository "
                f"that can be fetched ({reason})"
            ) from error
    raise ConfigError(f"{flag} is {path!r}: no such folder")


class _Fields:
    """Typed access to config.json; an error names the file, the field and what it must be."""

    def __init__(self, raw: dict[str, Any], file: Path) -> None:
        # Some exports nest the DSpark fields; the nested value wins, as in SGLang's reader.
        nested = {**(raw.get("dflash_config") or {}), **(raw.get("dspark_config") or {})}
        self._values = {**raw, **nested}
        self._file = file

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self._file}: field {name} is missing")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(
                f"{self._file}: {name} is {value!r}, but must be of type {kind.__name__}"
            )
        return value

    def count(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value: int = self.get(name, int, default)
        if value < minimum:
            raise ConfigError(f"{self._file}: {name} is {value}, but must be at least {minimum}")
        return value

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        value: str = self.get(name, str)
        if value.lower() not in allowed:
            raise ConfigError(f"{self._file}: {name} is {value!r}; allowed: {', '.join(allowed)}")
        return value.lower()


def _parse(raw: dict[str, Any], folder: Path) -> DraftCheckpoint:
    file = folder / "config.json"
    architectures = raw.get("architectures") or []
    architecture = architectures[0] if architectures else None
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file}: architectures is {architectures!r}; DSPARK serves {', '.join(ARCHITECTURES)}"
        )
    fields = _Fields(raw, file)
    markov_rank = fields.count("markov_rank", minimum=0)
    if markov_rank == 0:
        raise ConfigError(
            f"{file}: markov_rank is 0, so this draft has no sequential head; DSPARK needs one"
        )
    if not fields.get("sample_from_anchor", bool, True):
        raise ConfigError(
            f"{file}: sample_from_anchor is false, but only drafts that predict from the anchor "
            "on (true, the default) are served today"
        )
    layer_types = fields.get("layer_types", list, [])
    if any(kind != "full_attention" for kind in layer_types):
        raise ConfigError(
            f"{file}: layer_types is {layer_types}; served today: full_attention in every layer"
        )
    ids = fields.get("target_layer_ids", list)
    if not ids or any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise ConfigError(
            f"{file}: target_layer_ids is {ids!r}, but must be a list of layer numbers"
        )
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    has_confidence = fields.get("enable_confidence_head", bool, False)
    return DraftCheckpoint(
        path=str(folder),
        architecture=architecture,
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=fields.count("head_dim", hidden_size // num_heads),
        attention_bias=fields.get("attention_bias", bool, False),
        vocab_size=fields.count("vocab_size"),
        block_size=fields.count("block_size"),
        mask_token_id=fields.count("mask_token_id", minimum=0),
        target_layer_ids=tuple(ids),
        num_target_layers=fields.count("num_target_layers"),
        markov_rank=markov_rank,
        markov_head_type=fields.one_of("markov_head_type", MARKOV_HEADS),
        has_confidence_head=has_confidence,
        confidence_with_markov=has_confidence
        and fields.get("confidence_head_with_markov", bool, True),
    )
