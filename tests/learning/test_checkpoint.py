"""A checkpoint is whole or it does not exist; the newest valid one is used; a full disk leaves the last good one."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lemma.core import faults
from lemma.core.errors import UserError
from lemma.learning import checkpoint as module
from lemma.learning import tensor_files
from lemma.learning.checkpoint import BrokenCheckpoint, CheckpointStore

TENSORS = "tensors.safetensors"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", 2, said.append)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"weight/a": torch.full((3, 4), float(step)), "optimiser/a/step": torch.tensor(float(step))}


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, tensors(step), {"learner": {"step": step}})
    store.wait()


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_what_is_saved_comes_back(store: CheckpointStore) -> None:
    half = torch.randn(5).bfloat16()
    transposed = torch.arange(6.0).reshape(2, 3).T
    store.save(7, {"half": half, "transposed": transposed}, {"learner": {"x": 0.1}})
    store.wait()
    found = store.newest()
    assert found is not None and found.step == 7
    assert torch.equal(found.tensors["half"], half) and torch.equal(found.tensors["transposed"], transposed)
    assert found.state == {"step": 7, "best": None, "learner": {"x": 0.1}}
    assert names(store) == ["step-00000007"]


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a few numbers were many."""
    monkeypatch.setattr(tensor_files, "FILE", 100)
    monkeypatch.setattr(tensor_files, "BLOCK", 32)


def many(step: int) -> dict[str, torch.Tensor]:
    odd = {"none": torch.empty(0), "one": torch.tensor(step), "yes": torch.tensor([True, False, True])}
    return odd | {f"weight/{n}": torch.arange(n * 7.0).add(step).bfloat16().reshape(7, n).T for n in range(1, 12)}


@pytest.mark.usefixtures("in_files")
def test_many_bytes_are_several_files(store: CheckpointStore, said: list[str]) -> None:
    for step in (1, 2):
        store.save(step, many(step), {})
    store.wait()
    files = sorted((store.folder / "step-00000002").glob("tensors-*"))
    assert [path.name for path in files] == [f"tensors-{number}.safetensors" for number in range(8)]
    sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in files]
    assert sum(sizes) == sum(tensor.nbytes for tensor in many(2).values()) and max(sizes) < 2 * min(sizes)
    found = store.newest()
    assert found is not None and found.step == 2 and found.tensors.keys() == many(2).keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in many(2).items())
    flip_a_bit(store.folder / "step-00000002", "tensors-5.safetensors")
    found = store.newest()
    assert found is not None and found.step == 1
    assert "(tensors-5.safetensors is not what was written)" in said[0]


@pytest.mark.usefixtures("in_files")
def test_one_of_several_files_that_cannot_be_written(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(1, many(1), {})
    store.wait()
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "checkpoint.mid_write:1:ENOSPC")
    store.save(2, many(2), {})
    with pytest.raises(UserError, match=r"No space left on device\); the one of step 1 is intact"):
        store.wait()
    assert names(store) == ["step-00000001"]


def test_nothing_saved_nothing_found(store: CheckpointStore) -> None:
    assert store.newest() is None and store.best() is None and store.steps() == []


