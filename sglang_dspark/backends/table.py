"""Attention backends x verify modes, by reading every backend of SGLang 0.5.23's registry.

`supports_ragged_verify_graph` of SGLang's classes is not the whole answer: some inherit it without
reading the windows, some read them on one GPU and refuse them on another, and some want numbers on
the host that this package's scheduler leaves on the device. So each line says what a class does
with `ragged_verify_layout`, and the tests hold the table against SGLang's source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Models = Literal["any", "MHA", "MLA", "one family"]


@dataclass(frozen=True)
class Backend:
    """What verify forwards one attention backend can run.

    name: what `--attention-backend` selects. kind: the class that SGLang makes of it; a name with
    one class for MHA (GQA and MQA included) and one for MLA has two lines.
    models: the attention that the class is for.
    uniform: whole windows, as static and cap-accept verify them.
    graphs, eager: ragged windows, replayed in CUDA graphs, and without.
    flag: what SGLang's class says of itself in `supports_ragged_verify_graph`.
    not_on: facts of SGLang's platform under which there are no ragged windows after all.
    """

    name: str
    kind: str
    models: Models
    uniform: bool
    graphs: bool
    eager: bool
    flag: bool
    why: str
    not_on: tuple[str, ...] = ()

    def ragged(self, with_graphs: bool) -> bool:
        """Whether compact works. With graphs too, a round that no tier holds runs eagerly."""
        return self.eager and (self.graphs or not with_graphs)


def _ragged(
    name: str, kind: str, models: Models, why: str, *, flag: bool = True, not_on: str = ""
) -> Backend:
    return Backend(name, kind, models, True, True, True, flag, why, tuple(not_on.split()))


def _uniform(name: str, kind: str, models: Models, why: str, *, flag: bool = False) -> Backend:
    return Backend(name, kind, models, True, False, False, flag, why)


def _none(name: str, kind: str, models: Models, why: str) -> Backend:
    return Backend(name, kind, models, False, False, False, False, why)


HOST = "host"
TABLE: tuple[Backend, ...] = (
    _ragged(
        "triton",
        "TritonAttnBackend",
        "any",
        "SGLang's takes all windows for W rows long; in compact a subclass that reads their "
        "lengths takes its place",
        flag=False,
    ),
    _ragged("fa3", "FlashAttentionBackend", "any", "reads them; eagerly with one host sync"),
    _ragged("fa4", "FlashAttentionBackend", "any", "as fa3"),
    _ragged(
        "trtllm_mha",
        "TRTLLMHAAttnBackend",
        "MHA",
        "reads them on SM100; the XQA kernels that it has on SM90 and SM120 refuse them",
        not_on="is_sm90 is_sm120",
    ),
    _ragged("trtllm_mla", "TRTLLMMLABackend", "MLA", "spreads rows to W a request and back"),
    _ragged("cutedsl_mla", "CuteDslMLABackend", "MLA", "as trtllm_mla"),
    _ragged("dsv4", "DeepseekV4AttnBackend", "one family", "reads them (DeepSeek V4)"),
    _uniform(
        "flashinfer",
        "FlashInferAttnBackend",
        "MHA",
        "raises under graphs; eagerly it wants the sum of the windows on the host, where it is not",
    ),
    _uniform(
        "flashinfer",
        "FlashInferMLAAttnBackend",
        "MLA",
        "wants the sum of the windows on the host, where it is not: eagerly always, under graphs "
        "when a batch takes every slot of its tier",
        flag=True,
    ),
    _uniform(
        "flashmla",
        "FlashMLABackend",
        "MLA",
        "inherits its flag, but takes all windows for W rows long",
        flag=True,
    ),
    _uniform("dsa", "DeepseekSparseAttnBackend", "one family", "takes W rows of every request"),
    _uniform("qsa", "QwenSparseAttnBackend", "one family", "takes W rows of every request"),
    _uniform("aiter", "AiterAttnBackend", "any", "takes the same number of rows of every request"),
    _uniform("ascend", "AscendAttnBackend", "any", "takes W rows of every request"),
    _uniform("intel_xpu", "XPUAttentionBackend", "any", "takes W rows of every request"),
    _uniform("intel_amx", "IntelAMXAttnBackend", "any", "takes W rows of every request"),
    _none("torch_native", "TorchNativeAttnBackend", "any", "has no verify forward"),
    _none("wave", "WaveAttnBackend", "any", "its verify forward wants the lengths of a prefill"),
    _none("flex_attention", "TorchFlexAttnBackend", "any", "SGLang refuses speculation with it"),
    _none("hpc_ops", "HPCOpsAttnBackend", "MHA", "SGLang refuses speculation with it"),
    _none("minicpm_flashattn", "MiniCPMSparseBackend", "one family", "raises on verify forwards"),
    _none("minicpm_flashinfer", "MiniCPMSparseBackend", "one family", "raises on verify forwards"),
    _none(
        "llada2_cfg_flashinfer",
        "LLaDA2CFGFlashInferAttnBackend",
        "one family",
        "is for diffusion language models",
    ),
    _ragged(
        HOST,
        "HostAttention",
        "MHA",
        "this package's, for machines without a GPU; tiers run eagerly in place of graphs",
        flag=False,
    ),
)

# Names that SGLang accepts for another one.
ALIASES = {"nsa": "dsa", "compressed": "dsv4", "tokenspeed_mla": "cutedsl_mla"}
CPU_NAMES = (HOST, "intel_amx")


def by_name(name: str, *, mla: bool) -> Backend | None:
    """The line of a name for a model with MLA, or without; None: not one of SGLang's."""
    lines = [line for line in TABLE if line.name == ALIASES.get(name, name)]
    for line in lines:
        if line.models == ("MLA" if mla else "MHA"):
            return line
    return lines[0] if lines else None


def by_class(kind: type) -> Backend | None:
    """The line of a class, or of the nearest class that it is derived from."""
    lines = {line.kind: line for line in TABLE}
    return next((lines[base.__name__] for base in kind.__mro__ if base.__name__ in lines), None)


def names(*, ragged: bool, mla: bool | None = None) -> list[str]:
    """What can be selected on a GPU for a model with MLA, or without (None: for any model)."""
    found: dict[str, None] = {}  # in the table's order, once each
    for line in TABLE:
        fits = mla is None or line.models in ("any", "MLA" if mla else "MHA")
        able = line.ragged(with_graphs=True) if ragged else line.uniform
        if fits and able and line.models != "one family" and line.name not in CPU_NAMES:
            found[line.name + (" (on SM100)" if ragged and line.not_on else "")] = None
    return list(found)


HEADER = "| backend | models | static, cap-accept | compact | without graphs | ragged windows |"


def markdown() -> str:
    """The table of docs/backends.md."""
    rows = [HEADER, "|---|---|---|---|---|---|"]
    for line in TABLE:
        able = " | ".join("yes" if x else "-" for x in (line.uniform, line.graphs, line.eager))
        rows.append(f"| {line.name} | {line.models} | {able} | {line.why} |")
    return "\n".join(rows)
