"""A world whose replies depend on what was said, and whose time does not matter, as a file that workers load."""

from __future__ import annotations

from pathlib import Path

WORLD = '''
import hashlib, pathlib, random, time
from lemma.environments import Environment, Outcome, Observation

class Lingering(Environment):
    """Takes up to `most` seconds for a reply, by chance, which changes nothing; a slow problem takes `slow` more."""

    def __init__(self, most=0.0, slow=0.0, notes=None):
        self.most, self.slow, self.notes = most, slow, notes

    def reset(self, problem, seed):
        self.total, self.turns, self.name = 0, 0, problem.id
        self.is_slow = problem.gold == "slow"
        if self.notes is not None:
            with open(self.notes, "a") as handle:
                handle.write(f"+{self.name}\\n")

    def step(self, said):
        time.sleep(random.random() * self.most + self.slow * self.is_slow)
        self.turns += 1
        self.total += int(hashlib.sha256(said.text.encode()).hexdigest(), 16) % 1000
        return Observation("how many pens ?" if self.total % 2 else "so", done=self.turns > 1 + self.total % 3)

    def score(self):
        return Outcome(float(self.total % 2), self.total % 2 == 1)

    def close(self):
        if self.notes is not None:
            with open(self.notes, "a") as handle:
                handle.write(f"-{self.name}\\n")
'''


def write_lingering(folder: Path) -> str:
    path = folder / "lingering_world.py"
    path.write_text(WORLD)
    return f"{path}:Lingering"