def test_later_updates_do_not_reach_the_snapshot(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(4)

    def changed(snapshot: dict[str, torch.Tensor], path: Path) -> None:
        weight.fill_(2.0)
        write(snapshot, path)

    write = tensor_files.save_file
    monkeypatch.setattr(tensor_files, "save_file", changed)
    store.save(1, {"w": weight}, {})
    store.wait()
    found = store.newest()
    assert found is not None and found.tensors["w"].tolist() == [1.0] * 4 and weight[0] == 2.0


def test_tensors_that_share_memory(store: CheckpointStore) -> None:
    """8-bit optimisers share one table between all parameters, which safetensors refuses to write as it is."""
    table = torch.arange(4.0)
    store.save(1, {"a": table, "b": table}, {})
    store.wait()
    assert store.newest() is not None


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_the_newest_are_kept(store: CheckpointStore) -> None:
    save(store, 1, 2, 3, 10)
    assert store.steps() == [3, 10]
    assert names(store) == ["step-00000003", "step-00000010"]


def test_what_a_death_left_half_removed_is_gone_at_the_next_start(store: CheckpointStore) -> None:
    save(store, 1, 2)
    (store.folder / ".partial-removed-00000001").mkdir()
    newest = CheckpointStore(store.folder, 2, print).newest()
    assert newest is not None and newest.step == 2
    assert not list(store.folder.glob(".partial-*"))


def test_the_best_is_kept_as_well(store: CheckpointStore) -> None:
    save(store, 1)
    store.mark_best(2, 0.5, "loss")
    save(store, 2, 3, 4, 5)
    assert store.steps() == [2, 4, 5] and store.best() == {"step": 2, "score": 0.5, "metric": "loss"}
    store.mark_best(6, 0.4, "loss")
    save(store, 6)
    assert store.steps() == [5, 6]
    save(store, 7, 8)
    assert store.steps() == [6, 7, 8] and store.best() == {"step": 6, "score": 0.4, "metric": "loss"}


def test_a_best_that_never_reached_the_disk_is_not_the_best(store: CheckpointStore, said: list[str]) -> None:
    """Killed between the validation and the checkpoint: the mark is that of the checkpoint the run goes on from."""
    store.mark_best(1, 0.5, "loss")
    save(store, 1, 2)
    store.mark_best(3, 0.4, "loss")
    assert store.best() == {"step": 1, "score": 0.5, "metric": "loss"}
    again = CheckpointStore(store.folder, 2, said.append)
    assert again.newest() is not None
    save(again, 3, 4)
    assert again.steps() == [1, 3, 4]


def test_a_mark_that_the_kill_came_before(store: CheckpointStore, said: list[str]) -> None:
    """Killed between the rename of the best checkpoint and the mark: the checkpoint itself knows."""
    store.mark_best(1, 0.5, "loss")
    save(store, 1)
    store.mark_best(2, 0.4, "loss")
    save(store, 2)
    (store.folder / "best.json").write_text(json.dumps({"step": 1, "score": 0.5, "metric": "loss"}))
    again = CheckpointStore(store.folder, 1, said.append)
    assert again.newest() is not None and again.best() == {"step": 2, "score": 0.4, "metric": "loss"}
    save(again, 3, 4)
    assert again.steps() == [2, 4]


def test_the_same_step_again_replaces_it(store: CheckpointStore) -> None:
    save(store, 5)
    store.save(5, {"w": torch.tensor([9.0])}, {"learner": {}})
    store.wait()
    found = store.newest()
    assert found is not None and found.tensors["w"].item() == 9.0 and names(store) == ["step-00000005"]


# --- what is broken --------------------------------------------------------------------------------------------------


def flip_a_bit(folder: Path, name: str = "tensors.safetensors") -> None:
    data = bytearray((folder / name).read_bytes())
    data[-3] ^= 4
    (folder / name).write_bytes(bytes(data))


def cut_short(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def half_a_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:20])


def with_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_state(folder: Path, **changes: object) -> None:
    """As a state that belongs to another step, in a checkpoint that is consistent otherwise."""
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with_manifest(folder, files={name: module.fingerprint(folder / name) for name in (TENSORS, module.STATE)})


