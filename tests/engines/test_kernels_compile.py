"""Kernels that draw tokens are compiled for a GPU where there is none: an interpreter takes what a compiler refuses."""

from __future__ import annotations

from typing import Any

import pytest

WIDTHS = {"bf16": 16, "fp16": 16, "fp32": 32}
WHOLE = ("POSITION", "UNTIL", "ENDS", "TOP_K", "KEYS", "TOKEN")


def compile_for_a_gpu(kernel: Any, dtype: str, constants: dict[str, Any]) -> None:
    triton = pytest.importorskip("triton", reason="triton is for Linux only")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = dict.fromkeys(WHOLE, "*i64") | {"Z": f"*{dtype}", "PICK": "*i32", "columns": "i32"}
    kinds |= {"factor": "fp32", "inner": "fp32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: kinds.get(name, "*fp32") for name in kernel.arg_names},
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
