"""The out-of-tree SGLang platform for machines without an accelerator.

SGLang imports this module in every process of a server, before anything else is loaded,
so only torch and the light parts of SGLang may be imported at its top.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from platform import processor as machine_name
from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from sglang_dspark.host import threads

logger = logging.getLogger(__name__)

ENTRY_POINT = "sglang_dspark_host"  # the name that SGLANG_PLATFORM selects
BACKEND = "host"  # the name that --attention-backend selects

# Defaults of flags that SGLang would size for a whole accelerator. The KV cache shares the
# memory with everything else on the host and the radix cache fills it in time.
MAX_TOTAL_TOKENS = 65536
MAX_RUNNING_REQUESTS = 48  # as SGLang's default under speculation


def found_accelerator() -> str | None:
    """Name of the accelerator that SGLang would use on this machine, or None."""
    if torch.cuda.is_available():
        return "CUDA" if torch.version.hip is None else "ROCm"
    for name in ("xpu", "npu", "musa", "hpu", "mps"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name.upper()
    return None


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`: the platform's class name, or None.

    Never active beside CUDA or ROCm, not even when asked for by name: there the built-in
    platform serves and only the general plugin is used.
    """
    requested = os.environ.get("SGLANG_PLATFORM") == ENTRY_POINT
    found = found_accelerator()
    if found in ("CUDA", "ROCm"):
        if requested:
            logger.error(
                "SGLANG_PLATFORM=%s needs a machine without CUDA or ROCm, but %s is available: "
                "unset SGLANG_PLATFORM, or hide the devices with CUDA_VISIBLE_DEVICES=''.",
                ENTRY_POINT,
                found,
            )
        return None
    if found is not None and not requested:
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and not requested:
        return None  # the user wants SGLang's own CPU engine
    return f"{__name__}.HostPlatform"


def describe_cpu() -> str:
    """The processor's name and kind and the cores that may be used, e.g. for a cost table."""
    info = Path("/proc/cpuinfo")
    known: dict[str, str] = {}  # of the first processor
    for line in info.read_text().splitlines() if info.exists() else []:
        topic, _, what = line.partition(":")
        known.setdefault(topic.strip(), what.strip())
    name = known.get("model name") or machine_name()
    if known.keys() >= {"cpu family", "model"}:  # a virtual machine's name may be a brand's alone
        name += f" (family {known['cpu family']}, model {known['model']})"
    return f"{name}, {threads.usable_cores()} cores"


def is_active() -> bool:
    """Whether SGLang runs on the host platform in this process."""
    from sglang.srt.platforms import current_platform

    return isinstance(current_platform, HostPlatform)


def checkpoint_dtype(model_path: str) -> str | None:
    """The dtype that the config.json of a local checkpoint names."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    text = config.get("text_config") or {}
    for found in (config.get("dtype"), config.get("torch_dtype"), text.get("dtype")):
        if isinstance(found, str):
            return found
    return None


def _add_choice(known: list[str], name: str) -> None:
    if name not in known:
        known.append(name)


class HostPlatform(CpuDeviceMixin, SRTPlatform):
    """Device "cpu" with plain torch only: no Triton, no graphs, no AMX kernels."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        # SGLang rejects backend names outside these lists while it parses arguments,
        # and creates the platform before that.
        _add_choice(choices.ATTENTION_BACKEND_CHOICES, BACKEND)
        _add_choice(choices.DRAFT_ATTENTION_BACKEND_CHOICES, BACKEND)
        threads.prepare_children()

    def get_device(self, device_id: int = 0) -> Any:
        return "cpu"  # a string: SGLang takes this for the default of --device and splits it

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        if server_args.device != "cpu":
            return
        # SGLang has put "intel_amx" in place of an unset backend by now. That one needs
        # the CPU build of sgl-kernel, which this platform does without.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = BACKEND
        # "auto" would serve a float32 checkpoint in float16, slowly and less exactly.
        if server_args.dtype == "auto" and checkpoint_dtype(server_args.model_path) == "float32":
            server_args.dtype = "float32"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
        # An idle scheduler polls at full speed otherwise, on a core that others need.
        server_args.sleep_on_idle = True

    def get_default_attention_backend(self) -> str:
        return BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return BACKEND

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        from sglang_dspark.config import Algorithm

        return algorithm in list(Algorithm)  # SGLang's own workers launch CUDA kernels

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        from sglang_dspark.plugin import worker_class

        worker: type | None = worker_class(algorithm)
        return worker

    def get_speculative_cache_locs_fn(self) -> Any:
        from sglang_dspark.host.hooks import window_slots

        return window_slots

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from sglang_dspark.host.kv_pool import HostKVPool

        return HostKVPool

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sglang_dspark.host.linear import pack_model

        pack_model(model, free_bytes=self.get_available_memory()[0])

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(BACKEND)(_create_attention)
        threads.apply()


def _create_attention(runner: Any) -> Any:
    from sglang_dspark.host.attention import HostAttention

    return HostAttention(runner)
