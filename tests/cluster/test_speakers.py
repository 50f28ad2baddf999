"""Ranks that only speak: the samples, metrics and weights of a run without them, generation beside the learner, deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lemma.core.ranks import RankWorld, joined, rank
from tests.cluster.crew import Crew
from tests.cluster.test_rl_ranks import ALGORITHMS, recipe_of, samples
from tests.cluster.test_run_ranks import outcome, trained


def trained_or_spoken(content: dict[str, Any], learners: int, speakers: int) -> list[str]:
    """Run a recipe on this rank, speak for those that do, or take part in making groups only."""
    import torch.distributed as dist

    from lemma.cluster.speaker import speak
    from lemma.cluster.speaker_link import divided, groups_of

    size, said = learners + speakers, list[str]()
    group = dist.new_group(list(range(size)))
    if rank() >= size:
        if speakers:
            groups_of(learners, size, False, 60.0)
        return said
    world = RankWorld(rank(), size, 1, group, group)
    with joined(world):
        with divided(world, speakers, deadline=60.0) as mine:
            if mine.is_speaker:
                speak(mine, lambda event: said.append(str(event)))
            else:
                said = trained(content)
    return said


def run(crew: Crew, folder: Path, name: str, stage: dict[str, Any], learners: int, speakers: int, slots: int) -> Path:
    crew.run(4, trained_or_spoken, recipe_of(folder, name, stage, slots), learners, speakers)
    return folder / name


@pytest.mark.parametrize(("learners", "speakers", "slots"), [(1, 1, 1), (2, 2, 2)])
def test_the_same_as_one_process(crew: Crew, tmp_path: Path, learners: int, speakers: int, slots: int) -> None:
    stage = ALGORITHMS["grpo"] | {"validation": {"share": 0.25, "every": 2}}
    alone = run(crew, tmp_path, "alone", stage, 1, 0, slots)
    spoken = run(crew, tmp_path, "spoken", stage, learners, speakers, slots)
    assert outcome(spoken) == outcome(alone)
    assert samples(spoken) == samples(alone)
