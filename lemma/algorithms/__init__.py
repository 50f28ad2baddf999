"""Algorithms of reinforcement learning: one small file each, and the one registry of them."""

from typing import Any

from lemma.algorithms.algorithm import Algorithm, AlgorithmState, rewards_of
from lemma.algorithms.cispo import Cispo
from lemma.algorithms.dapo import Dapo
from lemma.algorithms.dr_grpo import DrGrpo
from lemma.algorithms.expert_iteration import ExpertIteration
from lemma.algorithms.grpo import Grpo
from lemma.algorithms.gspo import Gspo
from lemma.algorithms.loop import Loop
from lemma.algorithms.luffy import Luffy
from lemma.algorithms.ppo import Ppo
from lemma.algorithms.reinforce import Reinforce, ReinforceBaseline
from lemma.algorithms.rloo import Rloo
from lemma.config.registry import Registry

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithms",
    Algorithm,
    {
        "reinforce": Reinforce,
        "reinforce_baseline": ReinforceBaseline,
        "rloo": Rloo,
        "grpo": Grpo,
        "dr_grpo": DrGrpo,
        "dapo": Dapo,
        "gspo": Gspo,
        "cispo": Cispo,
        "loop": Loop,
        "ppo": Ppo,
        "luffy": Luffy,
        "expert_iteration": ExpertIteration,
    },
)


def __getattr__(name: str) -> Any:
    if name == "Memory":
        raise ImportError("Memory of lemma.algorithms is called AlgorithmState; import that")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmState", "rewards_of"]
