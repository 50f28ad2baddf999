"""The allow-list in front of sympy: only mathematical commands and characters reach a parser.

sympy's own string parsers evaluate their input as Python. The LaTeX parser used here does not, but letters and words
still become symbol names; so leading underscores, quotes, and words that are not mathematics are refused before any
parser sees them.
"""

from __future__ import annotations

import re

from lemma.grading import evaluate
from lemma.grading.evaluate import NotRational, Undefined
from lemma.grading.expression import Unreadable, read
from lemma.grading.limits import MAX_EXPONENT, MAX_NESTING, LimitExceeded, check_shape
from lemma.grading.tokens import name_set, tokenise

_COMMANDS = name_set(
    """
        frac sqrt cdot times div pm mp le ge ne lt gt approx equiv in notin cup cap setminus subset subseteq
        emptyset infty pi alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau
        upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar sin cos
        tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp min max gcd lcm lim sum
        prod int iint oint binom choose lfloor rfloor lceil rceil lvert rvert langle rangle begin end text
        mathbb mathrm mathbf overline underline bar vec hat overrightarrow overleftarrow widehat det bmod pmod
        mod to rightarrow prime circ degree ldots cdots vdots ddots dots land lor wedge vee neg partial nabla
        mid parallel perp angle triangle quad qquad operatorname left right limits hspace space forall exists
        implies iff deg dim ker Re Im arg sgn sup inf
        """
)
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_CHARACTERS = re.compile(r"[A-Za-z0-9\s+\-*/^_=<>().,;:!|&%°'\[\]{}\\~$]*")
_NAME = re.compile(
    r"__|'\w|\b(?:import|eval|exec|open|compile|lambda\s+\w|globals|locals|getattr|setattr|subprocess|sympify|os|sys)\b"
)
_WORD = re.compile(r"(?<!\\)[A-Za-z]{12,}")
_DIGITS = re.compile(r"\d{200,}")
_POWER = re.compile(r"\^\s*\{?\s*-?(\d+)|\*\*\s*-?(\d+)")
_TOWER = re.compile(r"\^\s*[^\s+\-=,]{0,12}\^")
_FACTORIAL = re.compile(r"(\d+|[)}\]])\s*!")
_ENVIRONMENT = re.compile(r"\\begin\{([^{}]*)\}")
_ENVIRONMENTS = frozenset(
    {"matrix", "pmatrix", "bmatrix", "vmatrix", "Vmatrix", "Bmatrix", "smallmatrix", "cases", "array"}
)


class Refused(Exception):
    """The text is not mathematics that the symbolic path accepts."""


def check_symbolic(text: str) -> None:
    """Raise Refused or LimitExceeded unless the text may be given to the LaTeX parser."""
    check_shape(text, 1_200)
    if not _CHARACTERS.fullmatch(text):
        raise Refused("characters")
    if _NAME.search(text) or _WORD.search(text):
        raise Refused("words")
    for name in _COMMAND.findall(text):
        if name not in _COMMANDS:
            raise Refused("\\" + name)
    for name in _ENVIRONMENT.findall(text):
        if name not in _ENVIRONMENTS:
            raise Refused(name)
    _check_sizes(text)


_ARITHMETIC = re.compile(r"[\d.\s+\-*×/^()÷]{2,}")
_PLAIN_CHARACTERS = re.compile(r"[0-9. \t\r\n+\-*×/^()÷]*")


def _is_small(text: str) -> bool:
    powers = text.replace("**", "^")
    try:
        check_shape(text)
        _check_sizes(powers)
    except LimitExceeded:
        return False
    return _PLAIN_CHARACTERS.fullmatch(text) is not None and not _TOWER.search(powers)


def without_large_arithmetic(text: str, instead: str) -> str:
    """The text with each run of arithmetic that is large, or not in plain characters, replaced.

    For a parser that passes such runs to sympy's Python parser, wherever in a text it finds them.
    """

    def kept(run: re.Match[str]) -> str:
        is_arithmetic = any(c.isdigit() for c in run[0]) and any(c in "+-*×/^()÷" for c in run[0])
        return run[0] if not is_arithmetic or _is_small(run[0]) else instead

    return _ARITHMETIC.sub(kept, text)


_PRODUCT = re.compile(r"\\prod(?:_\{[^{}]*\}|_\w)?\s*\^\s*(?:\{\s*((?:[^{}]|\{[^{}]*\})*)\}|(\w))")
_MOST_FACTORS = 2_000


def _check_products(text: str) -> None:
    """Refuse products of more factors than can be multiplied in time."""
    for match in _PRODUCT.finditer(text):
        try:
            if evaluate.exact(read(tokenise(match[1] or match[2])), 0) > _MOST_FACTORS:
                raise LimitExceeded("factors of a product")
        except (Unreadable, NotRational, Undefined):
            continue


def _check_sizes(text: str) -> None:
    _check_products(text)
    if _DIGITS.search(text):
        raise LimitExceeded("digits")
    for first, second in _POWER.findall(text):
        if len(first or second) > 5 or int(first or second) > MAX_EXPONENT:
            raise LimitExceeded("exponent")
    if text.count("^") > MAX_NESTING or len(_TOWER.findall(text)) > 2:
        raise LimitExceeded("powers")
    if text.count("!") > 10 or any(n.isdigit() and (len(n) > 4 or int(n) > 2000) for n in _FACTORIAL.findall(text)):
        raise LimitExceeded("factorial")
    if text.count("&") > 100 or text.count("\\\\") > 100:
        raise LimitExceeded("size of a matrix")
