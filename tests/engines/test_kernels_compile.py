"""Kernels are compiled for a GPU where there is none: an interpreter takes what a compiler refuses."""

from __future__ import annotations

from typing import Any

import pytest

WIDTHS = {"bf16": 16, "fp16": 16, "fp32": 32}
WHOLE = ("POSITION", "UNTIL", "ENDS", "TOP_K", "KEYS", "TOKEN", "TARGET")
EXACT = ("RSTD", "DW", "LOGPROB", "LSE", "ENTROPY", "G_LOGPROB", "G_ENTROPY")
REAL = ("factor", "inner", "eps", "sign", "inverse_divisor", "scale")


def compile_for_a_gpu(kernel: Any, dtype: str, constants: dict[str, Any], others: str = "*fp32") -> None:
    triton = pytest.importorskip("triton", reason="triton is for Linux only")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    numbers = {name: "i32" for name in kernel.arg_names if name.islower()} | dict.fromkeys(REAL, "fp32")
    kinds = dict.fromkeys(WHOLE, "*i64") | dict.fromkeys(EXACT, "*fp32") | {"Z": f"*{dtype}", "PICK": "*i32"}
    kinds |= numbers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: kinds.get(name, others) for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    assert "ptx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm


@pytest.mark.parametrize("dtype", WIDTHS)
def test_cuts_and_draws_compile(dtype: str) -> None:
    pytest.importorskip("triton", reason="triton is for Linux only")
    from lemma.engines.native import sampling_kernels as kernels

    bits = WIDTHS[dtype]
    shared = {"E": 8, "CAPPED": dtype == "fp16", "BLOCK": 1024}
    limits = {"LOWEST": -(2 ** (bits - 1)), "HIGHEST": 2 ** (bits - 1) - 1, "BITS": bits}
    compile_for_a_gpu(kernels._threshold, dtype, shared | limits)
    for cuts in (False, True):
        compile_for_a_gpu(kernels._sample, dtype, shared | {"CUT": cuts, "SPLITS": 8})


@pytest.mark.parametrize("adds", [False, True])
def test_kernels_of_the_learner_compile(adds: bool) -> None:
    pytest.importorskip("triton", reason="triton is for Linux only")
    from lemma.models import adapter_kernels, joint_kernels, kernels

    tile = {"RANK": 16, "R": 16, "ROWS": 32, "COLUMNS": 64}
    heads = {"HQ": 4, "HK": 2, "D": 64, "HALF": 32}
    for kernel, constants in (
        (kernels.norm_forward, {"ADDS": adds, "BLOCK": 1024}),
        (kernels._norm_backward, {"ADDS": adds, "BLOCK": 1024}),
        (kernels._gate_forward, {"BLOCK": 1024}),
        (kernels._softmax_stats, {"CAPPED": adds, "BLOCK": 1024}),
        (kernels._softmax_grad, {"HAS_ENTROPY": adds, "CAPPED": adds, "BLOCK": 1024}),
        (joint_kernels._joint_gate_backward, {"BLOCK": 1024}),
        (joint_kernels._rotate_parts, {"JOINS": adds, **heads}),
        (adapter_kernels._adapt, {"ADDS": adds, **tile}),
        (adapter_kernels._gate_adapted, tile),
    ):
        compile_for_a_gpu(kernel, "bf16", constants, others="*bf16")
