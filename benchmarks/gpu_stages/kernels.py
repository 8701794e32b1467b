"""Stage kernels: tests/gpu, and what the unit tests know of Triton kernels, by pytest.

Times that a test measures are properties of its report, from where they get into the JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from gpu_stages.settings import Result, Settings

ROOT = Path(__file__).parents[2]
# Beside tests/gpu: kernels against their references, here without the interpreter. On a CPU these
# are all that runs, and Triton interprets them.
UNIT = (
    "tests/unit/schedule/test_budget.py::test_the_kernel_equals_its_reference",
    "tests/unit/benchmarks/test_small_stack.py",
)
ALL_PASSED = 0


def run(settings: Settings, result: Result) -> None:
    paths = ["tests/gpu", *UNIT]
    report = settings.work / "kernels.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    result.set(paths=paths)
    done = subprocess.run(
        [*command, f"--junitxml={report}"],
        cwd=ROOT,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if not report.exists():
        result.problem(f"pytest ended with status {done.returncode} and wrote no report")
        return
    found = read_report(report)
    result.set(**found)
    if done.returncode != ALL_PASSED:
        result.problem(f"pytest: {found['failed']} of {found['run']} tests failed")


def read_report(file: Path) -> dict[str, Any]:
    """Counts, failures in one line each, and measured properties, from pytest's JUnit XML."""
    cases = list(ElementTree.parse(file).getroot().iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    failures = [
        {"test": name_of(case), "message": (found.get("message") or "").split("\n")[0]}
        for case in cases
        for kind in ("failure", "error")
        if (found := case.find(kind)) is not None
    ]
    measured = [
        {"test": name_of(case), "name": entry.get("name"), "value": value_of(entry)}
        for case in cases
        for entry in case.iter("property")
    ]
    return {
        "run": len(cases) - len(skipped),
        "skipped": len(skipped),
        "failed": len(failures),
        "failures": failures,
        "measured": measured,
    }


def name_of(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}.{case.get('name')}"


def value_of(entry: ElementTree.Element) -> Any:
    """Properties are text; those of our tests are JSON."""
    text = entry.get("value") or ""
    try:
        return json.loads(text)
    except ValueError:
        return text
