"""Kernels are compiled for a GPU where there is none: an interpreter takes what a compiler refuses."""

from __future__ import annotations

from typing import Any

import pytest

WIDTHS = {"bf16": 16, "fp16": 16, "fp32": 32}
WHOLE = ("POSITION", "UNTIL", "ENDS", "TOP_K", "KEYS", "TOKEN", "TARGET", "READERS", "STARTS")
EXACT = ("RSTD", "DW", "LOGPROB", "LSE", "ENTROPY", "G_LOGPROB", "G_ENTROPY")
REAL = ("factor", "inner", "eps", "sign", "inverse_divisor", "scale")


def compile_for_a_gpu(kernel: Any, dtype: str, constants: dict[str, Any], others: str = "*fp32", **own: str) -> Any:
    triton = pytest.importorskip("triton", reason="triton is for Linux only")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    numbers = {name: "i32" for name in kernel.arg_names if name.islower()} | dict.fromkeys(REAL, "fp32")
    kinds = dict.fromkeys(WHOLE, "*i64") | dict.fromkeys(EXACT, "*fp32") | {"Z": f"*{dtype}", "PICK": "*i32"}
    kinds |= numbers | dict.fromkeys(constants, "constexpr") | own
    signature = {name: kinds.get(name, others) for name in kernel.arg_names}
    pointers = [place for place, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        # As memory of torch is: loads become wide, and take other ways through the compiler.
        attrs={(place,): [["tt.divisibility", 16]] for place in pointers},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "ptx" in compiled.asm
    return compiled


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
    from lemma.models import joint_kernels, kernels, sharing_kernels

    heads = {"HQ": 4, "HK": 2, "HEADS": 8, "D": 64, "HALF": 32}
    for kernel, constants in (
        (kernels._norm_forward, {"ADDS": adds, "TILE": 1, "BLOCK": 1024}),
        (kernels._norm_backward, {"ADDS": adds, "TILE": 8, "BLOCK": 128}),
        (kernels._gate_forward, {"BLOCK": 1024}),
        (kernels._softmax_stats, {"CAPPED": adds, "BLOCK": 1024}),
        (kernels._softmax_grad, {"HAS_ENTROPY": adds, "CAPPED": adds, "BLOCK": 1024}),
        (joint_kernels._joint_gate_backward, {"BLOCK": 1024}),
        (joint_kernels._rotate_parts, {"JOINS": adds, **heads}),
        (sharing_kernels._sum_readers, {"WIDTH": 1536, "ROWS": 2, "COLUMNS": 1024}),
        (sharing_kernels._sum_readers, {"WIDTH": 512, "ROWS": 4, "COLUMNS": 512}),
        (sharing_kernels._sum_readers, {"WIDTH": 192, "ROWS": 8, "COLUMNS": 256}),
        (sharing_kernels._sum_readers, {"WIDTH": 64, "ROWS": 8, "COLUMNS": 64}),
    ):
        compile_for_a_gpu(kernel, "bf16", constants, others="*bf16")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_of_adapters_fit_any_gpu(dtype: str) -> None:
    """100 KiB of shared memory is the least that a GPU of this generation or the last has."""
    pytest.importorskip("triton", reason="triton is for Linux only")
    import torch

    from lemma.models import adapter_kernels as kernels

    largest = kernels.largest_rank({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    assert largest >= 64
    for rank in (16, largest):
        tile = {"RANK": rank, "R": rank, "ROWS": kernels.ROWS, "COLUMNS": kernels.COLUMNS}
        like = {"others": f"*{dtype}", "TARGET": f"*{dtype}"}
        for kernel, constants in ((kernels._adapt, {"ADDS": True, **tile}), (kernels._gate_adapted, tile)):
            assert compile_for_a_gpu(kernel, dtype, constants, **like).metadata.shared <= 100 * 1024


@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 8), ("bf16", 128), ("bf16", 256), ("fp32", 128), ("fp32", 256)])
def test_attention_of_a_decoding_step_fits_any_gpu(dtype: str, dim: int) -> None:
    """The probe decodes in float32 whatever the model's precision is."""
    pytest.importorskip("triton", reason="triton is for Linux only")
    from lemma.engines.native import engine_kernels as kernels

    wide = max(16, dim)
    shape = kernels.shape_of(16, wide * WIDTHS[dtype] // 8, 64)
    constants = {"ROTATE": True, "HK": 2, "G": 4, "GP": 16, "D": dim, "DP": wide, "BLOCK": 64, "TILE": shape["TILE"]}
    kinds = dict.fromkeys(("SLOT", "LENGTH", "PLACES"), "*i64") | dict.fromkeys(("TABLE", "ARRIVED"), "*i32")
    kinds |= dict.fromkeys(("PART", "STATS"), "*fp32") | {"cap": "fp32"}
    compiled = compile_for_a_gpu(
        kernels._attend, dtype, constants | {"SPLIT": True, "CAPPED": False}, others=f"*{dtype}", **kinds
    )
    assert compiled.metadata.shared <= 100 * 1024
