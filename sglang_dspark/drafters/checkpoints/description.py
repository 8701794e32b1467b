"""What a draft checkpoint is, in the field's words, whatever layout it was published in.

Every layout is read into one `DraftCheckpoint`. Weights have one set of names too, which our draft
models load (`layers.{i}.` and so on, see `DraftCheckpoint.weights`); a layout says how its own
names map to them.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from sglang_dspark.errors import ConfigError

if TYPE_CHECKING:
    from sglang_dspark.config import TargetModel

MARKOV_HEADS = ("vanilla", "gated", "rnn")

# How many layers an EAGLE3 draft reads that does not say which.
DEFAULT_FEATURES = 3

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft as its config.json describes it.

    Its place: path, the folder; layout, whose format it is in; architecture, as its config.json
    says; algorithm, what it is served as: DSPARK, DFLASH or EAGLE3.

    Its decoder layers: style, whose they are like. qwen3 has norms on queries and keys, llama has
    none, gemma4 has those, one on values, norms on both sides of attention and MLP, and a scalar.

    What it reads: target_layer_ids, 0-based decoder layers of the target whose outputs it reads,
    increasing; empty where the checkpoint leaves EAGLE3's usual three to its reader, see
    `for_target`; num_target_layers, of the target it was trained for (None: not stated).

    What it proposes: block_size, the gamma it was trained for. sample_from_anchor: the row of the
    anchor proposes the first token; otherwise only mask rows propose, and the block has one row
    more than tokens. parallel: EAGLE3 whose whole block is one forward (P-EAGLE).
    draft_vocab_size: tokens it can propose; less than vocab_size needs `d2t`, the target's id of
    each, or where d2t_offsets what to add to its own id. own_head, own_embedding: whether lm_head
    and embed_tokens are its own rather than the target's.
    """

    path: str
    layout: str
    architecture: str
    algorithm: Literal["DSPARK", "DFLASH", "EAGLE3"]
    style: Literal["qwen3", "llama", "gemma4"]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    target_hidden_size: int | None = None  # None: hidden_size
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    dtype: str = "bfloat16"  # of the weights
    mask_token_id: int | None = None
    sample_from_anchor: bool = True
    parallel: bool = False
    draft_vocab_size: int = 0  # 0: vocab_size
    own_head: bool = False
    own_embedding: bool = False
    d2t_offsets: bool = True
    # DSPARK
    markov_rank: int = 0
    markov_head_type: str = ""
    has_confidence_head: bool = False
    confidence_with_markov: bool = False
    # EAGLE3: on the features before fc, one norm over all ("whole") or one a layer ("each");
    # whether the residual of layer 0 is taken behind hidden_norm; whether normed states are fed
    # back.
    feature_norm: Literal["none", "whole", "each"] = "none"
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    # Gemma4: values are the keys before their norm; logits are soft-capped; embeddings are scaled.
    k_eq_v: bool = False
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    # names in the files -> our names, as (prefix, prefix) pairs; the first that matches is used
    renames: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.draft_vocab_size:
            object.__setattr__(self, "draft_vocab_size", self.vocab_size)
        if self.target_hidden_size is None:
            object.__setattr__(self, "target_hidden_size", self.hidden_size)

    @property
    def chain(self) -> bool:
        """EAGLE3's, whose layers read a token's embedding beside a hidden state."""
        return self.algorithm == "EAGLE3"

    @property
    def maps_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    @property
    def num_features(self) -> int:
        """Layers of the target that it reads."""
        return len(self.target_layer_ids) or DEFAULT_FEATURES

    @property
    def confidence_features(self) -> int:
        """Input width of the confidence head: h_k, and W1[x_{k-1}] if it reads that too."""
        return self.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        values = dict(values)
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
        values["renames"] = tuple((old, new) for old, new in values["renames"])
        return cls(**values)

    def for_target(self, num_layers: int) -> Self:
        """With the layers that EAGLE3 reads of a target of so many, if it names none itself."""
        if self.target_layer_ids:
            return self
        ids = (1, num_layers // 2 - 1, num_layers - 4)
        return replace(self, target_layer_ids=ids)

    def rename(self, name: str) -> str:
        """Our name of a weight in the files."""
        name = name.removeprefix("model.")
        for old, new in self.renames:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def name_in_files(self, ours: str) -> str:
        """What `rename` makes to `ours`, as far as a message needs it."""
        for old, new in self.renames:
            if ours.startswith(new):
                return old + ours.removeprefix(new)
        return ours

    def check_fits(self, target: TargetModel) -> None:
        """Raise `ConfigError` unless the draft belongs to this target."""
        if problems := self.misfits(target):
            raise ConfigError(problems[0])

    def misfits(self, target: TargetModel) -> list[str]:
        """What keeps the draft from serving this target, one line each."""
        where = f"{self.path}/config.json"
        problems = [
            f"{where}: {name} is {own}, but the target (--model-path) has {of_target}: "
            "this draft was made for another target"
            for name, own, of_target in (
                ("hidden_size", self.target_hidden_size, target.hidden_size),
                ("vocab_size", self.vocab_size, target.vocab_size),
                ("num_target_layers", self.num_target_layers, target.num_layers),
            )
            if own is not None and own != of_target
        ]
        # SGLang captures the output of layer k where layer k + 1 starts, so the last is out.
        last = target.num_layers - 2
        ids = self.for_target(target.num_layers).target_layer_ids
        if any(not 0 <= i <= last for i in ids) or any(a >= b for a, b in itertools.pairwise(ids)):
            problems.append(
                f"{where}: target_layer_ids is {list(ids)}; allowed are increasing ids of 0 to "
                f"{last} (the output of the target's last layer, {last + 1}, is not captured)"
            )
        mask = self.mask_token_id
        if mask is not None and not 0 <= mask < target.vocab_size:
            problems.append(
                f"{where}: mask_token_id is {mask}; "
                f"allowed are 0 to {target.vocab_size - 1}, the target's vocabulary"
            )
        return problems

    def weights(self) -> dict[str, Shape]:
        """Our name and the shape of every weight that the draft must carry."""
        h, m, v = self.hidden_size, self.intermediate_size, self.vocab_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        features = (self.target_hidden_size or h) * self.num_features
        weights: dict[str, Shape] = {"fc.weight": (h, features), "norm.weight": (h,)}
        if self.fc_bias:
            weights["fc.bias"] = (h,)
        if not self.chain:
            weights["hidden_norm.weight"] = (h,)
        if self.feature_norm == "whole":
            weights["input_norm.weight"] = (features,)
        if self.feature_norm == "each":
            for i in range(self.num_features):
                weights[f"fc_norm.{i}.weight"] = (self.target_hidden_size or h,)
        if self.parallel:  # stands in for the features of a position that is not known yet
            weights["mask_hidden"] = (1, 1, features)
        if self.own_embedding:
            weights["embed_tokens.weight"] = (v, h)
        for i in range(self.num_layers):
            layer = f"layers.{i}."
            width = 2 * h if self.chain and i == 0 else h
            for name, rows, cols in (
                ("self_attn.q_proj", q, width),
                ("self_attn.k_proj", kv, width),
                ("self_attn.v_proj", kv, width),
                ("self_attn.o_proj", h, q),
            ):
                if name == "self_attn.v_proj" and self.k_eq_v:
                    continue
                weights[f"{layer}{name}.weight"] = (rows, cols)
                if self.attention_bias:
                    weights[f"{layer}{name}.bias"] = (rows,)
            if self.style != "llama":
                weights[layer + "self_attn.q_norm.weight"] = (self.head_dim,)
                weights[layer + "self_attn.k_norm.weight"] = (self.head_dim,)
            weights[layer + "mlp.gate_proj.weight"] = (m, h)
            weights[layer + "mlp.up_proj.weight"] = (m, h)
            weights[layer + "mlp.down_proj.weight"] = (h, m)
            weights[layer + "input_layernorm.weight"] = (h,)
            weights[layer + "post_attention_layernorm.weight"] = (h,)
            if self.chain and i == 0:
                weights[layer + "hidden_norm.weight"] = (h,)
            if self.style == "gemma4":
                weights[layer + "pre_feedforward_layernorm.weight"] = (h,)
                weights[layer + "post_feedforward_layernorm.weight"] = (h,)
                weights[layer + "layer_scalar"] = (1,)
        if self.own_head:
            weights["lm_head.weight"] = (self.draft_vocab_size, h)
        if self.maps_vocabulary:
            weights["d2t"] = (self.draft_vocab_size,)
        if self.markov_rank:
            weights |= self._markov_weights(v)
        if self.has_confidence_head:
            weights["confidence_head.proj.weight"] = (1, self.confidence_features)
            weights["confidence_head.proj.bias"] = (1,)
        return weights

    def _markov_weights(self, vocabulary: int) -> dict[str, Shape]:
        h, r = self.hidden_size, self.markov_rank
        weights: dict[str, Shape] = {
            "markov_head.markov_w1.weight": (vocabulary, r),
            "markov_head.markov_w2.weight": (self.draft_vocab_size, r),
        }
        if self.markov_head_type == "gated":
            weights["markov_head.gate_proj.weight"] = (r, h + r)
            weights["markov_head.gate_proj.bias"] = (r,)
        if self.markov_head_type == "rnn":
            weights["markov_head.joint_proj.weight"] = (3 * r, 2 * r + h)
            weights["markov_head.joint_proj.bias"] = (3 * r,)
        return weights
