"""A grading worker, as the service sees it."""

from __future__ import annotations

import signal
from typing import Any

from lemma.children import PythonChild

START_SECONDS = 120.0


class GradingProcess(PythonChild):
    """One worker process. Owned by the thread that made it: on Linux it dies with that thread."""

    def __init__(self, cpu_seconds: float, megabytes: int):
        super().__init__("lemma.grading.worker:serve", is_watched=False, is_patient=True)
        self.send({"cpu_seconds": cpu_seconds, "megabytes": megabytes})
        self._seen = 0.0

    def receive(self, seconds: float) -> Any:
        """The next answer, or the greeting; only time without CPU use counts."""
        answer = super().receive(seconds)
        self._seen = self.cpu_seconds() or 0.0
        return answer

    def hit_cpu_limit(self) -> bool:
        """Whether it was killed by the CPU limit of its last task, which is more than requested on a slow machine; ends
        it."""
        self.end()
        if self.process.returncode != -signal.SIGXCPU:
            return False
        return self.cpu_at_end is None or self.cpu_at_end - self._seen >= self.greeting["cpu_seconds"]
