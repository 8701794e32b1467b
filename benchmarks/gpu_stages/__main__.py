"""One stage, in a process of its own: `python -m gpu_stages NAME SETTINGS.json RESULT.json`."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from gpu_stages.settings import Result, Settings, one_line


def main() -> int:
    name, settings_file, result_file = sys.argv[1:]
    settings, result = Settings.load(Path(settings_file)), Result(Path(result_file))
    try:
        importlib.import_module(f"gpu_stages.{name}").run(settings, result)
    except Exception as error:  # of any kind: it is what the stage has to tell
        traceback.print_exc()
        result.problem(one_line(error))
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
