"""Run with TRITON_INTERPRET=1: every kernel of engines.native.engine_kernels beside the plain code it stands for."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lemma.core.errors import LemmaWarning
from lemma.engines.native import engine_kernels as kernels
from lemma.engines.native import sampling_kernels as drawing
from lemma.engines.native.cached_attention import Cache, layer_addresses
from lemma.engines.native.cuts import Cuts
from lemma.engines.native.kernel_trial import kernels_cut
from lemma.engines.native.noise import gumbel, row_seeds, split_key
from lemma.engines.native.sampler import draw
from lemma.engines.protocol import Request, Sampling, generate
from lemma.engines.sampling import cut
from lemma.engines.sampling import logprobs as of_reference
from lemma.models.blocks import rotate
from lemma.models.families import LogitMap
from lemma.models.logprobs import map_logits
from tests.engines.decode_reference import decode_reference
from tests.engines.native_checks import FREE, check_same, engine_of, run
from tests.engines.small_policies import small_policy

WAYS: list[dict[str, Any]] = [
    {}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.5}, {"top_p": 0.01}, {"min_p": 0.2}, {"temperature": 0.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 0.6}, {"min_tokens": 6, "stop_ids": (3, 8)},
    {"min_tokens": 6, "stop_ids": (3,), "top_p": 0.9, "top_k": 12}, {"min_tokens": 2, "stop_ids": (3,)},
    {"temperature": 0.0, "min_tokens": 6, "top_p": 0.1}, {"top_p": 0.95, "temperature": 0.6},
]  # fmt: skip
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.dtype == b.dtype and a.shape == b.shape
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def attention() -> None:
    """Head sizes and groups, windows, contexts from one token to several blocks, splits, some of them empty, capped
    scores; rows of one joint projection or, without rotation, laid out by heads. What a row does not see is NaN, and
    the new token's slot is before it is written.

    The interpreter cannot multiply bfloat16 matrices; float16 stands for it.
    """
    shapes = [(16, 1, 2), (64, 2, 1), (80, 3, 1), (96, 7, 1), (128, 8, 1), (64, 16, 1), (32, 5, 2), (8, 2, 2)]
    ways = ((None, 1), (5, 4), (20, 3), (None, 4), (1, 2))
    cases = [(shape, *ways[i % 5], torch.float32, None) for i, shape in enumerate([*shapes, *shapes[:5]])]
    cases += [(shapes[1], 20, 3, torch.float16, None), (shapes[2], 20, 3, torch.float32, 0.5)]
    for number, ((dim, group, kv), window, splits, dtype, softcap) in enumerate(cases):
        kernels.WANTED_PROGRAMS = splits * 4 * kv
        assert kernels.splits_for(4, kv) == splits
        check_attention(dim, group, kv, window, dtype, softcap, is_rotated=number % 3 > 0)
    # Tiles that are smaller than blocks.
    usual, kernels.shape_of = kernels.shape_of, lambda *about: {"TILE": 8}
    check_attention(32, 3, 2, 20, torch.float32, None, is_rotated=True)
    kernels.shape_of = usual


def check_attention(
    dim: int, group: int, kv: int, window: int | None, dtype: torch.dtype, softcap: float | None, is_rotated: bool
) -> None:
    block, lengths = 16, torch.tensor([1, 16, 17, 41])
    rows, heads = len(lengths), group * kv
    table = torch.zeros(rows, 9, dtype=torch.int32)[:, :5]
    table[:, :3] = torch.randperm(16)[: rows * 3].view(rows, 3)
    keys, values = (torch.randn(16 * block, kv, dim, dtype=dtype) for _ in range(2))
    joint = torch.randn(rows, (heads + 2 * kv) * dim, dtype=dtype)
    parts = joint.split([heads * dim, kv * dim, kv * dim], dim=-1)
    query, key, value = (part.view(rows, -1, dim) for part in parts)
    if not is_rotated:
        query, key, value = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in (query, key, value))
    cos, sin = (torch.randn(rows, dim // 2, dtype=dtype).repeat(1, 2) for _ in range(2))
    slot_of = (table.long() * block)[:, :, None] + torch.arange(block)
    slots = torch.stack([slot_of[row].flatten()[length - 1] for row, length in enumerate(lengths.tolist())])
    seen = torch.zeros(16 * block, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        seen[slot_of[row].flatten()[: length - 1]] = True
    keys[~seen], values[~seen] = float("nan"), float("nan")
    wanted_keys, wanted_values = keys.clone(), values.clone()
    turned, rotated = rotate(query, key, cos, sin) if is_rotated else (query, key)
    wanted_keys[slots], wanted_values[slots] = rotated, value
    arguments = (table, lengths, block, dim**-0.5, window, softcap)
    wanted = decode_reference(turned, wanted_keys.nan_to_num(), wanted_values.nan_to_num(), *arguments)
    new = (query, key, value, *((cos, sin) if is_rotated else (None, None)), slots)
    arrivals = torch.zeros(8, dtype=torch.int32)
    found = kernels.attend_and_write(*new, layer_addresses(keys[None], values[None])[0], arrivals, *arguments)
    case = (dim, group, window, dtype, softcap, is_rotated)
    assert relative(found, wanted.contiguous()) < LIMITS[dtype], case
    assert not arrivals.any()
    for one, other in ((keys, wanted_keys), (values, wanted_values)):
        assert torch.equal(one.isnan(), other.isnan()), case
        assert relative(one.nan_to_num(), other.nan_to_num()) < LIMITS[dtype], case


def sampling() -> None:
    """Several blocks a split and splits with nothing; the likeliest token; several temperatures; logits that are plain,
    scaled, capped."""
    drawing.SAMPLE_BLOCK = drawing.THRESHOLD_BLOCK = 64
    plain, scaled, capped = LogitMap(), LogitMap(0.25), LogitMap(1.5, 4.0)
    cases = ((37, plain), (1000, plain), (1000, scaled), (37, capped), (1000, capped), (1500, plain))
    for columns, means in cases:
        dtype = torch.bfloat16 if columns == 1500 else torch.float32
        rows = 6
        logits = 3 * torch.randn(rows, columns).to(dtype)
        keys = split_key([3, 2**64 - 1, 2**40 + 17, 9, 10, 11])
        positions = torch.tensor([0, 1, 31999, 5, 5, 5])
        inverse = torch.tensor([1.0, 1.0, 1 / 0.7, 2.0, 0.5, 1.0])
        noisy = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
        wanted, wanted_logprobs, _ = draw(logits, keys, positions, inverse, noisy, fused=False, logit_map=means)
        tokens, logprobs, kept = drawing.sample(logits, keys, positions, inverse, noisy, *means)
        assert not kept.any()
        assert tokens.tolist() == wanted.tolist(), (columns, dtype, means)
        assert (logprobs - wanted_logprobs).abs().max() < 1e-5
        assert tokens[5] == logits[5].argmax()


def sampled_often() -> None:
    """Over many rows the tokens are those of the plain code, but where two are as good as each other."""
    drawing.SAMPLE_BLOCK = drawing.THRESHOLD_BLOCK = 64
    rows, columns = 40, 256
    logits = torch.randn(rows, columns)
    keys, positions = split_key(list(range(10**12, 10**12 + rows))), torch.arange(rows)
    ones = torch.ones(rows)
    wanted, _, _ = draw(logits, keys, positions, ones, ones, fused=False)
    tokens, _, _ = drawing.sample(logits, keys, positions, ones, ones)
    scores = logits + gumbel(row_seeds(keys, positions), columns)
    gap = scores.gather(1, wanted[:, None]) - scores.gather(1, tokens[:, None])
    assert gap.max() < 1e-3 and (wanted != tokens).sum() <= 1


def cuts() -> None:
    """Every way to cut the support, alone and together, beside the reference: what is kept, and what is drawn."""
    drawing.SAMPLE_BLOCK = drawing.THRESHOLD_BLOCK = 64
    ways = [Sampling(max_tokens=9, **values) for values in WAYS]
    rows = len(ways)
    for columns, dtype, means in ((130, torch.float32, LogitMap()), (150, torch.bfloat16, LogitMap(1.5, 4.0)),
                                  (150, torch.bfloat16, LogitMap())):  # fmt: skip
        # Few different values: many tokens are as likely as each other.
        logits = (3 * torch.randn(rows, columns)).round(decimals=1).to(dtype)
        logits[:, [3, 8, 2]] = 6.0
        keys, positions = split_key(list(range(rows))), torch.full((rows,), 14)
        sequences = [SimpleNamespace(request=SimpleNamespace(sampling=way), length=14, count=4) for way in ways]
        limits = Cuts.of(sequences, 2)  # type: ignore[arg-type]
        inverse = torch.tensor([1 / (way.temperature or 1.0) for way in ways])
        noisy = torch.tensor([float(way.temperature > 0) for way in ways])
        tokens, logprobs, kept = drawing.sample(logits, keys, positions, inverse, noisy, *means, limits)
        noise = gumbel(row_seeds(keys, positions), columns)
        for row, way in enumerate(ways):
            meant = map_logits(logits[row : row + 1], *means)
            early = way.min_tokens > 4
            masked, mass = cut(meant, way, [2, *way.stop_ids] if early else ())
            wanted = (masked + noise[row] * noisy[row]).argmax(-1)
            assert tokens[row] == wanted, (row, columns)
            assert abs(kept[row] - mass) < 1e-5, (row, columns)
            assert abs(logprobs[row] - of_reference(meant, wanted, way.temperature)) < 1e-5
    assert kept[0] == kept[6] == 0.0 and kept[1] < -0.1


def nearly_certain() -> None:
    """An end that must not come yet and is likelier than all else by more than float32 can hold as a ratio."""
    drawing.SAMPLE_BLOCK = drawing.THRESHOLD_BLOCK = 64
    ways = [Sampling(max_tokens=9, temperature=0.1, min_tokens=6, **values) for values in ({}, {"top_p": 0.9})]
    logits = torch.randn(len(ways), 100)
    logits[:, 2] = 16.0
    sequences = [SimpleNamespace(request=SimpleNamespace(sampling=way), length=14, count=4) for way in ways]
    limits = Cuts.of(sequences, 2)  # type: ignore[arg-type]
    keys, positions, ones = split_key([5, 6]), torch.full((2,), 14), torch.ones(2)
    tokens, _, kept = drawing.sample(logits, keys, positions, 10 * ones, ones, cuts=limits)
    for row, way in enumerate(ways):
        masked, mass = cut(logits[row], way, [2])
        assert masked[tokens[row]] > float("-inf"), tokens[row]
        assert abs(kept[row] - mass) < 1e-3, (kept[row], mass)


def hostile_rows(columns: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Logits that a model rarely puts out."""
    noise = torch.randn(columns)
    zeros = torch.where(noise > 0.5, 0.0, -0.0)
    alone = torch.full((columns,), -torch.inf)
    alone[columns // 2] = 1.0
    rows = {
        "all the same": torch.full((columns,), -1.5),
        "zeros of both signs": zeros,
        "zeros at the border": torch.where(noise > 1.3, noise, zeros),
        "few values": noise.round(),
        "much that cannot be": torch.where(noise > 0, 3 * noise, -torch.inf),
        "one token": alone,
        "one far above": torch.where(torch.arange(columns) == 2, 60.0, noise),
        "large numbers": 9000 * noise,
        "small numbers": 1e-30 * noise,
    }
    return {name: row.to(dtype) for name, row in rows.items()}


def hostile() -> None:
    """Ties, zeros of both signs, -inf, numbers of all sizes, beside the reference; a row of NaN harms no other."""
    drawing.SAMPLE_BLOCK = drawing.THRESHOLD_BLOCK = 128
    cuts: list[dict[str, Any]] = [{"top_k": 5, "min_tokens": 9}, {"top_p": 0.3, "min_p": 0.01}]
    for columns, dtype in ((70, torch.bfloat16), (150, torch.float32), (1, torch.float16)):
        made = hostile_rows(columns, dtype)
        if columns != 70:
            made = {name: made[name] for name in ("zeros of both signs", "few values", "one token")}
        names = [*made, "NaN"]
        logits = torch.stack([*made.values(), torch.full((columns,), torch.nan, dtype=dtype)]).repeat(len(cuts), 1)
        ways = [Sampling(max_tokens=9, ignore_eos=columns == 1, **way) for way in cuts for _ in names]
        rows = len(ways)
        sequences = [SimpleNamespace(request=SimpleNamespace(sampling=way), length=14, count=4) for way in ways]
        keys, positions, ones = split_key(list(range(rows))), torch.full((rows,), 14), torch.ones(rows)
        limits = Cuts.of(sequences, 2)  # type: ignore[arg-type]
        tokens, logprobs, kept = drawing.sample(logits, keys, positions, ones, ones, cuts=limits)
        assert ((tokens >= 0) & (tokens < columns)).all()
        noise = gumbel(row_seeds(keys, positions), columns)
        for row, way in enumerate(ways):
            name = names[row % len(names)]
            if name == "NaN":
                assert logprobs[row].isnan()
                continue
            masked, mass = cut(logits[row], way, [2] if way.min_tokens and not way.ignore_eos else ())
            assert tokens[row] == (masked + noise[row]).argmax(), (name, way)
            assert abs(kept[row] - mass) < 1e-5, (name, way, kept[row], mass)
            assert abs(logprobs[row] - of_reference(logits[row], tokens[row], 1.0)) < 1e-5, (name, way)


def tried() -> None:
    """Kernels are tried before they are used: they pass, and what is wrong with others is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", LemmaWarning)
        for means in (LogitMap(), LogitMap(1.0, 30.0)):
            assert kernels_cut(torch.device("cpu"), torch.bfloat16, means)
    sample = drawing.sample
    wrong = {
        "cannot be compiled (no such luck)": lambda *args: (_ for _ in ()).throw(ValueError("no such luck\nat all")),
        "the mass it keeps is off by 0.28": lambda *args: sample(*args[:-1]),
        "the mass it keeps is off by nan": lambda *args: (*sample(*args)[:2], torch.full((5,), torch.nan)),
    }
    for said, other in wrong.items():
        drawing.sample = other  # type: ignore[assignment]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LemmaWarning)
            assert not kernels_cut(torch.device("cpu"), torch.bfloat16)
        (warning,) = [one for one in caught if issubclass(one.category, LemmaWarning)]
        assert said in str(warning.message), warning.message
    drawing.sample = sample


def engine() -> None:
    """The whole engine on the kernels: prompts, groups, windows, chunks, bursts; and a model that caps."""
    kernels.WANTED_PROGRAMS = 4
    drawing.SAMPLE_BLOCK = drawing.THRESHOLD_BLOCK = 64
    capping = small_policy("gemma2", sharp=2.0, attn_logit_softcapping=0.5, final_logit_softcapping=2.0)
    few = [Request(("a",), np.arange(1, 21), replace(FREE, max_tokens=2))]
    fused = engine_of(capping, prefill_tokens=16)
    fused.runner.fused = True
    check_same(generate(fused, few), run(capping, few))
    policy = small_policy("mistral", sharp=2.0)
    requests: list[Request] = [
        Request(("group",), np.arange(1, 21), replace(FREE, max_tokens=3), n=2),
        Request(("greedy",), np.arange(5, 9), replace(FREE, max_tokens=3, temperature=0.0)),
    ]
    cutting = replace(FREE, max_tokens=2, top_p=0.7, min_tokens=1, ignore_eos=False)
    both = [few[0], Request(("cut",), np.arange(2, 11), cutting)]
    fused = engine_of(policy, prefill_tokens=16, ahead=True)
    fused.runner.fused = True
    wanted = run(policy, requests)
    check_same(generate(fused, requests), wanted)
    fused.release_cache()
    check_same(generate(fused, requests), wanted)
    check_same(generate(fused, both), run(policy, both))


def moved() -> None:
    """What a graph holds of a cache is `addresses_L2`: same tensor, other memory, and the kernels follow."""
    heads, dim, block = 2, 32, 16
    cache = Cache(2, 3, block, heads, dim, torch.float32, torch.device("cpu"))
    addresses_2, address = cache.addresses_L2[1], cache.keys.data_ptr()
    old, filler = cache.keys, torch.zeros(cache.shape)
    cache.release()
    assert not addresses_2.any()
    cache.allocate()
    assert cache.keys.data_ptr() != address and len({x.data_ptr() for x in (old, filler, cache.keys)}) == 3
    query, key, value = (torch.randn(1, heads, dim) for _ in range(3))
    table, lengths = torch.tensor([[2]], dtype=torch.int32), torch.tensor([9])
    new = (query, key, value, None, None, torch.tensor([40]))
    found = kernels.attend_and_write(*new, addresses_2, cache.arrivals, table, lengths, block, 1.0, 1)
    assert torch.equal(cache.keys[1, 40], key[0]) and torch.equal(cache.values[1, 40], value[0])
    assert not cache.keys[0].any() and not old.any()
    assert relative(found, value) < 1e-6


if __name__ == "__main__":
    torch.manual_seed(0)
    np.random.seed(0)
    torch.set_num_threads(1)
    drawing.splits_for = lambda rows: 8  # the interpreter goes through them one by one
    for check in (attention, sampling, sampled_often, cuts, nearly_certain, hostile, tried, moved, engine):
        check()
        print(check.__name__)
