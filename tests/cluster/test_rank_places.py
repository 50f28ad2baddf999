"""What a launcher's environment says about a rank, and what is wrong with it."""

from __future__ import annotations

import pytest

from lemma.cluster.rank_program import is_a_rank
from lemma.core.errors import UserError
from lemma.core.rank_place import RankPlace, place_of

NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def use(environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for pair in environment.split():
        monkeypatch.setenv(*pair.split("="))


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ("", None),
        ("RANK=0", None),
        ("WORLD_SIZE=1 RANK=0", None),
        ("WORLD_SIZE=2 RANK=1", RankPlace(1, 2, 0, 1)),
        ("WORLD_SIZE=8 RANK=5 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", RankPlace(5, 8, 1, 4)),
    ],
)
def test_places(environment: str, place: RankPlace | None, monkeypatch: pytest.MonkeyPatch) -> None:
    use(environment, monkeypatch)
    assert place_of() == place and is_a_rank() == (place is not None)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ("WORLD_SIZE=two RANK=0", "WORLD_SIZE is 'two', not a number in the environment"),
        ("WORLD_SIZE=2", "RANK is missing in the environment"),
        ("WORLD_SIZE=2 RANK=first", "RANK is 'first', not a number"),
        ("WORLD_SIZE=2 RANK=2", "RANK is 2, and WORLD_SIZE is 2"),
        ("WORLD_SIZE=2 RANK=-1", "RANK is -1, and WORLD_SIZE is 2"),
        ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=x", "LOCAL_RANK is 'x', not a number"),
    ],
)
def test_an_environment_that_cannot_be_is_one_sentence(
    environment: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(environment, monkeypatch)
    with pytest.raises(UserError, match=said):
        place_of()
