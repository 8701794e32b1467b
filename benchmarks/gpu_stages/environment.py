"""Stage environment: what this machine is, and what of SGLang it can import."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import torch

from gpu_stages.settings import Result, Settings, one_line
from sglang_dspark import __version__
from sglang_dspark.host.platform import describe_cpu

PACKAGES = (
    *("sglang", "torch", "triton", "flashinfer-python", "sgl-kernel", "sglang-kernel"),
    *("transformers", "numpy", "safetensors"),
)
# Names of --attention-backend, with the module of SGLang that serves each.
BACKENDS = {
    "triton": "triton_backend",
    "fa3, fa4": "flashattention_backend",
    "flashinfer": "flashinfer_backend",
    "trtllm_mha": "trtllm_mha_backend",
    "torch_native": "torch_native_backend",
    "flex_attention": "torch_flex_backend",
}
# What the CUDA backends above call; imports of SGLang's that fail late.
KERNELS = ("sgl_kernel", "sgl_kernel.flash_attn", "flashinfer", "triton")
SMI_FIELDS = ("name", "driver_version", "memory.total", "clocks.max.sm", "power.limit", "mig.mode")


def run(settings: Settings, result: Result) -> None:
    result.set(
        sglang_dspark=own_version(),
        python=platform.python_version(),
        versions={name: version_of(name) for name in PACKAGES},
        machine={"cpu": describe_cpu(), "cores": len(os.sched_getaffinity(0)), "gpu": gpu()},
        nvidia_smi=nvidia_smi(),
    )
    if "sglang_dspark" not in {ep.name for ep in entry_points(group="sglang.srt.plugins")}:
        result.problem("sglang-dspark is not installed, so SGLang does not load it: pip install .")
    result.set(kernels={name: import_error(name) or "imports" for name in KERNELS})
    for name, module in BACKENDS.items():
        path = f"sglang.srt.layers.attention.{module}"
        result.append("backends", {"name": name, "imports": import_error(path) or "yes"})


def own_version() -> str:
    """`git describe` of this checkout; the package's version outside of one."""
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--tags"]
    if shutil.which("git"):
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return f"{__version__}, commit {done.stdout.strip()}"
    return __version__


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "count": torch.cuda.device_count(),
        "memory_gb": round(found.total_memory / 1e9, 1),
        "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
    }


def nvidia_smi() -> dict[str, str] | str:
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "not installed"
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        return (done.stderr or done.stdout).strip().split("\n")[0]
    values = done.stdout.strip().split("\n")[0].split(", ")
    return dict(zip(SMI_FIELDS, values, strict=True))


def import_error(module: str) -> str | None:
    """Why a module cannot be imported, in one line; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # extensions raise their own types
        return f"no: {type(error).__name__}: {one_line(error)}"
    return None
