"""Grading without sympy, in the process that asks: bounded work.

Most answers are a whole number against a whole number. A few string searches find and compare those; everything else
is read by `lemma.grading.grader`.
"""

from __future__ import annotations

import re
from time import perf_counter

from lemma.grading.extract import doubted
from lemma.grading.grader import PendingGrade, gold_answer, malformed, read_and_compare
from lemma.grading.rules import DEFAULT, Rules
from lemma.grading.verdict import Kind, Verdict


def quick(prediction: str, gold: str, rules: Rules = DEFAULT) -> Verdict | PendingGrade:
    """The verdict, or what sympy must still decide."""
    start = perf_counter()
    plain = _plain_mark(prediction, gold) if rules is DEFAULT and _PLAIN(gold) else None
    if plain is not None:
        return Verdict(*plain, perf_counter() - start)
    return read_and_compare(prediction, gold, rules, start)


def decides_nothing(gold: str) -> bool:
    """Whether no completion can be wrong by this gold: there is none, or it says nothing."""
    return not _PLAIN(gold) and (not gold_answer(gold) or malformed(gold))


_PLAIN = re.compile(r"-?\d{1,18}").fullmatch
# Longer texts hold more than a number.
MOST_BARE = 40
_DENIALS = ("ot", "OT", "n't")
_SLOW = ("<|", "<think", "<SOLUTION>", "<solution>", "<reasoning>", "<start_working_out>", "</s>", "<eos>")


def _plain_mark(prediction: str, gold: str) -> tuple[Kind, str, str] | None:
    """A whole number by itself, in one box, in a tag or after ####, against a whole number; None for all else."""
    if len(prediction) < MOST_BARE and _PLAIN(bare := prediction.strip()) and bare.isascii():
        return ("right", "exact", bare) if bare == gold else _plain_verdict(bare, gold)
    begin = 0
    if "<" in prediction:
        thought = prediction.rfind("</think>")
        begin = thought + 8 if thought >= 0 else 0
        for mark in _SLOW:
            if prediction.find(mark, begin) >= 0:
                return None
        tag = prediction.rfind("<answer>", begin)
        if tag >= 0:
            inside = prediction[tag + 8 :].partition("</answer>")[0].strip()
            return _plain_verdict(inside, gold)
    start = prediction.rfind("\\boxed", begin)
    if prediction.find("\\fbox", begin) >= 0:
        return None
    if start < 0:
        hashes = prediction.rfind("####", begin)
        return _plain_verdict(prediction[hashes + 4 :].strip(), gold) if hashes >= 0 else None
    end = prediction.find("}", start)
    if end < 0 or prediction[start + 6] != "{" or prediction.rfind("\\boxed", begin, start) >= 0:
        return None
    if len(prediction) > end + 8 and (prediction.find("nswer", end) >= 0 or doubted(prediction, end)):
        return None
    near = start - 40 if start > 40 else 0
    for denial in _DENIALS:
        if prediction.find(denial, near, start) >= 0:
            return None
    return _plain_verdict(prediction[start + 7 : end], gold)


def _plain_verdict(inside: str, gold: str) -> tuple[Kind, str, str] | None:
    if not _PLAIN(inside):
        return None
    return ("right" if inside == gold or int(inside) == int(gold) else "wrong"), "number", inside
