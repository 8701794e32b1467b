"""Typed access to config.json; errors name the file, the field, its value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError

# Kinds of RoPE scaling that SGLang computes.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_DTYPES = ("float32", "float16", "bfloat16")


class Fields:
    """The fields of config.json, or of one object in it (`prefix` then is its name and a dot)."""

    def __init__(self, values: dict[str, Any], file: Path, prefix: str = "") -> None:
        self.values = values
        self.file = file
        self.prefix = prefix

    def refuse(self, name: str, value: object, allowed: str) -> ConfigError:
        """The error to raise for a value that cannot be served."""
        return ConfigError(f"{self.file}: {self.prefix}{name} is {value!r}, but {allowed}")

    def missing(self, name: str) -> ConfigError:
        return ConfigError(f"{self.file}: field {self.prefix}{name} is missing")

    def given(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.missing(name)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self.refuse(name, value, f"must be of type {kind.__name__}")
        return value

    def count(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value: int = self.get(name, int, default)
        if value < minimum:
            raise self.refuse(name, value, f"must be at least {minimum}")
        return value

    def optional_count(self, name: str, minimum: int = 1) -> int | None:
        return self.count(name, minimum=minimum) if self.given(name) else None

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.missing(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.refuse(name, value, "must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value: bool = self.get(name, bool, default)
        return value

    def one_of(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        value: str = self.get(name, str, default)
        if value.lower() not in allowed:
            raise ConfigError(
                f"{self.file}: {self.prefix}{name} is {value!r}; allowed: {', '.join(allowed)}"
            )
        return value.lower()

    def ids(self, name: str) -> tuple[int, ...]:
        """A list of layer numbers that is not empty."""
        value = self.get(name, list)
        if not value or any(not isinstance(i, int) or isinstance(i, bool) for i in value):
            raise self.refuse(name, value, "must be a list of layer numbers")
        return tuple(value)

    def section(self, name: str, missing: dict[str, Any] | None = None) -> Fields:
        """The object in field `name`."""
        return Fields(self.get(name, dict, missing), self.file, f"{self.prefix}{name}.")

    def must_be(self, name: str, allowed: tuple[object, ...], why: str) -> None:
        """Refuse a field that is given and has another value."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise self.refuse(name, value, why)


def layers(config: Fields) -> dict[str, Any]:
    """What all layouts name as transformers does: fields of `DraftCheckpoint` by name."""
    hidden_size = config.count("hidden_size")
    num_heads = config.count("num_attention_heads")
    full_attention(config)
    if config.given("quantization_config"):
        raise ConfigError(
            f"{config.file}: {config.prefix}quantization_config is given, but quantized drafts "
            "are not served"
        )
    theta, scaling = rope(config)
    return {
        "num_layers": config.count("num_hidden_layers"),
        "hidden_size": hidden_size,
        "intermediate_size": config.count("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": config.count("num_key_value_heads", num_heads),
        "head_dim": config.count("head_dim", max(hidden_size // num_heads, 1)),
        "vocab_size": config.count("vocab_size"),
        "attention_bias": config.flag("attention_bias"),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.count("max_position_embeddings", 32768),
        "hidden_act": config.one_of("hidden_act", ("silu",), "silu"),
        "dtype": dtype(config),
    }


def full_attention(config: Fields) -> None:
    kinds = config.get("layer_types", list, [])
    if any(kind != "full_attention" for kind in kinds):
        raise config.refuse("layer_types", kinds, "only full_attention in every layer is served")
    # Without layer_types transformers derives sliding layers from this flag.
    if not kinds:
        config.must_be("use_sliding_window", (False,), "only full attention is served")


def dtype(config: Fields) -> str:
    """transformers wrote torch_dtype before version 5."""
    name = "dtype" if config.given("dtype") else "torch_dtype"
    return config.one_of(name, _DTYPES, "bfloat16")


def rope(config: Fields) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling (None: none), from either spelling of transformers: rope_parameters since
    version 5, rope_theta beside rope_scaling before."""
    name = "rope_parameters" if config.given("rope_parameters") else "rope_scaling"
    found = config.section(name, {})
    if found.given("full_attention"):  # one set per kind of layer
        found = found.section("full_attention")
    theta_from = found if found.given("rope_theta") else config
    kind = str(found.values.get("rope_type") or found.values.get("type") or "default").lower()
    if kind == "mrope":
        kind = "default"
    if kind not in ROPE_TYPES:
        raise found.refuse("rope_type", kind, f"allowed are {', '.join(ROPE_TYPES)}")
    # Text has three equal ids a position in multimodal RoPE, so plain RoPE is the same. Behind an
    # image it is not: the draft is off there, and its tokens are rejected more often.
    dropped = ("rope_theta", "type", "mrope_section", "mrope_interleaved")
    scaling = {key: value for key, value in found.values.items() if key not in dropped}
    if kind != "proportional":
        for place in (found, config):
            place.must_be("partial_rotary_factor", (1, 1.0), "only whole heads are rotated")
        scaling.pop("partial_rotary_factor", None)
    theta = theta_from.number("rope_theta", 10000.0)
    return theta, None if kind == "default" else {**scaling, "rope_type": kind}
