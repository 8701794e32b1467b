"""At start a server serves the verify mode asked for, refuses in one line, or falls back."""

from __future__ import annotations

import logging
from importlib import import_module
from types import SimpleNamespace

import pytest

import micro
from sglang_dspark import config, plugin
from sglang_dspark.backends.choose import (
    Setup,
    check_backend,
    settle,
    settle_mode,
    verifying_name,
)
from sglang_dspark.config import VerifyMode
from sglang_dspark.errors import ConfigError

MODE, FALLBACK = "SGLANG_RAGGED_VERIFY_MODE", "SGLANG_SPEC_VERIFY_FALLBACK"
ASKED = "SGLANG_SPEC_ASKED_VERIFY_MODE"


def setup(name: str, **changes) -> Setup:
    fields = {"mla": False, "graphs": True, "cpu": False, **changes}
    return Setup(flag="--attention-backend", name=name, **fields)


def refusal(found: Setup, environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        settle(found, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- by name -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["compact", "cap-accept", "static"])
@pytest.mark.parametrize("name", ["triton", "fa3", "of_somebody_else"])
def test_what_can_be_served_is_served(name, mode):
    environ = {MODE: mode, FALLBACK: "static"}
    settle(setup(name), environ)
    assert environ == {MODE: mode, FALLBACK: "static"}


def test_a_refusal_names_the_flag_the_value_and_what_would_do():
    message = refusal(setup("flashinfer"), {MODE: "compact"})
    assert message.startswith("--attention-backend is 'flashinfer', which does not serve compact (")
    assert "raises under graphs" in message
    assert "use triton, fa3, fa4, trtllm_mha (on SM100), or" in message
    assert "--speculative-verify-mode static or cap-accept" in message
    assert "--speculative-verify-fallback" in message


def test_what_is_recommended_fits_the_target():
    assert "trtllm_mla" in refusal(setup("flashmla", mla=True), {MODE: "compact"})
    assert "trtllm_mla" not in refusal(setup("aiter"), {MODE: "compact"})


@pytest.mark.parametrize("mode", ["compact", "static"])
def test_without_a_verify_forward_no_mode_and_no_fallback_helps(mode):
    message = refusal(setup("torch_native"), {MODE: mode, FALLBACK: "static"})
    assert "has no verify forward" in message
    assert "--speculative-verify-mode" not in message


def test_kernels_of_another_gpu_count():
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_sm90=True, is_sm120=False):
        assert "XQA" in refusal(setup("trtllm_mha"), {MODE: "compact"})
    with override_platform(is_sm90=False, is_sm120=False):
        settle(setup("trtllm_mha"), {MODE: "compact"})


def test_a_gpus_backend_on_a_cpu():
    settle(setup("host", cpu=True), {MODE: "compact"})
    assert "(needs a GPU): use host" in refusal(setup("triton", cpu=True), {MODE: "static"})


@pytest.mark.parametrize("fallback", ["static", "cap-accept"])
def test_a_fallback_is_what_every_later_reader_sees(fallback, caplog):
    environ = {MODE: "compact", FALLBACK: fallback}
    with caplog.at_level(logging.WARNING):
        settle(setup("flashinfer"), environ)
    assert config.verify_mode(environ) == fallback
    assert config.asked_mode(environ) == "compact"
    assert f"compact was asked for, {fallback} is served" in caplog.text
    before = dict(environ)
    settle(setup("flashinfer"), environ)  # another process of the same server
    assert environ == before


def test_a_fallback_that_is_not_one_of_the_modes():
    message = refusal(setup("flashinfer"), {MODE: "compact", FALLBACK: "compact"})
    assert "--speculative-verify-fallback is 'compact'; must be one of none, cap-accept" in message


def test_flags_of_the_schedule_are_no_error_in_a_fallback(tmp_path):
    target = config.TargetModel(
        hidden_size=micro.HIDDEN, vocab_size=micro.VOCAB, num_layers=micro.TARGET_LAYERS
    )
    args = SimpleNamespace(
        speculative_algorithm="DSPARK",
        speculative_draft_model_path=str(micro.write_random(tmp_path)[1]),
        speculative_num_draft_tokens=None,
        speculative_dspark_block_size=None,
        speculative_num_steps=None,
        speculative_eagle_topk=None,
    )
    scheduled = {FALLBACK: "static", "SGLANG_SPEC_VERIFY_BUDGET": "0.5"}
    environ = {MODE: "compact", **scheduled}
    settle(setup("flashinfer"), environ)
    resolved = config.resolve(args, target, environ)
    assert resolved.mode is VerifyMode.STATIC
    assert resolved.describe().startswith("algorithm=DSPARK mode=static (asked for compact) ")
    with pytest.raises(ConfigError, match="no effect in verify mode static"):
        config.resolve(args, target, {MODE: "static", **scheduled})


