"""One small real action for each component that Lemma can use, each run in its own process.

`python -m lemma.doctor.probes lemma.doctor.probes:wandb` tries one of them. A probe returns a sentence fragment
about what it found, or raises; if the process crashes, even by a segmentation fault, that is the finding.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from lemma.core.version import installed_version

State = Literal["ok", "missing", "broken"]
MARK = "lemma-probe: "
GIB = 2**30


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The result of a probe."""

    detail: str
    state: State = "ok"


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(what)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def torch() -> ProbeAnswer:
    import torch

    weight = torch.ones(8, 8, requires_grad=True)
    (torch.ones(2, 8) @ weight).sum().backward()
    _check(weight.grad is not None and float(weight.grad.sum()) == 128.0, "a matrix product has the wrong gradient")
    return ProbeAnswer(f"{torch.__version__}, {torch.get_num_threads()} threads")


def cuda() -> ProbeAnswer:
    import torch

    if not torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version").exists()
        if driver and torch.version.cuda is None:
            return ProbeAnswer("there is a GPU, but torch is a build for CPUs", "broken")
        return ProbeAnswer(
            "there is a GPU driver, but torch finds no GPU" if driver else "no GPU", "broken" if driver else "missing"
        )
    devices = []
    for index in range(torch.cuda.device_count()):
        x = torch.randn(64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        _check(bool(torch.isfinite(x @ x).all()), f"a matrix product on GPU {index} is not finite")
        free, total = torch.cuda.mem_get_info(index)
        devices.append(f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    return ProbeAnswer(f"CUDA {torch.version.cuda}; " + "; ".join(devices))


def varlen() -> ProbeAnswer:
    """On a GPU: Lemma's attention over a pack of two sequences, compared with the same two computed one by one."""
    import torch

    if _device() == "cpu":
        return ProbeAnswer("needs a GPU; CPUs use an exact fallback", "missing")
    from lemma.models.attention import attend
    from lemma.models.packing import Segments

    q, k, v = (torch.randn(1, heads, 24, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    packed, _ = attend(module, q, k, v, None, segments=Segments((10, 14), q.device))
    alone, _ = attend(module, q[:, :, 10:], k[:, :, 10:], v[:, :, 10:], None, segments=Segments((14,), q.device))
    worst = float((packed[:, 10:] - alone).abs().max())
    _check(worst < 0.02, f"packed and separate attention differ by {worst:.3g}")
    return ProbeAnswer("torch's variable-length kernel")


def transformers() -> ProbeAnswer:
    from lemma.models.load_model import load_for_inference

    model, tokenizer = load_for_inference("tiny", "cpu")
    ids = tokenizer("User: 1", return_tensors="pt").input_ids
    _check(model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1], "generation made no token")
    return ProbeAnswer(f"{version('transformers')}, the built-in model speaks")


def peft() -> ProbeAnswer:
    from peft import LoraConfig, get_peft_model

    from lemma.models.load_model import load_for_inference

    model, _ = load_for_inference("tiny", "cpu")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    _check(0 < adapted.get_nb_trainable_parameters()[0] < 10_000, "an adapter does not attach")
    return ProbeAnswer(f"{version('peft')}, an adapter attaches")


def datasets() -> ProbeAnswer:
    from datasets import Dataset

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rows.parquet")
        Dataset.from_list([{"a": 1}, {"a": 2}]).to_parquet(path)
        rows = Dataset.from_parquet(path, cache_dir=folder)
        _check(rows["a"][:] == [1, 2], "rows written to parquet do not come back")
    return ProbeAnswer(f"{version('datasets')}, parquet goes out and in")


def tensorboard() -> ProbeAnswer:
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            writer.add_scalar("a", 1.0, 0)
        _check(any(Path(folder).iterdir()), "no event file was written")
    return ProbeAnswer(version("tensorboard"))


def gguf() -> ProbeAnswer:
    """Quantise numbers to four bits and back."""
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize, quantize

    numbers = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    worst = float(
        np.abs(dequantize(quantize(numbers, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1) - numbers).max()
    )
    _check(worst < 0.1, f"numbers come back from 4 bits with an error of {worst:.2g}")
    return ProbeAnswer(f"{version('gguf')}, 4-bit weights become numbers")


def bitsandbytes() -> ProbeAnswer:
    import torch
    from bitsandbytes.nn import Linear4bit

    device = _device()
    plain = torch.nn.Linear(128, 64, bias=False)
    packed = Linear4bit(128, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    packed.load_state_dict(plain.state_dict())
    packed, plain, x = packed.to(device), plain.to(device), torch.randn(4, 128, device=device)
    error = float((packed(x) - plain(x)).norm() / plain(x).norm())
    _check(0 < error < 0.3, f"a 4-bit layer is off by {error:.0%}")
    return ProbeAnswer(f"{version('bitsandbytes')}, a 4-bit layer runs on the {device}")


def wandb() -> ProbeAnswer:
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        settings = wandb.Settings(console="off", silent=True)
        run = wandb.init(project="doctor", mode="offline", dir=folder, settings=settings)
        run.log({"a": 1.0})
        run.finish()
    return ProbeAnswer(f"{version('wandb')}, an offline run was written")


def vllm() -> ProbeAnswer:
    from vllm import LLM, SamplingParams

    from lemma.engines.vllm.versions import installed

    _check(callable(LLM) and callable(SamplingParams), "vllm has no LLM")
    return ProbeAnswer(f"{installed() or ''}, imports")


def ray() -> ProbeAnswer:
    import ray

    return ProbeAnswer(f"{ray.__version__}, imports")


def deepspeed() -> ProbeAnswer:
    import os

    if _device() == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    return ProbeAnswer(f"{deepspeed.__version__}, imports")


def liger() -> ProbeAnswer:
    import torch
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    name = f"{version('liger-kernel')}"
    if _device() == "cpu":
        return ProbeAnswer(f"{name}, imports; its kernels need a GPU")
    x = torch.randn(4, 64, device="cuda")
    out = LigerRMSNormFunction.apply(x, torch.ones(64, device="cuda"), 1e-6)
    _check(bool(torch.isfinite(out).all()), "its norm is not finite")
    return ProbeAnswer(f"{name}, a kernel runs")


def flash() -> ProbeAnswer:
    """Lemma itself compares it with torch's kernel."""
    import torch

    from lemma.core.errors import LemmaWarning
    from lemma.models.flash_attention import flash_kernel, supports

    name = installed_version("flash-attn-4")
    if name is None:
        return ProbeAnswer("not installed: what is called flash_attn here is another version", "missing")
    if _device() == "cpu":
        return ProbeAnswer(f"{name}, needs a GPU", "missing")
    if not supports(torch.device("cuda")):
        return ProbeAnswer(f"{name}, not for this GPU: torch's kernel is used", "missing")
    q, k = (torch.randn(24, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kernel = flash_kernel(q, k, None)
    reasons = [str(one.message) for one in said if issubclass(one.category, LemmaWarning)]
    _check(kernel is not None, reasons[-1] if reasons else "there is no flash_attn.cute: install flash-attn-4 again")
    return ProbeAnswer(f"{name}, agrees with torch's kernel")


def triton() -> ProbeAnswer:
    import torch

    name = version("triton")
    if _device() == "cpu":
        return ProbeAnswer(f"{name}, imports; its kernels need a GPU")
    from lemma.models.blocks import rms_norm

    x, weight = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16), torch.ones(64, device="cuda").bfloat16()
    worst = float((rms_norm(x, weight, 1e-6, fused=True) - rms_norm(x, weight, 1e-6)).abs().max())
    _check(worst < 0.05, f"the fused norm is off by {worst:.3g}")
    return ProbeAnswer(f"{name}, a fused kernel of Lemma runs")


def compiling() -> ProbeAnswer:
    import torch

    device = _device()
    x = torch.randn(8, 8, device=device)
    function = torch.compile(lambda x: (x * 2).relu().sum())
    _check(bool(torch.isclose(function(x), (x * 2).relu().sum())), "compiled code gives another result")
    return ProbeAnswer(f"torch.compile works on the {device}")


def main(target: str) -> None:
    """Run `module:function` and print its answer as the last line of standard output."""
    module, _, function = target.partition(":")
    answer: Any = getattr(importlib.import_module(module), function)()
    print(f"\n{MARK}{json.dumps(asdict(answer))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
