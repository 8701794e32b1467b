"""Bad input stops a real launch with one clear line on stderr, before anything is loaded.

What each message says is tested in unit/test_config.py; here: that a launch ends with it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from servers import launch, speculative

pytestmark = pytest.mark.server


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--speculative-algorithm", "DSPARK"], ["--speculative-draft-model-path is missing"]),
        (
            speculative("/no/such/draft"),  # type: ignore[arg-type]
            ["--speculative-draft-model-path is '/no/such/draft'", "no such folder"],
        ),
        (None, ["--speculative-num-draft-tokens is 9", "2 to 8"]),
    ],
    ids=["no draft path", "no such folder", "too many draft tokens"],
)
def test_the_launch_ends_with_one_line(noisy_pair, args, words):
    target, draft = noisy_pair
    if args is None:
        args = speculative(draft, "--speculative-num-draft-tokens", "9")
    ended = launch(target, *args)
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("sglang-dspark: error: "), ended.stderr[-2000:]
    assert all(word in last for word in words)
    assert "Traceback" not in ended.stderr


def test_an_algorithm_that_we_do_not_serve_here(noisy_pair):
    ended = launch(noisy_pair[0], "--speculative-algorithm", "DFLASH")
    assert ended.returncode != 0
    assert "DFLASH speculative decoding is not supported by HostPlatform" in ended.stderr


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
