"""What a step does is counted, and does not grow unseen. `make bench-cpu UPDATE=1` writes counts that are meant."""

from __future__ import annotations

import pytest
import torch

from benchmarks.counts import KINDS, Operators, calls_counted, growths, measured, read_stored
from lemma.core.random import key


@pytest.mark.slow
def test_no_count_of_a_step_has_grown() -> None:
    found = measured()
    stored = read_stored()
    assert set(found) == set(stored["counts"]), "counts came or went: `make bench-cpu UPDATE=1` writes them anew"
    grown = growths(found, stored)
    assert not grown, "; ".join(grown)
    assert measured(["engine"]) == {name: count for name, count in found.items() if name.startswith("engine")}


def test_a_count_that_grows_is_named_with_what_it_grew_by() -> None:
    stored = read_stored()
    name = "learner: operators of a further pack"
    before = stored["counts"][name]
    more = growths(
        stored["counts"] | {name: before * 1.5}, stored | {"torch": ".".join(torch.__version__.split(".")[:2])}
    )
    assert len(more) == 1 and more[0].startswith(f"{name}: {before * 1.5:g} where {before:g}") and "50.0%" in more[0]
    assert not growths(stored["counts"] | {name: before * 1.01}, stored), "a little is allowed"
    other = stored | {"torch": "1.0"}
    assert not growths(stored["counts"] | {name: before * 1.5}, other), "operators of another torch are not compared"
    calls = "engine: Python calls of a further token"
    assert growths(stored["counts"] | {calls: 2 * stored["counts"][calls]}, other)


def test_operators_reads_copies_and_calls_are_what_they_are_called() -> None:
    x = torch.arange(6.0)
    with Operators() as operators:
        y = x.view(2, 3) + 1
        assert bool(y.sum() > 0)
        y.clone().tolist()
    assert (operators.computed, operators.reads, operators.bytes) == (5, 2, 24)
    assert torch.Tensor.tolist is torch._C.TensorBase.tolist
    with calls_counted() as calls:
        key(1, "a")
        [key(1, name) for name in "bc"]
    assert calls["key"] == 3
    assert set(KINDS) == {"learner", "engine", "handling", "stage"}
