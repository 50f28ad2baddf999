"""What a model does under a recipe's sampling settings: numbers from a few groups, their meaning, what to change."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

import numpy as np

from lemma.core.ranks import own_slots, slots, together
from lemma.core.types import Problem
from lemma.engines.protocol import Engine, Sampling
from lemma.engines.sampling import cuts_support
from lemma.formats import FAULTS, Format
from lemma.formats.encode import encode_prompt
from lemma.rollouts import Episode, SampleRequest, Scorer, World, play

Level = Literal["fine", "note", "problem"]
SHINGLE = 4
PAIRS = 28
"""Maximum number of pairs of a group that are compared."""
SETTING = re.compile(r"\b(?:raise|lower) (stages\.[\w.]+)")
REWARD = "reward/"
"""In front of the name of a single reward, among the numbers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, in a sentence; `advice` says what to change and names the key of the recipe."""

    topic: str
    text: str
    level: Level = "fine"
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """What the samples were made with. `prefix` is the stage's path in the recipe, such as `stages.grpo`."""

    fmt: Format
    sampling: Sampling
    tokenizer: Any
    prefix: str = "stages.rl"
    context: int | None = None
    compares: bool = True
    """Whether the algorithm compares the samples of a problem: a group with one reward for all then teaches nothing."""
    taught_in: str | None = None
    """The supervised stage before this one, if there is any."""

    @property
    def teach(self) -> str:
        return how_to_teach(self.taught_in)


def how_to_teach(stage: str | None) -> str:
    """How a model learns what only examples show; `stage` is the supervised stage before, if there is any."""
    if stage is not None:
        return f"train stage {stage} longer, on examples that show it"
    return "put a supervised stage in front"


@dataclass(slots=True)
class Checkup:
    numbers: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def advice(self) -> list[str]:
        """What to change, the most urgent first; each setting once."""
        order = {"problem": 0, "note": 1, "fine": 2}
        ranked = sorted(self.findings, key=lambda finding: order[finding.level])
        advice: list[str] = []
        told: set[str] = set()
        for sentence in dict.fromkeys(finding.advice for finding in ranked if finding.advice):
            settings = set(SETTING.findall(sentence))
            if not settings or settings - told:
                advice.append(sentence)
            told |= settings
        return advice


def sample_groups(
    engine: Engine,
    tokenizer: Any,
    scorer: Scorer,
    sampling: Sampling,
    problems: Sequence[Problem],
    group_size: int,
    world: World | None = None,
) -> list[list[Episode]]:
    """`group_size` graded samples of each problem, in the order of the problems.

    Every rank must call this alike: each plays a share of the problems, and all get all samples.
    """
    asks = [
        SampleRequest(("debug", number), problem, encode_prompt(scorer.fmt, problem, tokenizer), group_size)
        for number, problem in enumerate(problems)
    ]
    groups: dict[Any, list[Episode]] = {ask.key: [] for ask in asks}

    def own_part() -> list[Episode]:
        played: list[Episode] = []
        for slot in own_slots():
            with engine.slot(slot):
                played += play(engine, asks[slot :: slots()], sampling, scorer, world=world)
        return played

    for share in together(own_part, "samples to look at"):
        for sample in share:
            groups[sample.key].append(sample)
    return [sorted(group, key=lambda sample: sample.sample) for group in groups.values()]


def diagnose(groups: Sequence[Sequence[Episode]], situation: Situation) -> Checkup:
    """Look at groups of samples, each of one problem; every number is a mean over samples or over groups.

    What only several samples of a problem can show has no number where there is one of each.
    """
    assert groups and all(groups), "at least one sample of at least one problem"
    numbers = measure(groups, situation)
    findings = [
        *_diversity(numbers, situation),
        *_format(groups, numbers, situation),
        *_length(numbers, situation),
        *_ends(groups, numbers, situation),
        *_rewards(groups, numbers, situation),
        *_certainty(numbers, situation),
        *_tokens(numbers),
    ]
    return Checkup(numbers, findings)


def _paid_without_gold(sample: Episode) -> bool:
    """Whether there is nothing to be right about, and no reward asks."""
    return sample.reason == "no_gold" and sample.reward is not None


