"""The table of attention backends says what SGLang's source says.

Most of SGLang's backends cannot be imported without a GPU, so their source is read.
"""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sglang_dspark.backends.table import (
    ALIASES,
    CPU_NAMES,
    TABLE,
    by_class,
    by_name,
    markdown,
    names,
)

ROOT = Path(__file__).parents[3]
SRT = Path(str(find_spec("sglang").origin)).parent / "srt"
OF_SGLANG = [line for line in TABLE if line.name != "host"]
READS = "ragged_verify_layout"


@cache
def sources() -> list[str]:
    folders = [SRT / "layers" / "attention", *SRT.glob("hardware_backend/*/attention")]
    return [path.read_text(encoding="utf-8") for root in folders for path in root.rglob("*.py")]


def source_of(kind: str) -> str:
    (found,) = [text for text in sources() if re.search(rf"^class {kind}\(", text, re.MULTILINE)]
    return found


@cache
def class_of(kind: str) -> ast.ClassDef:
    nodes = ast.parse(source_of(kind)).body
    return next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind)


def ancestors(kind: str) -> list[str]:
    """The class and those it is derived from, mixins left out, up to SGLang's base class."""
    (base,) = [x.id for x in class_of(kind).bases if x.id.endswith("Backend")]
    return [kind] if base == "AttentionBackend" else [kind, *ancestors(base)]


def flag_of(kind: str) -> bool:
    """`supports_ragged_verify_graph` of the class, inherited or not."""
    for name in ancestors(kind):
        for node in class_of(name).body:
            if isinstance(node, ast.AnnAssign) and node.target.id == "supports_ragged_verify_graph":
                assert isinstance(node.value, ast.Constant)
                return node.value.value
    return False


def ids(line):
    return f"{line.name}-{line.models}"


@pytest.mark.parametrize("line", OF_SGLANG, ids=ids)
def test_the_flag_is_that_of_sglangs_class(line):
    assert flag_of(line.kind) is line.flag


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("triton_backend", "TritonAttnBackend"),
        ("torch_native_backend", "TorchNativeAttnBackend"),
        ("intel_amx_backend", "IntelAMXAttnBackend"),
    ],
)
def test_reading_a_flag_in_the_source_is_as_good_as_importing_it(module, kind):
    found = getattr(importlib.import_module(f"sglang.srt.layers.attention.{module}"), kind)
    assert found.supports_ragged_verify_graph is flag_of(kind)


@pytest.mark.parametrize("line", [x for x in OF_SGLANG if x.eager and x.flag], ids=ids)
def test_a_class_that_has_ragged_windows_reads_the_layout(line):
    assert any(READS in source_of(kind) for kind in ancestors(line.kind))


@pytest.mark.parametrize(
    "line",
    [x for x in OF_SGLANG if not (x.eager and x.flag) and x.name != "flashinfer"],
    ids=ids,
)
def test_a_class_that_has_none_does_not_even_mention_it(line):
    assert READS not in source_of(line.kind)


def test_flashinfer_raises_under_graphs():
    assert "FlashInfer does not support ragged verify in cuda graph" in source_of(
        "FlashInferAttnBackend"
    )


def test_flashinfer_wants_the_sum_of_the_windows_on_the_host():
    """Eagerly, and for MLA under graphs too as soon as no slot of the tier is free."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    layout = RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=torch.tensor([2, 1]), graph_num_tokens=4
    )
    verify = DFlashVerifyInput(
        draft_token=torch.zeros(4, dtype=torch.int64),
        positions=torch.zeros(4, dtype=torch.int64),
        draft_token_num=4,
        ragged_verify_layout=layout,
    )
    with pytest.raises(TypeError, match="NoneType"):
        verify.generate_attn_arg_prefill(
            req_pool_indices=torch.tensor([1, 2]),
            paged_kernel_lens=torch.tensor([3, 5]),
            paged_kernel_lens_sum=8,
            translator=None,
            plan=None,
        )


def test_trtllm_mha_refuses_where_it_has_xqa_kernels():
    (line,) = [line for line in TABLE if line.name == "trtllm_mha"]
    (xqa,) = re.findall(r"self\.is_xqa_impl = (.*)", source_of(line.kind))
    assert set(re.findall(r"get_platform\(\)\.(\w+)", xqa)) == set(line.not_on)


@cache
def registry() -> dict[str, set[str]]:
    """Names of SGLang's registry, and what the functions behind them import."""
    found = {}
    source = (SRT / "layers" / "attention" / "attention_registry.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and call.func.id == "register_attention_backend":
                    imports = [x for x in ast.walk(node) if isinstance(x, ast.ImportFrom)]
                    found[call.args[0].value] = {a.name for x in imports for a in x.names}
    return found


def test_every_name_of_sglang_has_a_line():
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    here = {line.name for line in TABLE} | set(ALIASES)
    assert {line.name for line in OF_SGLANG} <= set(registry()) <= here
    assert set(ATTENTION_BACKEND_CHOICES) <= here


@pytest.mark.parametrize("line", [x for x in OF_SGLANG if x.name != "dsv4"], ids=ids)
def test_the_class_is_the_one_that_the_registry_makes(line):
    assert line.kind in registry()[line.name]


def test_a_name_may_stand_for_two_classes():
    assert by_name("flashinfer", mla=False).kind == "FlashInferAttnBackend"
    assert by_name("flashinfer", mla=True).kind == "FlashInferMLAAttnBackend"
    assert by_name("nsa", mla=True) is by_name("dsa", mla=True)
    assert by_name("of_somebody_else", mla=False) is None


def test_a_class_is_found_by_what_it_is_derived_from():
    base = type("TRTLLMHAAttnBackend", (), {})
    assert by_class(type("Mine", (base,), {})).name == "trtllm_mha"
    assert by_class(int) is None


def test_what_a_message_recommends_can_be_selected():
    for_mha, for_mla = names(ragged=True, mla=False), names(ragged=True, mla=True)
    assert for_mha == ["triton", "fa3", "fa4", "trtllm_mha (on SM100)"]
    assert for_mla == ["triton", "fa3", "fa4", "trtllm_mla", "cutedsl_mla"]
    assert not set(CPU_NAMES) & set(names(ragged=False))


def test_the_documentation_has_the_table():
    assert markdown() in (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")


def test_the_readme_names_what_compact_needs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name.split()[0]}`" in readme for name in names(ragged=True))


def test_the_readme_names_the_backends_that_serve_compact():
    (row,) = re.findall(r"^\| attention backends \|.*$", (ROOT / "README.md").read_text(), re.M)
    listed = re.search(r"`compact`: (.*), and a CPU's `host`", row)
    assert listed is not None
    assert listed[1].replace("`", "").split(", ") == names(ragged=True)
