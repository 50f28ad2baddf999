"""Runs a module of Python, as `python -m` would, in a process that ends with the one that started it.

python -m lemma.engines.remote.run_module MODULE ARGUMENT...
"""

from __future__ import annotations

import runpy
import sys

from lemma.engines.remote.server_guard import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