def measure(groups: Sequence[Sequence[Episode]], situation: Situation) -> dict[str, float]:
    """The numbers that the findings are made of, by name."""
    samples = [sample for group in groups for sample in group]
    rewards = [[sample.reward for sample in group if sample.reward is not None] for group in groups]
    known = [values for values in rewards if values]
    logprobs = np.concatenate([sample.logprobs[sample.given :] for sample in samples] or [np.zeros(0)])
    numbers = {
        "groups": float(len(groups)),
        "samples": float(len(samples)),
        "format": fmean(sample.format_ok for sample in samples),
        "answered": fmean(sample.answer is not None for sample in samples),
        "truncated": fmean(sample.finish == "length" for sample in samples),
        "empty": fmean(not sample.text.strip() for sample in samples),
        "tokens": fmean(len(sample.ids) for sample in samples),
        "longest": float(max(len(sample.ids) for sample in samples)),
        "longest_prompt": float(max(len(sample.prompt) for sample in samples)),
        "unknown": fmean(sample.verdict == "unknown" and not _paid_without_gold(sample) for sample in samples),
        "reward": fmean(value for values in known for value in values) if known else 0.0,
        "spread_of_all": float(np.std([value for values in known for value in values])) if known else 0.0,
        "logprob": float(logprobs.mean()) if len(logprobs) else 0.0,
    }
    if not all(map(_paid_without_gold, samples)):
        numbers["right"] = fmean(sample.verdict == "right" for sample in samples)
    if min(map(len, groups)) > 1:
        numbers |= {
            "distinct": fmean(len({tuple(s.ids.tolist()) for s in group}) / len(group) for group in groups),
            "distinct_answers": fmean(len({s.answer for s in group if s.answer is not None}) for group in groups),
            "similarity": fmean(similarity(group) for group in groups),
            "spread": fmean(float(np.std(values)) for values in known) if known else 0.0,
        }
        if situation.compares:
            numbers["dead"] = fmean(max(values) == min(values) if values else True for values in rewards)
    return numbers | _each_reward(samples) | _round_trip(samples, situation.tokenizer)


def _each_reward(samples: Sequence[Episode]) -> dict[str, float]:
    """The mean of each reward before its weight, over the samples that have it."""
    names = dict.fromkeys(name for sample in samples for name in sample.rewards)
    known = {name: [value for one in samples if (value := one.rewards.get(name)) is not None] for name in names}
    return {f"{REWARD}{name}": fmean(values) for name, values in known.items() if values}


