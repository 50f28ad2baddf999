"""Which kind of CPU this is, as far as floating-point sums can tell.

The same program gives other last bits where torch takes other kernels. ATen and oneDNN choose theirs by instruction
set, MKL by instruction set and maker (on an AMD CPU with AVX-512 it does not run what it runs on an Intel one), and all
of them split sums by the number of threads. No list of names says all of that, so a kind is known by what it computes:
the hash of the bits of the operations that a training step is made of, by torch alone, on one thread.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch
import torch.nn.functional as F

# Numbers of rows: matrix products have kernels of their own for few rows and for the rest that fills no tile.
ROWS = (1, 7, 16, 61, 100, 128, 199, 256)
WIDTH, INNER, HEADS, WORDS = 48, 64, 4, 120


def fingerprint() -> str:
    """Eight hexadecimal digits; equal where a step of a small model gives equal bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        digest = hashlib.sha256()
        for tensor in _operations():
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()[:8]
    finally:
        torch.set_num_threads(threads)


def _operations() -> list[torch.Tensor]:
    """Two steps of one decoder block, forward, backward and update, for every number of rows."""
    noise = torch.Generator().manual_seed(1)
    shapes = [(WORDS, WIDTH), (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER)]
    weights = [(torch.randn(shape, generator=noise) / 4).requires_grad_() for shape in shapes]
    moments = [(torch.zeros(shape), torch.zeros(shape)) for shape in shapes]
    seen: list[torch.Tensor] = []
    for rows in ROWS * 2:
        loss = _loss(weights, torch.arange(rows) * 7 % WORDS)
        grads = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, grad, (mean, square) in zip(weights, grads, moments, strict=True):
                mean.lerp_(grad, 0.1)
                square.mul_(0.99).addcmul_(grad, grad, value=0.01)
                weight.addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-2)
        seen += [loss, *grads]
    return seen + weights


def _loss(weights: list[torch.Tensor], ids_T: torch.Tensor) -> torch.Tensor:
    words, joint, outer, inner, down = weights
    hidden = words[ids_T]
    normal = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    angles = torch.outer(torch.arange(len(ids_T)).float(), torch.exp(-torch.arange(WIDTH // HEADS).float() / 3))
    query, key, value = (
        part.view(len(ids_T), HEADS, -1).transpose(0, 1)[None] for part in F.linear(normal, joint).chunk(3, -1)
    )
    query, key = query * angles.cos() + key * angles.sin(), key * angles.cos()
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + F.linear(attended[0].transpose(0, 1).flatten(1), outer)
    gate, up = F.linear(hidden, inner).chunk(2, -1)
    hidden = hidden + F.linear(F.silu(gate) * up, down)
    logits = hidden @ words.T
    return (logits.logsumexp(-1) - logits.gather(-1, ids_T.flip(0)[:, None])[:, 0]).mean()


def kind() -> str:
    """What losses are stored under."""
    return f"torch {torch.__version__}, kernels {fingerprint()}"


def facts() -> str:
    """The CPU in words, for the reader."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    pairs = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    named = [pairs.get(name, "unknown") for name in ("vendor_id", "cpu family", "model", "model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return "{0}, family {1}, model {2} ({3}), ATen {cap}".format(*named, cap=capability)


if __name__ == "__main__":
    print(f"kernels {fingerprint()}, ATen {torch.backends.cpu.get_cpu_capability()}")
