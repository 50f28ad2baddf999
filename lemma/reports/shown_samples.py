"""Samples as the pages show them. The only file of this package that knows what a journal looks like.

A chunk is everything that one step of a stage, or one evaluation, sampled: a JSON object with `prompts` and `samples`.
A sample's `parts` are the stretches of its text in order: `sampled` by the policy, `given` by a teacher, or an
`observation` from an environment. A sampled part has its `pieces`, one a token, and `levels`, one character a token
that stands for its log-probability (`levels_of`). What the updates noted of its tokens is in `numbers_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lemma.core.files import read_json_lines
from lemma.reports.token_texts import TokenTexts
from lemma.rollouts.episode import Episode, Turn
from lemma.rollouts.journal_reader import NAME, read_episodes
from lemma.rollouts.notes_reader import Attempt, Noted

# Levels of a log-probability: the square root of its distance from 0, up to 16 nats, in 90 parts, as characters.
FIRST_LEVEL, LEVELS, DEEPEST = 35, 90, 16.0


def journal_steps(run: Path, stage: str) -> dict[int, Path]:
    """The journals of a stage by step, whether they are compressed or not; of several slots the first."""
    journals: dict[int, Path] = {}
    for path in sorted((run / "stages" / stage / "journal").glob("step-*")):
        match = NAME.fullmatch(path.name)
        if match is not None:
            journals.setdefault(int(match[1]), path)
    return dict(sorted(journals.items()))


def read_chunk(
    paths: Sequence[Path],
    tokens: TokenTexts | None,
    longest: int | None = None,
    most: int | None = None,
    notes: Mapping[Attempt, Noted] | None = None,
) -> dict[str, Any]:
    """The samples of a step's journals, in order: all, or the first groups, whole, that have `most` together. Texts
    beyond `longest` characters lose their middle. `notes` are those of the step's updates."""
    prompts: dict[bytes, int] = {}
    texts: list[str] = []
    shown = []
    samples = sorted((episode for path in paths for episode in read_episodes(path)), key=_place)
    means, everything = _group_means(samples), len(samples)
    if most is not None and everything > most:
        last = _group(samples[most - 1])
        samples = [sample for sample in samples if _group(sample) <= last]
    for sample in samples:
        key = sample.prompt.tobytes()
        if key not in prompts:
            prompts[key] = len(texts)
            texts.append(_cut(tokens.text(sample.prompt.tolist()), longest) if tokens is not None else "")
        noted = (notes or {}).get(_place(sample))
        one = _shown(sample, tokens, longest, noted if noted is not None and noted.is_about(sample.ids) else None)
        mean = means.get(_group(sample))
        if sample.reward is not None and mean is not None:
            one["advantage"] = round(sample.reward - mean, 5)
        shown.append({"prompt": prompts[key], **one})
    whole = {"prompts": texts, "samples": shown} | ({"all": everything} if everything > len(shown) else {})
    return whole | ({"noted": noted_kinds(shown)} if notes else {})


def _place(sample: Episode) -> tuple[int, int]:
    return _group(sample), sample.sample


def _group(sample: Episode) -> int:
    """The number of the draw of a sample."""
    return int(sample.key[2]) if len(sample.key) > 2 else 0


def _group_means(samples: Sequence[Episode]) -> dict[int, float]:
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            rewards.setdefault(_group(sample), []).append(sample.reward)
    return {group: sum(own) / len(own) for group, own in rewards.items()}


def _shown(sample: Episode, tokens: TokenTexts | None, longest: int | None, noted: Noted | None) -> dict[str, Any]:
    return {
        "group": _group(sample),
        "number": sample.sample,
        "problem": sample.problem_id,
        "parts": _parts(sample, tokens, longest, noted),
        "tokens": len(sample.ids),
        "answer": sample.answer,
        "gold": list(sample.gold),
        "verdict": sample.verdict,
        "reason": sample.reason,
        "faults": list(sample.faults),
        "format": sample.format_ok,
        "finish": sample.finish,
        "reward": sample.reward,
        "rewards": sample.rewards,
    }


def _parts(
    sample: Episode, tokens: TokenTexts | None, longest: int | None, noted: Noted | None
) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    first = 0
    for turn in sample.turns:
        own = numbers_of(noted, first + turn.given, first + len(turn.ids)) if noted is not None else {}
        parts += _said(turn, tokens, longest, own)
        first += len(turn.ids)
        if turn.heard:
            parts.append({"kind": "observation", "text": _cut(turn.heard, longest)})
    return parts