def similarity(group: Sequence[Episode]) -> float:
    """Mean over pairs of the share of 4-token pieces that two completions have in common (Jaccard); 1: all alike."""
    assert len(group) > 1, "two completions to compare"
    pieces = [_pieces(sample.ids.tolist()) for sample in group]
    pairs = list(combinations(range(len(group)), 2))
    chosen = pairs[:: max(1, len(pairs) // PAIRS)]
    return fmean(len(pieces[a] & pieces[b]) / len(pieces[a] | pieces[b]) for a, b in chosen)


def _pieces(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[place : place + SHINGLE]) for place in range(max(1, len(ids) - SHINGLE + 1))}


def _round_trip(samples: Sequence[Episode], tokenizer: Any) -> dict[str, float]:
    """Whether text made from ids gives the same ids again, and how much of the prompts the tokenizer does not know."""

    def again(ids: np.ndarray) -> bool:
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return list(tokenizer.encode(text, add_special_tokens=False)) == ids.tolist()

    prompts = {sample.problem_id: sample.prompt for sample in samples}
    unknown, bos = tokenizer.unk_token_id, tokenizer.bos_token_id
    ids = np.concatenate(list(prompts.values()))
    doubled = [len(p) > 1 and bos is not None and p[0] == p[1] == bos for p in prompts.values()]
    return {
        "round_trip": fmean(again(sample.ids) for sample in samples),
        "prompt_round_trip": fmean(again(prompt) for prompt in prompts.values()),
        "unknown_words": float(np.mean(ids == unknown)) if unknown is not None and len(ids) else 0.0,
        "doubled_bos": fmean(doubled),
    }


def _is_alike(n: Mapping[str, float]) -> bool:
    return "distinct" in n and (n["distinct"] < 0.5 or n["similarity"] > 0.9)


def _is_random(n: Mapping[str, float], s: Situation) -> bool:
    """Whether tokens are drawn nearly at random; at temperature 0 none is drawn, and completions that are alike show
    that something else decides."""
    return -n["logprob"] > 2.5 and s.sampling.temperature > 0 and not _is_alike(n)


def _diversity(n: Mapping[str, float], s: Situation) -> Iterable[Finding]:
    if "distinct" not in n:
        yield Finding("diversity", "one sample of each problem cannot show it (--group-size 4 would)")
        return
    text = (
        f"{n['distinct']:.0%} of a group's completions differ, with {n['distinct_answers']:.1f} different answers; "
        f"two of them share {n['similarity']:.0%} of their 4-token pieces"
    )
    key = f"{s.prefix}.rollout.temperature"
    if _is_alike(n):
        advice = f"raise {key} (now {s.sampling.temperature:g}): completions that are alike teach nothing"
        if cuts_support(s.sampling):
            advice = f"loosen top_p, top_k and min_p under {s.prefix}.rollout, or {advice}"
        yield Finding("diversity", text, "problem", advice)
    else:
        yield Finding("diversity", text)


def _format(groups: Sequence[Sequence[Episode]], n: Mapping[str, float], s: Situation) -> Iterable[Finding]:
    samples = [sample for group in groups for sample in group]
    faults = Counter(fault for sample in samples for fault in sample.faults)
    seen = "; ".join(f"{FAULTS[name]} ({count / len(samples):.0%})" for name, count in faults.most_common(3))
    text = f"the format {s.fmt.name} is kept by {n['format']:.0%} and gives an answer in {n['answered']:.0%}"
    text += f": {seen}" if seen else ""
    if n["format"] < 0.5 and _is_cut_off(n):
        yield Finding("format", f"{text}; nearly all completions are cut off, so this says little", "note")
    elif n["format"] == 0:
        advice = f"{s.teach}, so that the model learns the format first, or set `format` to one that it knows"
        yield Finding("format", text, "problem", advice)
    elif n["format"] < 0.5:
        advice = f"add a reward for the format to {s.prefix}.rewards, or {s.teach}"
        yield Finding("format", text, "note", advice)
    else:
        yield Finding("format", text)


def _is_cut_off(n: Mapping[str, float]) -> bool:
    """Whether hardly any completion ends by itself."""
    return n["truncated"] > 0.9


def _longer(n: Mapping[str, float], s: Situation) -> str:
    """What to do about completions that are cut off."""
    limit = s.sampling.max_tokens
    is_full = s.context is not None and s.context - int(n["longest_prompt"]) <= limit
    never_ends = n["format"] == 0 and _is_cut_off(n)
    if is_full and never_ends:
        return f"teach the model to end its answers: {s.teach}"
    if is_full:
        return f"the context of {s.context} tokens is full: take shorter prompts or a model with a longer context"
    otherwise = (
        f"; if they still do not end, {s.teach}"
        if never_ends
        else f", or add the reward soft_overlong to {s.prefix}.rewards"
    )
    return f"raise {s.prefix}.rollout.max_tokens (now {limit}){otherwise}"


def _length(n: Mapping[str, float], s: Situation) -> Iterable[Finding]:
    limit = s.sampling.max_tokens
    text = f"{n['tokens']:.0f} tokens on average, {n['longest']:.0f} at most, of {limit} allowed; "
    text += f"{n['truncated']:.0%} are cut off"
    key = f"{s.prefix}.rollout.max_tokens"
    if n["truncated"] > 0.1:
        level: Level = "problem" if n["truncated"] > 0.5 else "note"
        yield Finding("length", text, level, _longer(n, s))
    elif n["longest"] * 4 < limit:
        yield Finding("length", text, "note", f"{key} could be {2 * int(n['longest'])} (now {limit}): less memory")
    else:
        yield Finding("length", text)
    if n["empty"] > 0.1:
        advice = f"check the end of the prompt (`lemma data show`), or set {s.prefix}.rollout.min_tokens"
        yield Finding("length", f"{n['empty']:.0%} of the completions are empty", "problem", advice)


def _ends(groups: Sequence[Sequence[Episode]], n: Mapping[str, float], s: Situation) -> Iterable[Finding]:
    """How completions end, and whether anything that should have ended them did not."""
    samples = [sample for group in groups for sample in group]
    own = {s.tokenizer.eos_token_id, *s.sampling.stop_ids}
    by_token = fmean(len(x.ids) > 0 and int(x.ids[-1]) in own for x in samples)
    by_text = fmean(x.finish == "stop" and (len(x.ids) == 0 or int(x.ids[-1]) not in own) for x in samples)
    stops = ", ".join(map(repr, s.sampling.stop)) or "none"
    names = ", ".join(repr(s.tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in sorted(own))
    text = f"{by_token:.0%} end with an end token ({names}), {by_text:.0%} at a stop string ({stops})"
    if fmean("text_after_answer" in x.faults for x in samples) > 0.2:
        advice = f"add the closing tag of the answer to {s.prefix}.rollout.stop: the model goes on after its answer"
        yield Finding("ends", text, "note", advice)
    else:
        yield Finding("ends", text)


def _rewards(groups: Sequence[Sequence[Episode]], n: Mapping[str, float], s: Situation) -> Iterable[Finding]:
    spread = f"within a group {n['spread']:.3g}" if "dead" in n else f"over all samples {n['spread_of_all']:.3g}"
    each = {name.removeprefix(REWARD): value for name, value in n.items() if name.startswith(REWARD)}
    parts = f" ({', '.join(f'{name} {value:.3g}' for name, value in each.items())})" if len(each) > 1 else ""
    text = f"mean {n['reward']:.3g}{parts}, spread {spread}"
    if "right" in n:
        text += f", {n['right']:.0%} of the answers are right"
    if "dead" in n:
        text += f"; {n['dead']:.0%} of the groups have one reward for all and teach nothing"
    elif n["spread_of_all"] == 0:
        text += "; all samples have the same reward"
    if n["unknown"] > 0.05:
        text += f"; {n['unknown']:.0%} could not be graded"
    if n["dead"] > 0.5 if "dead" in n else n["spread_of_all"] == 0:
        yield Finding("rewards", text, "problem", _dead_advice(groups, n, s))
    else:
        yield Finding("rewards", text, "note" if n["unknown"] > 0.05 else "fine",
                      f"look at the gold answers of {s.prefix}.data" if n["unknown"] > 0.05 else None)  # fmt: skip


def _dead_advice(groups: Sequence[Sequence[Episode]], n: Mapping[str, float], s: Situation) -> str:
    bigger = f"raise {s.prefix}.algorithm.group_size (now {len(groups[0])})" if "dead" in n else ""
    hotter = "" if _is_random(n, s) or _is_alike(n) else f"raise {s.prefix}.rollout.temperature"
    if n["unknown"] > 0.5:
        return f"most answers cannot be graded: check that {s.prefix}.data has gold answers"
    right = n.get("right", 0.5)
    if right > 0.9:
        return f"take harder problems in {s.prefix}.data: the model solves nearly all of these"
    if right < 0.1 and _is_cut_off(n):
        return _longer(n, s)
    if n["format"] == 0:
        return f"no completion keeps the format, so none is rewarded: {s.teach}"
    if right < 0.1:
        easier = f"take easier problems in {s.prefix}.data"
        return f"{' or '.join(filter(None, (easier, bigger)))}: nearly all answers are wrong"
    if not bigger:
        return f"check {s.prefix}.rewards: right and wrong answers are worth the same"
    return f"{', or '.join(filter(None, (bigger, hotter)))}: groups agree with themselves"


def _certainty(n: Mapping[str, float], s: Situation) -> Iterable[Finding]:
    """Sampled from the model's own distribution, the mean negative log-probability estimates the entropy of a token."""
    entropy, temperature = -n["logprob"], s.sampling.temperature
    text = f"about {entropy:.2f} nats of entropy a token (mean log-probability {n['logprob']:.2f})"
    if temperature == 0:
        text = (
            f"nothing is drawn at temperature 0; the likeliest tokens have a mean log-probability of {n['logprob']:.2f}"
        )
    key = f"{s.prefix}.rollout.temperature"
    if _is_random(n, s):
        advice = f"lower {key} (now {temperature:g}), or set min_p as well: tokens are drawn nearly at random"
        yield Finding("entropy", text, "problem", advice)
    elif entropy < 0.02:
        yield Finding("entropy", text, "note", f"raise {key} (now {temperature:g}): nothing is explored")
    else:
        yield Finding("entropy", text)


def _tokens(n: Mapping[str, float]) -> Iterable[Finding]:
    text = f"ids to text and back are the same for {n['prompt_round_trip']:.0%} of the prompts and "
    text += f"{n['round_trip']:.0%} of the completions"
    level: Level = "fine"
    advice = None
    if n["unknown_words"] > 0:
        level = "problem"
        text += f"; {n['unknown_words']:.0%} of the prompts' tokens are unknown to the tokenizer"
        advice = "use `model.tokenizer` of this model, or a format and data in words that it knows"
    elif n["doubled_bos"] > 0:
        level, text = "problem", f"{text}; prompts begin with two beginning-of-sequence tokens"
        advice = "remove one from the tokenizer's chat template: formats do not write it twice"
    elif n["prompt_round_trip"] < 1:
        level, advice = "note", "check that `model.tokenizer` belongs to the model"
    elif n["round_trip"] < 0.5:
        level, text = "note", f"{text} (harmless here: only ids are learnt, text is never tokenised again)"
    yield Finding("tokens", text, level, advice)