@pytest.mark.parametrize(
    ("mode", "prefill", "decode", "expected"),
    [
        ("prefill", None, "fa3", ("--attention-backend", "flashinfer")),
        ("prefill", "triton", "fa3", ("--prefill-attention-backend", "triton")),
        ("decode", "triton", "fa3", ("--decode-attention-backend", "fa3")),
        ("decode", "triton", None, ("--attention-backend", "flashinfer")),
    ],
)
def test_verify_runs_where_sglang_is_told(mode, prefill, decode, expected):
    view = SimpleNamespace(
        attention_backend="flashinfer",
        prefill_attention_backend=prefill,
        decode_attention_backend=decode,
        speculative_attention_mode=mode,
    )
    assert verifying_name(view) == expected


def test_sglangs_arguments_are_read(monkeypatch):
    from sglang.srt.configs.model_config import AttentionArch

    monkeypatch.setenv(MODE, "compact")
    args = SimpleNamespace(
        _model_config=SimpleNamespace(attention_arch=AttentionArch.MLA),
        attention_backend="flashmla",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        speculative_attention_mode="prefill",
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend="full")),
        device="cuda",
    )
    with pytest.raises(ConfigError, match=r"'flashmla'.*use triton, fa3, fa4, trtllm_mla"):
        settle_mode(args)


# --- by the object -------------------------------------------------------------------------------


def sglangs(module: str, name: str):
    """A backend of SGLang, not initialised: that would need a GPU."""
    found = getattr(import_module(f"sglang.srt.layers.attention.{module}"), name)
    return object.__new__(found)


def flagged(name: str, flag: bool):
    return type(name, (), {"supports_ragged_verify_graph": flag})()


def test_only_our_triton_backend_has_ragged_windows():
    from sglang_dspark.backends.triton import TritonAttnBackend

    check_backend(object.__new__(TritonAttnBackend), VerifyMode.COMPACT)
    with pytest.raises(ConfigError, match="TritonAttnBackend does not read ragged windows"):
        check_backend(sglangs("triton_backend", "TritonAttnBackend"), VerifyMode.COMPACT)


def test_a_flag_that_is_only_inherited_is_not_believed():
    check_backend(flagged("FlashAttentionBackend", True), VerifyMode.COMPACT)
    for name in ("FlashMLABackend", "FlashInferMLAAttnBackend"):
        with pytest.raises(ConfigError, match=f"{name} does not read ragged windows"):
            check_backend(flagged(name, True), VerifyMode.COMPACT)
        check_backend(flagged(name, True), VerifyMode.CAP_ACCEPT)


def test_a_backend_of_somebody_else_is_believed():
    check_backend(flagged("Theirs", True), VerifyMode.COMPACT)
    with pytest.raises(ConfigError, match="Theirs does not read"):
        check_backend(flagged("Theirs", False), VerifyMode.COMPACT)
    check_backend(flagged("Theirs", False), VerifyMode.STATIC)


@pytest.mark.parametrize("mode", list(VerifyMode))
def test_without_a_verify_forward_there_is_no_speculation(mode):
    with pytest.raises(ConfigError, match="TorchNativeAttnBackend"):
        check_backend(sglangs("torch_native_backend", "TorchNativeAttnBackend"), mode)


@pytest.mark.parametrize(("on_decode", "able"), [(True, True), (False, False)])
def test_of_two_backends_the_one_that_verifies_counts(on_decode, able):
    both = sglangs("hybrid_attn_backend", "HybridAttnBackend")
    both.decode_backend = flagged("FlashAttentionBackend", True)
    both.prefill_backend = flagged("FlashInferAttnBackend", False)
    both.spec_attn_is_decode = on_decode
    if able:
        check_backend(both, VerifyMode.COMPACT)
    else:
        with pytest.raises(ConfigError, match="FlashInferAttnBackend does not read"):
            check_backend(both, VerifyMode.COMPACT)


# --- the registry --------------------------------------------------------------------------------


def test_in_compact_the_name_triton_builds_our_class_from_then_on(monkeypatch):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_dspark.backends import triton

    def sglangs(runner):
        return "SGLang's", runner

    monkeypatch.setitem(ATTENTION_BACKENDS, "triton", sglangs)
    monkeypatch.setattr(triton, "TritonAttnBackend", lambda runner: ("ours", runner))
    for mode in (VerifyMode.STATIC, VerifyMode.CAP_ACCEPT):
        plugin.register_backends(mode)
        assert ATTENTION_BACKENDS["triton"] is sglangs
    for _ in range(2):  # the second time changes nothing
        plugin.register_backends(VerifyMode.COMPACT)
    for encoder_decoder, whose in ((False, "ours"), (True, "SGLang's")):
        model_config = SimpleNamespace(is_encoder_decoder=encoder_decoder)
        runner = SimpleNamespace(model_config=model_config)
        assert ATTENTION_BACKENDS["triton"](runner) == (whose, runner)
