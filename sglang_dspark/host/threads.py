"""How many OpenMP threads a server process should use, and how they wait.

A server has three busy processes (tokenizer, scheduler, detokenizer), so on a small machine
an OpenMP thread often waits for one that the kernel has put aside. If it spins meanwhile,
which is the default, it takes the core that the other one needs.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def cgroup_cpus(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that the container's quota grants (cgroup v2, then v1); None without a quota."""
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1") or not quota.isdigit() or not int(period):
        return None
    return int(quota) / int(period)


def usable_cores() -> int:
    """Physical cores that this process may use, at least 1."""
    import psutil

    allowed = len(os.sched_getaffinity(0))
    logical = psutil.cpu_count(logical=True) or allowed
    physical = psutil.cpu_count(logical=False) or logical
    cores = max(1, allowed * physical // logical)
    quota = cgroup_cpus()
    return cores if quota is None else max(1, min(cores, int(quota)))


def prepare_children() -> None:
    """Settings of processes started from now on; what the user has set stays.

    OpenMP and MKL read their environment once, when they are loaded, which is before any
    plugin runs: the launcher sets it for the scheduler. OpenMP threads shall sleep while they
    wait.
    """
    if not any(name in os.environ for name in WAIT_SETTINGS):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # Without this MKL may round differently on the main thread than on the others.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def apply() -> None:
    """Sets the threads of this process, unless the user decided with OMP_NUM_THREADS."""
    if os.environ.get("OMP_NUM_THREADS"):
        return
    cores = usable_cores()
    if torch.get_num_threads() != cores:
        torch.set_num_threads(cores)
    logger.info("host platform: %d OpenMP threads", cores)
