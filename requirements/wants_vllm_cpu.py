"""Exit with 0 where the CPU build of vLLM can run: Linux on x86_64 with the CPU build of torch 2.13."""

import platform
import sys
from importlib import metadata

torch = metadata.version("torch")
fits = torch.startswith("2.13.") and torch.endswith("+cpu") and sys.version_info < (3, 15)
sys.exit(not (fits and platform.system() == "Linux" and platform.machine() == "x86_64"))
