"""Code of users in other threads computes on the GPU of the thread that calls it."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lemma.core.async_calls import Caller
from lemma.stages.reinforcement.sampling_thread import SamplingThread


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA as threads see it: every thread begins on the first GPU."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "number", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: setattr(current, "number", number))


async def judge() -> int:
    """A local judge on "cuda"."""
    return torch.cuda.current_device()


@pytest.mark.usefixtures("gpus")
def test_async_functions_compute_on_the_gpu_of_their_caller() -> None:
    with Caller() as caller, ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(2,)) as other:
        assert caller.call(judge) == 0
        torch.cuda.set_device(3)
        assert caller.call(judge) == 3
        assert [future.result() for _, future in caller.as_they_end([judge(), judge()], 20)] == [3, 3]
        assert other.submit(caller.call, judge).result() == 2
        assert caller.call(judge) == 3


@pytest.mark.usefixtures("gpus")
def test_rewards_of_steps_sampled_ahead_compute_on_the_gpu_of_the_rank() -> None:
    torch.cuda.set_device(3)
    thread, found = SamplingThread(), []
    thread.begin(lambda: found.append(torch.cuda.current_device())).result(timeout=20)
    thread.end()
    assert found == [3]


def test_a_gpu_that_nobody_uses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def one() -> int:
        return 1

    def touched(*_: object) -> None:
        raise AssertionError("this takes memory of a GPU")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", touched)
    monkeypatch.setattr(torch.cuda, "set_device", touched)
    with Caller() as caller:
        assert caller.call(one) == 1


def test_torch_is_not_imported_for_it() -> None:
    program = """
import sys
from lemma.core.async_calls import result_of
async def one(): return 1
assert result_of(one()) == 1 and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
