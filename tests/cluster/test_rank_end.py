"""A rank that ends by an error: with its own code, after tidying up, whatever the threads of its groups do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, sys, threading
import torch.distributed as dist
from lemma.cli import main

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
threading.Thread(target=threading.Event().wait).start()  # stands for one that waits for a rank that is gone
atexit.register(print, "tidied up")
sys.argv[1:] = ["train", "nowhere.yaml"]
sys.exit(main())
"""


def test_it_says_one_sentence_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "meet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "tidied up\n"
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("lemma: "))
    assert "error: " in line and "nowhere.yaml" in line
