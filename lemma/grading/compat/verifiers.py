"""The verifiers of the PPO system: name, prediction and label to a score."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable

from lemma.grading.compat.strings import hendrycks_box, hendrycks_equal, minerva
from lemma.grading.compat.sympy_strings import strip_commas

_END = "I hope it is correct."
_FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")


def normal_words(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(prediction: str, label: str) -> float:
    """F1 of the words that two texts share; 0 where one is yes, no or no answer and the other is not."""
    left, right = normal_words(prediction), normal_words(label)
    for one, other in ((left, right), (right, left)):
        if one in ("yes", "no", "noanswer") and one != other:
            return 0.0
    common = sum((Counter(left.split()) & Counter(right.split())).values())
    if not common:
        return 0.0
    precision, recall = common / len(left.split()), common / len(right.split())
    return 2 * precision * recall / (precision + recall)


def gsm8k(prediction: str, label: str, signed: bool = False) -> float:
    """The last number; the older definition loses the sign of integers, `signed` keeps it."""
    text = re.sub(r"(\d),(\d)", r"\1\2", prediction)
    numbers = re.findall(r"[-+]?\d*\.\d+|[-+]?\d+" if signed else r"[-+]?\d*\.\d+|\d+", text)
    return float((numbers[-1] if numbers else text).lower() == label.lower())


def gsm8k_current(prediction: str, label: str) -> float:
    return gsm8k(prediction, label, signed=True)


def _parsed_equal(left: str, right: str) -> bool:
    """Equality of two LaTeX formulas by the difference of what they parse to."""
    from lemma.grading.guard import Refused
    from lemma.grading.limits import LimitExceeded
    from lemma.grading.single import GoldLimit
    from lemma.grading.symbolic import difference_is_zero

    left, right = strip_commas(left), strip_commas(right)
    if left.rstrip().endswith(".") or right.rstrip().endswith(".") or "," in left + right:
        return False
    try:
        return difference_is_zero(left, right)
    except (Refused, LimitExceeded, GoldLimit):
        return False


def _minerva_answer(prediction: str) -> str | None:
    found = _FINAL.search(prediction + _END)
    return minerva(found[1].strip()) if found else None


def _any_equal(answers: list[str], label: str) -> float:
    return float(any(_parsed_equal(answer, label) or hendrycks_equal(answer, label) for answer in answers))


def math(prediction: str, label: str) -> float:
    """The last box and the Minerva sentence; else the last formula between dollars; else the whole text."""
    answers = [a for a in (hendrycks_box(prediction), _minerva_answer(prediction)) if a is not None]
    if not answers:
        dollars = [m.start() for m in re.finditer(r"\$", prediction)]
        if len(dollars) > 1:
            answers = [minerva(prediction[dollars[-2] + 1 : dollars[-1]])]
        else:
            answers = [minerva(prediction), prediction]
    return _any_equal(answers, label)


def strict_math(prediction: str, label: str) -> float:
    """The Minerva sentence, else the whole text."""
    answer = _minerva_answer(prediction)
    return _any_equal([minerva(prediction) if answer is None else answer], label)


def flan(prediction: str, label: str) -> float:
    """What follows the last "The answer is: ", as words."""
    return float(normal_words(prediction.split("The answer is: ")[-1].strip()) == normal_words(label))


def string_matcher(prediction: str, label: str) -> float:
    """What is between the answer tags, as words."""
    if "<answer>" not in prediction or "</answer>" not in prediction:
        return 0.0
    inside = prediction.split("<answer>")[-1].split("</answer>")[0]
    return float(normal_words(inside) == normal_words(label))


def _visible(prediction: str) -> str:
    text = prediction.split("</think>")[-1]
    return text.replace("<answer>", "").replace("</answer>", "")


def string_f1(prediction: str, label: str) -> float:
    return token_f1(_visible(prediction), label)


def puzzle(prediction: str, label: str) -> float:
    return float(normal_words(_visible(prediction)) == normal_words(label))


def _labels(label: str) -> list[str]:
    try:
        labels = json.loads(label)
    except json.JSONDecodeError:
        return [label]
    return [str(one) for one in labels] if isinstance(labels, list) else [str(labels)]


def re_search_f1(prediction: str, label: str) -> float:
    """F1 of the text after `<finish>`; 0.1 where there is some but it shares nothing."""
    if "<finish>" not in prediction:
        return 0.0
    inside = prediction.split("<finish>")[-1].split("</finish>")[0].strip()
    if not inside:
        return 0.0
    return max(token_f1(inside, one) for one in _labels(label)) or 0.1


def re_search(prediction: str, label: str) -> float:
    """Exact words of the text in finish tags of any case, against any label."""
    answers = re.findall(r"<finish>(.*?)</finish>", prediction, re.IGNORECASE | re.DOTALL)
    if not answers:
        return 0.0
    return float(any(normal_words(answers[-1].strip()) == normal_words(one) for one in _labels(label)))


VERIFIERS: dict[str, Callable[[str, str], float]] = {
    "gsm8k": gsm8k,
    "gsm8k_current": gsm8k_current,
    "math": math,
    "strict_math": strict_math,
    "flan": flan,
    "string_matcher": string_matcher,
    "string_f1": string_f1,
    "puzzle": puzzle,
    "re_search_f1": re_search_f1,
    "re_search": re_search,
}
