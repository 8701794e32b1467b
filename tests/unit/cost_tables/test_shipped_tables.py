"""The shipped tables: readable, complete, and part of what is installed; and what is near."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from setuptools import Distribution

from cost_tables import CostModel, Fingerprint, load_table
from cost_tables.files import family
from sglang_dspark.host.platform import describe_cpu
from sglang_dspark.schedule.cost_source import SHIPPED

ROOT = Path(__file__).parents[3]


def test_every_shipped_table_is_complete() -> None:
    for path in SHIPPED.glob("*.json"):
        table = load_table(path)
        assert table.fingerprint is not None, path
        assert isinstance(table.cost.drafted, CostModel), path
        assert table.cost.plain is not None, f"{path}: would never skip the draft"
        assert table.median_error is not None and table.median_error < 0.25, path


def test_no_two_shipped_tables_are_of_the_same() -> None:
    made_on = [load_table(path).fingerprint for path in SHIPPED.glob("*.json")]
    assert len(made_on) == len(set(made_on))


def test_whatever_lies_beside_them_is_installed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As setuptools finds the files of a package for a wheel, but for what git alone would add."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files(["pyproject.toml"])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    build.manifest_files = {}
    packed = {Path(name).resolve() for name in build.find_data_files("cost_tables", "cost_tables")}
    there = {path.resolve() for path in SHIPPED.iterdir() if path.is_file()}
    assert there and there <= packed


# --- what is near ---------------------------------------------------------------------------------

A100 = "NVIDIA A100-SXM4-80GB"
EPYC = "AMD EPYC (family 25, model 17), 2 cores"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (A100, "NVIDIA A100 80GB PCIe", True),
        (A100, "NVIDIA A100-PCIE-40GB", True),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", True),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H200", False),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", False),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4080", False),
        ("NVIDIA L40", "NVIDIA L40S", False),
        (EPYC, "AMD EPYC 9R14 (family 25, model 17), 2 cores", True),
        (EPYC, "AMD EPYC (family 25, model 17), 12 cores", False),
        (EPYC, "AMD EPYC (family 25, model 1), 2 cores", False),
        ("Cortex-A72, 4 cores", "Cortex-A76, 4 cores", False),
        ("cpu", "gpu", False),
    ],
)
def test_families_of_devices(a: str, b: str, same: bool) -> None:
    assert (family(a) == family(b)) == same


def test_a_processor_is_described_by_more_than_its_brand() -> None:
    """Virtual machines tell "AMD EPYC" of processors with and without bfloat16 arithmetic."""
    found = describe_cpu()
    assert re.search(r", \d+ cores$", found)
    info = Path("/proc/cpuinfo").read_text()
    if "cpu family" in info:
        assert re.search(r"\S \(family \d+, model \d+\), \d+ cores$", found)
        assert family(found).startswith("(family ")


HERE = Fingerprint(A100, "hidden 64", "bfloat16", 1, 7, "FlashAttentionBackend")


@pytest.mark.parametrize(
    ("changes", "serves"),
    [
        ({}, True),
        ({"device": "NVIDIA A100 80GB PCIe"}, True),
        ({"gamma": 15}, True),
        ({"gamma": 5}, False),
        ({"device": "NVIDIA H100 80GB HBM3"}, False),
        ({"model": "hidden 128"}, False),
        ({"dtype": "float32"}, False),
        ({"tp": 2}, False),
        ({"backend": "FlashInferAttnBackend"}, False),
    ],
    ids=str,
)
def test_near_are_another_board_of_the_same_chip_and_a_longer_block(
    changes: dict[str, object], serves: bool
) -> None:
    assert replace(HERE, **changes).serves(HERE) == serves  # type: ignore[arg-type]
