"""What an actor of Ray runs: a module of Python, as `python -m` would, that ends when the actor does.

python -m lemma.plugins.ray.ray_rank MODULE ARGUMENT...
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

WATCH_SECONDS = 0.5


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
