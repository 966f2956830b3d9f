"""Run cases in a process with 64-bit numbers on.

Reads a JSON list of [folder, case name] from stdin and prints one JSON line a case:
[folder, case name, error text or null].
"""

import json
import sys
import traceback
from pathlib import Path

import jax

from tests.golden.case import Manifest
from tests.golden.families import run


def main() -> None:
    assert jax.config.jax_enable_x64, "start with JAX_ENABLE_X64=1"
    for root, name in json.load(sys.stdin):
        error = None
        try:
            run(Manifest(Path(root)).case(name))
        except Exception as caught:
            error = str(caught)
            if not isinstance(caught, AssertionError):
                error = traceback.format_exc()
        print(json.dumps([root, name, error]), flush=True)


if __name__ == "__main__":
    main()