def _said(turn: Turn, tokens: TokenTexts | None, longest: int | None, noted: Mapping[str, Any]) -> list[dict[str, Any]]:
    if tokens is None:
        return [{"kind": "sampled", "text": _cut(turn.text, longest)}]
    pieces = tokens.pieces(turn.ids.tolist())
    if pieces and pieces[0].startswith(" ") and not turn.text.startswith(" "):
        pieces[0] = pieces[0][1:]
    parts: list[dict[str, Any]] = []
    if turn.given:
        parts.append({"kind": "given", "text": _cut("".join(pieces[: turn.given]), longest)})
    if turn.given < len(pieces):
        own, levels = pieces[turn.given :], levels_of(turn.logprobs[turn.given :])
        parts.append({"kind": "sampled", **_cut_pieces(own, {"levels": levels, **noted}, longest)})
    return parts


def levels_of(logprobs: np.ndarray) -> str:
    depth = np.clip(np.nan_to_num(-logprobs, nan=DEEPEST, posinf=DEEPEST), 0.0, DEEPEST) / DEEPEST
    return (FIRST_LEVEL + np.rint(np.sqrt(depth) * LEVELS)).astype(np.uint8).tobytes().decode("ascii")


def _cut(text: str, longest: int | None) -> str:
    if longest is None or len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are not in this report ...]\n{text[-half:]}"


def numbers_of(noted: Noted, first: int, last: int) -> dict[str, list[int | None] | int | None]:
    """Recorded numbers of some tokens, in thousandths: `pull` is the advantage, `engine` and `ratio` are logarithms. If
    all tokens have the same value it is a single number; kinds without any value are left out."""
    columns = {"pull": noted.advantage, "engine": noted.engine, "ratio": noted.ratio}
    found: dict[str, list[int | None] | int | None] = {}
    for name, column in columns.items():
        own = column[first:last].astype(np.float64) if column is not None else np.zeros(0)
        known = np.isfinite(own)
        if not known.any():
            continue
        whole = np.rint(1000 * np.where(known, own, 0.0)).astype(np.int64)
        if known.all() and (whole == whole[0]).all():
            found[name] = int(whole[0])
        else:
            found[name] = [int(one) if is_known else None for one, is_known in zip(whole, known, strict=True)]
    return found


def noted_kinds(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which kinds of token numbers these samples have."""
    parts = [part for sample in samples for part in sample["parts"]]
    return [name for name in ("pull", "ratio", "engine") if any(name in part for part in parts)]


def _cut_pieces(pieces: list[str], numbers: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    if longest is None or sum(map(len, pieces)) <= longest:
        return {"pieces": pieces, **numbers}
    return {"text": _cut("".join(pieces), longest)}


# --- evaluations -------------------------------------------------------------------------------------------------


def read_evaluation_chunk(folder: Path, longest: int | None = None) -> dict[str, Any]:
    """The samples of a finished evaluation."""
    prompts: dict[str, int] = {}
    shown: list[dict[str, Any]] = []
    for row in read_json_lines(folder / "samples.jsonl"):
        number = prompts.setdefault(_cut(row["prompt"], longest), len(prompts))
        shown.append({"prompt": number, **_shown_row(row, longest)})
    return {"prompts": list(prompts), "samples": shown}


def _shown_row(row: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    return {
        "group": f"{row['benchmark']} {row['problem']}",
        "number": row["sample"],
        "problem": row["problem"],
        "parts": _played(row["turns"], longest) if "turns" in row else [_text("sampled", row["completion"], longest)],
        "tokens": row["tokens"],
        "answer": row["extracted"],
        "gold": row["gold"],
        "verdict": row["verdict"],
        "reason": row["reason"],
        "faults": row["faults"],
        "format": row["format_ok"],
        "finish": row["finish"],
        "reward": row.get("reward"),
        "rewards": {},
    }


def _played(turns: Sequence[Mapping[str, Any]], longest: int | None) -> list[dict[str, Any]]:
    parts = []
    for turn in turns:
        parts.append(_text("sampled", turn["said"], longest))
        if turn["heard"]:
            parts.append(_text("observation", turn["heard"], longest))
    return parts


def _text(kind: str, text: str, longest: int | None) -> dict[str, Any]:
    return {"kind": kind, "text": _cut(text, longest)}


def first_groups(chunk: dict[str, Any], most: int | None) -> dict[str, Any]:
    """The first groups of a chunk, whole, that have `most` samples or a few more together."""
    if most is None or len(chunk["samples"]) <= most:
        return chunk
    kept: list[dict[str, Any]] = []
    for sample in chunk["samples"]:
        if len(kept) >= most and sample["group"] != kept[-1]["group"]:
            break
        kept.append(sample)
    return {"prompts": _used(chunk["prompts"], kept), "samples": kept, "all": len(chunk["samples"])}


def _used(prompts: Sequence[str], samples: Iterable[dict[str, Any]]) -> list[str]:
    """The prompts that these samples refer to; their indices are updated to match."""
    places: dict[int, int] = {}
    for sample in samples:
        sample["prompt"] = places.setdefault(sample["prompt"], len(places))
    return [prompts[number] for number in places]