def older_over_newer(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-00000001"), folder)


BREAK: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (cut_short, "tensors.safetensors is not what was written"),
    "a bit flipped": (flip_a_bit, "tensors.safetensors is not what was written"),
    "a bit of the state flipped": (lambda f: flip_a_bit(f, "state.json"), "state.json is not what was written"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "No such file"),
    "half a manifest": (half_a_manifest, ""),
    "a manifest of something else": (lambda f: (f / "manifest.json").write_text("[]"), ""),
    "no tensors": (lambda f: (f / "tensors.safetensors").unlink(), "tensors.safetensors is missing"),
    "an empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "No such file"),
    "a file in its place": (lambda f: (shutil.rmtree(f), f.write_text("")), "Not a directory"),
    "a manifest without files": (lambda f: with_manifest(f, files={}), "its manifest names no files"),
    "files that are no mapping": (lambda f: with_manifest(f, files=["state.json"]), ""),
    "a manifest of half the files": (
        lambda f: with_manifest(f, files={"state.json": module.fingerprint(f / "state.json")}),
        "its manifest names state.json",
    ),
    "a manifest of another step": (lambda f: with_manifest(f, step=7), "it is that of step 7"),
    "a state of another step": (lambda f: with_state(f, step=7), "it is that of step 7"),
    "an older one copied over it": (older_over_newer, "it is that of step 1"),
    "from the future": (lambda f: with_manifest(f, format=3), "format 3, this version of Lemma reads 2 and less"),
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_one_is_reported_and_passed_over(store: CheckpointStore, said: list[str], how: str) -> None:
    save(store, 1, 2)
    act, why = BREAK[how]
    act(store.folder / "step-00000002")
    found = store.newest()
    assert found is not None and found.step == 1 and torch.equal(found.tensors["weight/a"], tensors(1)["weight/a"])
    assert len(said) == 1 and why in said[0]
    assert said[0].startswith("the checkpoint of step 2 is broken (") and said[0].endswith("); using an earlier one")
    assert names(store) == ["broken-00000002", "step-00000001"]
    assert store.newest() is not None and len(said) == 1, "said once"
    save(store, 2)
    assert store.steps() == [1, 2]


def test_broken_twice(store: CheckpointStore, said: list[str]) -> None:
    for _ in range(2):
        save(store, 1, 2)
        flip_a_bit(store.folder / "step-00000002")
        found = store.newest()
        assert found is not None and found.step == 1
    assert len(said) == 2


def test_all_broken(store: CheckpointStore, said: list[str]) -> None:
    save(store, 1, 2)
    for step in (1, 2):
        cut_short(store.folder / f"step-0000000{step}")
    assert store.newest() is None and len(said) == 2


def test_two_that_changed_places(store: CheckpointStore, said: list[str]) -> None:
    save(store, 1, 2)
    aside = store.folder.parent / "aside"
    for source, target in (("step-00000001", aside), ("step-00000002", "step-00000001"), (aside, "step-00000002")):
        (store.folder / source).rename(store.folder / target)
    assert store.newest() is None
    assert ["that of step 1" in said[0], "that of step 2" in said[1]] == [True, True]


def test_loading_one_of_them(store: CheckpointStore) -> None:
    save(store, 1, 2)
    assert store.load(1).step == 1
    flip_a_bit(store.folder / "step-00000001")
    with pytest.raises(BrokenCheckpoint, match="not what was written"):
        store.load(1)


def test_leftovers_of_a_crash_are_not_checkpoints_and_go_away(store: CheckpointStore, said: list[str]) -> None:
    save(store, 1)
    for name in (".partial-00000002", ".partial-removed-00000000"):
        shutil.copytree(store.folder / "step-00000001", store.folder / name)
    (store.folder / "step-tmp").mkdir()
    found = store.newest()
    assert found is not None and found.step == 1 and said == []
    save(store, 2)
    assert names(store) == ["step-00000001", "step-00000002", "step-tmp"]


# --- what cannot be written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["mid_write", "before_sync", "before_rename"])
def test_a_full_disk_leaves_the_last_good_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    save(store, 1, 2)
    store.mark_best(3, 0.1, "loss")
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", f"checkpoint.{place}:1:ENOSPC")
    store.save(3, tensors(3), {})
    with pytest.raises(UserError) as caught:
        store.wait()
    assert str(caught.value) == (
        f"a checkpoint could not be written to {store.folder} (No space left on device); "
        "the one of step 2 is intact; make room there and start the same command again"
    )
    assert names(store) == ["step-00000001", "step-00000002"]
    found = store.newest()
    assert found is not None and found.step == 2
    save(store, 3)
    assert store.steps() == [2, 3]


def test_a_full_disk_at_the_first_one(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "checkpoint.mid_write:1:ENOSPC")
    with pytest.raises(UserError, match="there is no earlier one"):
        save(store, 1)
    assert names(store) == []


def test_a_limit_that_the_operating_system_sets(store: CheckpointStore) -> None:
    """A real refusal in the middle of the tensors."""
    save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        store.save(2, {"w": torch.zeros(100_000)}, {})
        with pytest.raises(UserError, match=r"File too large.*the one of step 1 is intact"):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(store) == ["step-00000001"]


def test_a_failure_is_heard_of_without_waiting_for_the_next(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "checkpoint.mid_write:1:ENOSPC")
    store.save(1, tensors(1), {})
    assert store._writer is not None
    store._writer.join()
    with pytest.raises(UserError, match="could not be written"):
        store.check()
    store.check()


def test_a_mistake_in_the_background_is_not_lost(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(tensor_files, "fingerprint", wrong)
    with pytest.raises(ZeroDivisionError):
        save(store, 1)
    assert names(store) == []
