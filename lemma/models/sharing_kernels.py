"""The Triton kernel of shared prompts: gradients of rows that several sequences of a pack read.

It is a backend of plain code in `sharing.py` and is tested against it. Arithmetic in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements per program, maximum rows, maximum columns. Triton 3.6 does not compile tiles of 32 rows and 64 columns.
TILE, ROWS, COLUMNS = 2048, 8, 1024


@triton.jit(do_not_specialize=["rows"])
def _sum_readers(
    GRAD, READERS, STARTS, OUT, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = row < rows
    start = tl.load(STARTS + row, mask=inside, other=0)
    count = tl.load(STARTS + row + 1, mask=inside, other=0) - start
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for number in range(0, tl.max(count, 0)):
        is_read = number < count
        token = tl.load(READERS + start + number, mask=is_read, other=0)
        mask = is_read[:, None] & (column < WIDTH)
        total += tl.load(GRAD + token[:, None] * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    mask = inside[:, None] & (column < WIDTH)
    tl.store(OUT + row[:, None] * WIDTH + column, total.to(OUT.dtype.element_ty), mask=mask)


def sum_readers(grad_KHD: torch.Tensor, readers_K: torch.Tensor, starts_T1: torch.Tensor) -> torch.Tensor:
    """(K, H, D) to (T, H, D): for each row the sum over its readers, one after the other."""
    rows, width = len(starts_T1) - 1, grad_KHD[0].numel()
    out_THD = torch.empty(rows, *grad_KHD.shape[1:], dtype=grad_KHD.dtype, device=grad_KHD.device)
    columns = min(COLUMNS, triton.next_power_of_2(width))
    at_a_time = max(1, min(ROWS, TILE // columns))
    grid = (triton.cdiv(rows, at_a_time), triton.cdiv(width, columns))
    _sum_readers[grid](grad_KHD, readers_K, starts_T1, out_THD, rows, WIDTH=width, ROWS=at_a_time, COLUMNS=columns)
    return out_THD
