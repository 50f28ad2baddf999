"""Training data from graded samples of a journal: of earlier stages, or of another run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.data.data_options import JOURNAL, DataOptions, journal_place
from lemma.data.load_rows import take
from lemma.rollouts.episode import Episode
from lemma.rollouts.journal_reader import list_journals, read_episodes
from lemma.runs.stage import Stage
from lemma.stages.supervised_options import ImitatedOptions


def graded_samples(place: Path, stages: Sequence[str] | None = None) -> Iterator[tuple[Path, Episode]]:
    """Every episode with a reward, and the file that contains it.

    For a run, `stages` are those whose samples to use, in this order; None: all of them.
    """
    for path in journals_in(place, stages):
        for sample in read_episodes(path):
            if sample.reward is not None and sample.finish != "cancelled" and len(sample.ids):
                yield path, sample


def imitated(stage: Stage, data: DataOptions, options: ImitatedOptions) -> list[list[Trajectory]]:
    """The episodes that are good enough, each as its trajectories, trained on the tokens that the policy sampled."""
    place = journal_place(data.source)
    assert place is not None, "a journal is named"
    where = Path(place).expanduser() if place else stage.folder.path
    episodes: list[list[Trajectory]] = []
    kept: dict[str, int] = {}
    seen: set[tuple[str, bytes]] = set()
    for _, sample in graded_samples(where, None if place else stage.earlier):
        assert sample.reward is not None
        said = (sample.problem_id, sample.ids.tobytes())
        if sample.reward < options.least_reward or (options.distinct and said in seen):
            continue
        if options.per_problem is not None and kept.get(sample.problem_id, 0) >= options.per_problem:
            continue
        seen.add(said)
        kept[sample.problem_id] = kept.get(sample.problem_id, 0) + 1
        episodes.append([_plain(one) for one in sample.trajectories()])
    if not episodes:
        raise UserError(
            f"stage {stage.name}: no sample in {where} has a reward of {options.least_reward:g} or more",
            fix="lower `journal.least_reward`, or take a run that did better",
        )
    return take(episodes, data, stage.seed, JOURNAL)


def _plain(one: Trajectory) -> Trajectory:
    """Ids and the mask of sampled tokens: imitation needs nothing else of a sample."""
    return Trajectory(one.ids_T, one.loss_mask_T, origin=one.origin, finish=one.finish, problem_id=one.problem_id)


def check_ids(largest: int, vocabulary: int, stage: Stage) -> None:
    """A journal holds token ids, which are only valid for the tokenizer that made them."""
    if largest >= vocabulary:
        raise UserError(
            f"stage {stage.name}: the data holds the token id {largest}, but the model has {vocabulary} tokens",
            fix="take the journal of a run whose model has the same tokenizer",
        )


def largest_id(arrays: Iterator[np.ndarray]) -> int:
    return max((int(ids.max()) for ids in arrays if len(ids)), default=0)


def journals_in(place: Path, stages: Sequence[str] | None) -> list[Path]:
    """The files of a journal: one file, those in a folder, or those written by the stages of a run."""
    if place.is_file():
        return [place]
    if stages is not None:
        folders = [place / "stages" / name / "journal" for name in stages]
        journals = [path for folder in folders for path in list_journals(folder.glob("*"))]
    elif (place / "recipe.yaml").is_file():
        journals = list_journals((place / "stages").glob("*/journal/*"))
    else:
        journals = list_journals(place.rglob("*"))
    if not journals:
        raise UserError(
            f"there is no journal in {place}",
            fix="name a run that sampled, or one of its journal files, after journal:",
        )
    return journals
