"""Bad input stops a real launch with one clear line on stderr, before anything is loaded.

What each message says is tested in unit/test_config.py; here: that a launch ends with it.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from servers import MICRO, launch, speculative

pytestmark = pytest.mark.server

NOT_SERVED = "EAGLE speculative decoding is not supported by HostPlatform"
# What SGLang's launcher does before it loads anything, for one command line after the other.
RESOLVE = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
for argv in json.loads(sys.argv[1]):
    try:
        prepare_server_args(argv).resolve_once()
        print("no error")
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def test_the_launch_ends_with_one_line(noisy_pair):
    target, draft = noisy_pair
    ended = launch(target, *speculative(draft, "--speculative-num-draft-tokens", "9"))
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("sglang-dspark: error: "), ended.stderr[-2000:]
    assert "--speculative-num-draft-tokens is 9" in last and "2 to 8" in last
    assert "Traceback" not in ended.stderr


def test_every_check_is_reached_through_sglangs_arguments(noisy_pair, tmp_path):
    target, draft = noisy_pair
    calibration = tmp_path / "sts.json"
    calibration.write_text(json.dumps({"temperatures": [1.0] * 5}))
    flag, folder = "--speculative-draft-model-path", "/no/such/draft"
    calibrated = ["--speculative-dspark-confidence-sts-path", str(calibration)]
    cases = [
        (["--speculative-algorithm", "DSPARK"], "ConfigError", [f"{flag} is missing"]),
        (["--speculative-algorithm", "DFLASH"], "ConfigError", [f"{flag} is missing: DFLASH"]),
        (
            ["--speculative-algorithm", "DSPARK", flag, folder],
            "ConfigError",
            [f"{flag} is '{folder}'", "no such folder"],
        ),
        (["--speculative-algorithm", "EAGLE"], "ValueError", [NOT_SERVED]),
        (
            speculative(draft, "--attention-backend", "triton"),
            "ConfigError",
            ["--attention-backend is 'triton'", "(needs a GPU): use host"],
        ),
        # The last one: the mode becomes a variable of the process.
        (
            speculative(draft, "--speculative-verify-mode", "compact", *calibrated),
            "ConfigError",
            [calibrated[0], "5 entries; must be 7 numbers"],
        ),
    ]
    argvs = [["--model-path", str(target), *MICRO, *argv] for argv, _, _ in cases]
    code = [sys.executable, "-c", RESOLVE, json.dumps(argvs)]
    ended = subprocess.run(code, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(cases), ended.stdout
    for (argv, kind, words), (name, message) in zip(cases, found, strict=True):
        assert name == kind and all(word in message for word in words), (argv, name, message)


def test_another_sglang_version_stops_the_launch():
    """SGLang swallows exceptions of plugins; ours must not go unnoticed."""
    code = (
        "import importlib.metadata as m; real = m.version;"
        "m.version = lambda name: '0.5.24' if name == 'sglang' else real(name);"
        "from sglang.srt.plugins import load_plugins; load_plugins(); print('went on')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode != 0 and "went on" not in ended.stdout
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("sglang-dspark: error: sglang 0.5.24 is installed"), last
    assert "sglang==0.5.23" in last
