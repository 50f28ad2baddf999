"""FlashAttention 4 is tried where it will be used. Here there is no GPU: parts that need one are stood in for."""

from __future__ import annotations

import threading

import pytest
import torch

from lemma.models import flash_attention
from lemma.models.flash_attention import AttentionKind


def test_the_trial_is_made_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    device, seen = torch.device("cuda:3"), []
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda wanted: setattr(current, "device", wanted))
    monkeypatch.setattr(flash_attention, "_is_for", lambda device: True)
    monkeypatch.setattr(flash_attention, "_installed", lambda: print)
    monkeypatch.setattr(flash_attention, "_trouble", lambda function, kind: seen.append(current.device))
    kind = AttentionKind(device, torch.bfloat16, heads=4, kv_heads=2, size=64, has_window=False)
    assert flash_attention._tried_kernel.__wrapped__(kind) is not None
    assert seen == [device] and not hasattr(current, "device"), "this thread stays where it is"
