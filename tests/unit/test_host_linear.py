"""Packed linear layers: the same numbers as F.linear, for every row alike."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from torch import nn
from torch.nn.functional import linear

from sglang_dspark.host.linear import PackedHeadMethod, PackedLinearMethod, PackedWeight, pack_model

DTYPES = [torch.float32]
if torch.ops.mkldnn._is_mkldnn_bf16_supported():
    DTYPES.append(torch.bfloat16)
BOTH = pytest.mark.parametrize("dtype", DTYPES)


class Layer(nn.Module):
    def __init__(self, method: object, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(weights.to(dtype), requires_grad=False)
        self.quant_method = method


class Model(nn.Module):
    """Two linear layers and a head that is the embedding too, as in small models."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed_tokens = Layer(UnquantizedEmbeddingMethod(), (100, 32), dtype)
        self.up = Layer(UnquantizedLinearMethod(), (64, 32), dtype)
        self.down = Layer(UnquantizedLinearMethod(), (32, 64), dtype)
        self.lm_head = self.embed_tokens


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(dtype)


@BOTH
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 31, 130])
def test_packed_layer_computes_what_linear_computes(dtype: torch.dtype, count: int) -> None:
    weight = rows(96, 64, dtype)
    x = rows(count, 64, dtype)
    bias = rows(1, 96, dtype)[0]
    exact = x.double() @ weight.double().T
    tolerance = 5e-5 if dtype == torch.float32 else 2e-1
    for added in (None, bias):
        out = PackedWeight(weight).apply(x, added)
        expected = exact if added is None else exact + added.double()
        assert out.dtype == dtype and out.shape == (count, 96)
        assert (out.double() - expected).abs().max() < tolerance


@BOTH
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or torch.cpu._is_amx_tile_supported(),
    reason="seen with oneDNN's AVX-512 kernels, not promised by others",
)
def test_a_row_comes_out_the_same_in_every_batch(dtype: torch.dtype) -> None:
    # What makes verified logits equal to decoded ones, to the last bit.
    packed = PackedWeight(rows(576, 1536, dtype))
    x = rows(64, 1536, dtype)
    together = packed.apply(x, None)
    for count in (1, 2, 3, 4, 7, 8, 33):
        assert torch.equal(packed.apply(x[:count], None), together[:count]), count


def test_rows_of_an_earlier_call_do_not_reach_a_later_one() -> None:
    packed = PackedWeight(rows(32, 64, torch.float32))
    x = rows(1, 64, torch.float32)
    expected = packed.apply(x, None)
    packed.apply(torch.full((3, 64), torch.nan), None)
    assert torch.equal(packed.apply(x, None), expected)


def test_inputs_keep_their_leading_dimensions_and_may_be_strided() -> None:
    packed = PackedWeight(rows(32, 64, torch.float32))
    x = rows(12, 128, torch.float32)[:, 64:].view(3, 4, 64)
    assert packed.apply(x, None).shape == (3, 4, 32)
    assert torch.equal(packed.apply(x, None).view(12, 32), packed.apply(x.reshape(12, 64), None))


@BOTH
def test_model_is_packed_with_its_tied_head(dtype: torch.dtype) -> None:
    model = Model(dtype)
    pack_model(model, free_bytes=2**30)
    assert type(model.up.quant_method) is PackedLinearMethod
    assert type(model.down.quant_method) is PackedLinearMethod
    assert type(model.lm_head.quant_method) is PackedHeadMethod
    tokens = torch.tensor([3, 99])
    assert torch.equal(
        model.embed_tokens.quant_method.embedding(model.embed_tokens, tokens),
        model.embed_tokens.weight[tokens],
    )


def test_packed_head_is_used_by_sglangs_logits() -> None:
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    model = Model()
    assert not should_apply_lm_head_quant_method(model.lm_head, model.lm_head.quant_method)
    pack_model(model, free_bytes=2**30)
    assert should_apply_lm_head_quant_method(model.lm_head, model.lm_head.quant_method)


def test_a_layer_that_was_given_another_weight_uses_that_one() -> None:
    # Drafts take over the target's embedding and head after they were loaded.
    model = Model()
    pack_model(model, free_bytes=2**30)
    x = rows(5, 32, torch.float32)
    model.up.weight = nn.Parameter(rows(64, 32, torch.float32), requires_grad=False)
    out = model.up.quant_method.apply(model.up, x)
    assert torch.equal(out, linear(x, model.up.weight))


def test_no_rows_give_no_rows() -> None:
    model = Model()
    pack_model(model, free_bytes=2**30)
    assert model.up.quant_method.apply(model.up, torch.empty(0, 32)).shape == (0, 64)


def test_a_packed_model_refuses_weight_updates() -> None:
    # Its packed copies would go on serving the old weights.
    from sglang.srt.model_executor.model_runner_components import weight_updater

    model = Model()
    assert weight_updater._unsupported_derived_weight_cache_error(model) is None
    pack_model(model, free_bytes=2**30)
    error = weight_updater._unsupported_derived_weight_cache_error(model)
    assert error is not None and "not supported on the host platform" in error


def test_weights_stay_unpacked_where_memory_is_short() -> None:
    model = Model()
    pack_model(model, free_bytes=1000)
    assert type(model.up.quant_method) is UnquantizedLinearMethod


def test_other_dtypes_and_shapes_stay_unpacked() -> None:
    model = Model(torch.float64)
    model.up.weight = nn.Parameter(torch.zeros(4, 4, 4), requires_grad=False)
    pack_model(model, free_bytes=2**30)
    assert type(model.up.quant_method) is UnquantizedLinearMethod
    assert type(model.down.quant_method) is UnquantizedLinearMethod
