"""What holds for every text: grading never raises, and does not depend on wrapping or order."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from lemma.grading import GradingService, Verdict, grade
from lemma.grading.grader import malformed, read_and_compare
from lemma.grading.normal_form import normalise, squeezed
from lemma.grading.quick import quick
from lemma.grading.rules import DEFAULT

settings.register_profile("grading", deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
settings.load_profile("grading")

PIECES = [
    "1", "2", "12", "0.5", ".5", "-", "+", "/", "^", "*", "(", ")", "[", "]", "{", "}", ",", " ", "x", "y", "=",
    "<", "\\le", "\\frac", "\\frac{1}{2}", "\\sqrt", "\\sqrt{2}", "\\pi", "\\boxed{", "\\text{ cm}", "\\{", "\\}",
    "%", "^\\circ", "!", "|", "\\cup", "\\infty", "\\pm", "and", "or", "\\begin{pmatrix}", "\\end{pmatrix}", "&",
    "\\\\", "_", "'", ":", "$", "apples", "<answer>", "</answer>", "<think>", "</think>", "####", "the answer is ",
    "\n", "A", "(B)", "\\setminus", "\\in", "\\mathbb{R}",
]  # fmt: skip
FORMULAS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
TEXTS = st.one_of(st.text(max_size=40), FORMULAS)
NUMBERS = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.decimals(-1000, 1000, places=3).map(lambda d: f"{d:f}"),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda f: f"\\frac{{{f[0]}}}{{{f[1]}}}"),
    st.tuples(st.integers(1, 99), st.integers(1, 99)).map(lambda f: f"{f[0]}\\sqrt{{{f[1]}}}"),
    st.lists(st.integers(-50, 50), min_size=2, max_size=4, unique=True).map(lambda n: ", ".join(map(str, n))),
)


@lru_cache(maxsize=1)
def service() -> GradingService:
    return GradingService()


@given(TEXTS, TEXTS)
def test_grading_never_raises(prediction: str, gold: str) -> None:
    verdict = service().grade(prediction, gold)
    assert verdict.kind in ("right", "wrong", "unknown")
    if not gold.strip():
        assert verdict.kind == "unknown"
    elif not prediction.strip():
        assert verdict.kind != "right"


@example("1\n\n\n\n1")
@given(TEXTS)
def test_equal_normalised_texts_are_right(text: str) -> None:
    assume(text.strip() and squeezed(normalise(text.strip())) and not malformed(text))
    assume(not any(mark in text for mark in ("boxed", "<", "#", "$", "answer", "\\n")))
    assert service().grade(f"<answer>{text}</answer>", text).kind == "right"


@given(NUMBERS, NUMBERS)
def test_wrapping_keeps_the_verdict(answer: str, gold: str) -> None:
    plain = quick(answer, gold)
    assert isinstance(plain, Verdict)
    for wrapped in (
        f"\\boxed{{{answer}}}",
        f"We find $\\boxed{{{answer}}}$.",
        f"<answer> {answer} </answer>",
        f"  {answer}  ",
        f"{answer}.",
        f"${answer}$",
        f"#### {answer}",
        f"\\boxed{{ {answer}. }}",
    ):
        verdict = quick(wrapped, gold)
        assert isinstance(verdict, Verdict) and verdict.kind == plain.kind, (wrapped, gold)


WHOLE = st.one_of(st.from_regex(r"-?\d{1,18}", fullmatch=True), st.integers(-30, 30).map(str))


@given(WHOLE, WHOLE, st.sampled_from(["", " ", "\n", "  "]))
def test_bare_whole_numbers_are_judged_as_if_they_were_read(answer: str, gold: str, around: str) -> None:
    prediction = f"{around}{answer}{around}"
    read = read_and_compare(prediction, gold, DEFAULT, 0.0)
    assert isinstance(read, Verdict)
    assert quick(prediction, gold)[:3] == read[:3]


@given(NUMBERS)
def test_a_number_is_right_against_itself_and_wrong_against_the_next(text: str) -> None:
    assert grade(text, text).right
    if "," not in text:
        assert not grade(f"{text}+1", text).right
        assert not grade(f"{text}+0.000001", text).right


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_verdict_does_not_depend_on_batch_order(pairs: list[tuple[str, str]], random: object) -> None:
    expected = {pair: verdict[:3] for pair, verdict in zip(pairs, service().grade_many(pairs), strict=True)}
    shuffled = list(pairs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert [v[:3] for v in service().grade_many(shuffled)] == [expected[pair] for pair in shuffled]


@given(TEXTS)
def test_normalising_twice_changes_nothing(text: str) -> None:
    once = normalise(text)
    assert squeezed(normalise(once)) == squeezed(once) or "\\" in text or not text.isascii()
