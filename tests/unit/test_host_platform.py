"""When the host platform is active, what it defaults, and the small pieces it is made of."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from sglang_dspark.host import hooks, kv_pool, platform, threads


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without accelerators and without settings; returns the patcher to change that."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE", *threads.WAIT_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    for name in ("MKL_CBWR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# Activation


def test_active_where_sglang_finds_no_accelerator(bare_machine: pytest.MonkeyPatch) -> None:
    assert platform.activate() == "sglang_dspark.host.platform.HostPlatform"


def test_active_when_asked_for_by_name(bare_machine: pytest.MonkeyPatch) -> None:
    bare_machine.setenv("SGLANG_PLATFORM", platform.ENTRY_POINT)
    assert platform.activate() is not None


@pytest.mark.parametrize("requested", [None, platform.ENTRY_POINT, "other"])
def test_never_active_beside_cuda(
    bare_machine: pytest.MonkeyPatch, requested: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    bare_machine.setattr(torch.cuda, "is_available", lambda: True)
    if requested:
        bare_machine.setenv("SGLANG_PLATFORM", requested)
    with caplog.at_level(logging.ERROR):
        assert platform.activate() is None
    # Asked for by name it says why, in one line; otherwise it is silent.
    expected = 1 if requested == platform.ENTRY_POINT else 0
    assert len(caplog.records) == expected
    assert all("CUDA is available" in record.message for record in caplog.records)


def test_never_active_beside_rocm(bare_machine: pytest.MonkeyPatch) -> None:
    bare_machine.setattr(torch.cuda, "is_available", lambda: True)
    bare_machine.setattr(torch.version, "hip", "6.2")
    bare_machine.setenv("SGLANG_PLATFORM", platform.ENTRY_POINT)
    assert platform.activate() is None


@pytest.mark.parametrize("accelerator", ["xpu", "mps"])
def test_another_accelerator_comes_first_unless_asked_for(
    bare_machine: pytest.MonkeyPatch, accelerator: str
) -> None:
    bare_machine.setattr(getattr(torch, accelerator), "is_available", lambda: True)
    assert platform.activate() is None
    bare_machine.setenv("SGLANG_PLATFORM", platform.ENTRY_POINT)
    assert platform.activate() is not None


def test_sglangs_own_cpu_engine_comes_first_unless_asked_for(
    bare_machine: pytest.MonkeyPatch,
) -> None:
    bare_machine.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None
    bare_machine.setenv("SGLANG_PLATFORM", platform.ENTRY_POINT)
    assert platform.activate() is not None


# Defaults of server arguments


def server_args(**given: object) -> SimpleNamespace:
    unset = {
        "device": "cpu",
        "attention_backend": "intel_amx",  # what SGLang puts where nothing was asked for
        "dtype": "auto",
        "model_path": "/nowhere",
        "max_total_tokens": None,
        "max_running_requests": None,
        "sleep_on_idle": False,
    }
    return SimpleNamespace(**{**unset, **given})


@pytest.fixture
def host(bare_machine: pytest.MonkeyPatch) -> platform.HostPlatform:
    return platform.HostPlatform()


def test_defaults_fill_what_the_user_left_open(host: platform.HostPlatform) -> None:
    args = server_args()
    host.apply_server_args_defaults(args)
    assert args.attention_backend == platform.BACKEND
    assert args.max_total_tokens == platform.MAX_TOTAL_TOKENS
    assert args.max_running_requests == platform.MAX_RUNNING_REQUESTS
    assert args.sleep_on_idle


def test_defaults_keep_what_the_user_chose(host: platform.HostPlatform) -> None:
    chosen = {
        "attention_backend": "torch_native",
        "dtype": "bfloat16",
        "max_total_tokens": 123,
        "max_running_requests": 4,
    }
    args = server_args(**chosen)
    host.apply_server_args_defaults(args)
    assert {name: getattr(args, name) for name in chosen} == chosen


def test_another_device_is_left_alone(host: platform.HostPlatform) -> None:
    args = server_args(device="xpu")
    host.apply_server_args_defaults(args)
    assert args == server_args(device="xpu")


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float32"}, "float32"),
        ({"text_config": {"dtype": "float32"}}, "float32"),
        ({"torch_dtype": "bfloat16"}, "auto"),
        ({}, "auto"),
        (None, "auto"),
    ],
)
def test_a_float32_checkpoint_is_served_in_float32(
    host: platform.HostPlatform, tmp_path: Path, config: dict[str, object] | None, dtype: str
) -> None:
    # SGLang's "auto" takes float16 for it, which is slow and inexact on a CPU.
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    args = server_args(model_path=str(tmp_path))
    host.apply_server_args_defaults(args)
    assert args.dtype == dtype


def test_backend_name_is_among_sglangs_choices_once(host: platform.HostPlatform) -> None:
    from sglang.srt.arg_groups import choices

    platform.HostPlatform()
    assert choices.ATTENTION_BACKEND_CHOICES.count(platform.BACKEND) == 1
    assert choices.DRAFT_ATTENTION_BACKEND_CHOICES.count(platform.BACKEND) == 1


# Threads


def cores(
    monkeypatch: pytest.MonkeyPatch,
    *,
    allowed: int,
    logical: int,
    physical: int | None,
    quota: float | None = None,
) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: counts[logical])
    counts = {True: logical, False: physical}
    monkeypatch.setattr(threads, "cgroup_cpus", lambda: quota)
    return threads.usable_cores()


def test_one_thread_per_physical_core_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cores(monkeypatch, allowed=2, logical=2, physical=2) == 2
    assert cores(monkeypatch, allowed=16, logical=16, physical=8) == 8
    assert cores(monkeypatch, allowed=4, logical=16, physical=8) == 2
    assert cores(monkeypatch, allowed=1, logical=16, physical=8) == 1
    assert cores(monkeypatch, allowed=6, logical=6, physical=None) == 6


def test_a_containers_quota_limits_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores(monkeypatch, allowed=16, logical=16, physical=16, quota=4.0) == 4
    assert cores(monkeypatch, allowed=16, logical=16, physical=16, quota=2.5) == 2
    assert cores(monkeypatch, allowed=16, logical=16, physical=16, quota=0.5) == 1
    assert cores(monkeypatch, allowed=2, logical=16, physical=16, quota=8.0) == 2


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "\n"}, None),
        ({}, None),
    ],
)
def test_quota_is_read_from_either_kind_of_cgroup(
    tmp_path: Path, files: dict[str, str], cpus: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads.cgroup_cpus(tmp_path) == cpus


def test_the_users_thread_count_stays(bare_machine: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    bare_machine.setattr(torch, "set_num_threads", called.append)
    bare_machine.setattr(threads, "usable_cores", lambda: torch.get_num_threads() + 1)
    threads.apply()
    assert called == [torch.get_num_threads() + 1]
    bare_machine.setenv("OMP_NUM_THREADS", "3")
    threads.apply()
    assert len(called) == 1


@pytest.mark.parametrize("setting", [None, *threads.WAIT_SETTINGS])
def test_threads_sleep_while_they_wait_unless_the_user_decided(
    bare_machine: pytest.MonkeyPatch, setting: str | None
) -> None:
    if setting:
        bare_machine.setenv(setting, "1")
    threads.prepare_children()
    waits = {name: os.environ.get(name) for name in threads.WAIT_SETTINGS}
    expected = {setting: "1"} if setting else {"OMP_WAIT_POLICY": "PASSIVE"}
    assert {name: value for name, value in waits.items() if value} == expected


# Hooks and KV pool


def test_new_slots_are_written_into_each_requests_row() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    start, end = torch.tensor([2, 0, 5]), torch.tensor([4, 0, 8])
    slots = torch.tensor([11, 12, 13, 14, 15])
    hooks.write_req_to_token(torch.tensor([3, 1, 0]), table, start, end, slots, 3)
    expected = torch.zeros(4, 10, dtype=torch.int32)
    expected[3, 2:4] = torch.tensor([11, 12], dtype=torch.int32)
    expected[0, 5:8] = torch.tensor([13, 14, 15], dtype=torch.int32)
    assert torch.equal(table, expected)


def test_last_slot_of_an_empty_request_is_minus_one() -> None:
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    last = hooks.last_slots(table, torch.tensor([2, 0, 1]), torch.tensor([3, 0, 10]))
    assert last.tolist() == [22, -1, 19]
    assert last.dtype == torch.int64


def test_every_hook_names_a_function_that_sglang_has() -> None:
    import pkgutil

    for hook in hooks.HOST_HOOKS:
        assert callable(pkgutil.resolve_name(hook.target)), hook.target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_zeros_are_zeros_that_take_no_memory(dtype: torch.dtype) -> None:
    before = psutil.Process().memory_info().rss
    zeros = kv_pool.lazy_zeros((1 << 20, 3, 64), dtype)
    assert zeros.nbytes >= 2**28
    assert psutil.Process().memory_info().rss - before < 2**26
    assert zeros.dtype == dtype and zeros.is_contiguous()
    zeros[12345] = 1
    assert zeros[12344:12347].sum() == 3 * 64
    assert kv_pool.lazy_zeros((0, 3), dtype).shape == (0, 3)
