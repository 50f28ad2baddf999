"""A parser for simple LaTeX and plain formulas: numbers, letters, + - * / ^ !, fractions, roots, common functions.

The result is a tree of tuples whose first member names the operation. Anything outside this small language raises
`Unreadable` and is left to the full parser behind `symbolic.py`. Nothing is ever evaluated as a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from lemma.grading.limits import MAX_DIGITS, MAX_NESTING, LimitExceeded
from lemma.grading.tokens import FUNCTIONS, Token, name_set

Tree = tuple[Any, ...]

GREEK = name_set(
    """
        alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi
        psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar
        """
)
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
UNIT_VECTORS = ("\\hat{i}", "\\hat{j}", "\\hat{k}")
_CLOSING = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil"}
_STARTS = frozenset({"num", "id", "(", "[", "{", "word"})


class Unreadable(Exception):
    """The text is not in the small language."""


@lru_cache(maxsize=8192)
def read(tokens: tuple[Token, ...]) -> Tree:
    """The tree of an expression that uses all the tokens."""
    reader = _Reader(tokens)
    tree = reader.sum()
    if reader.place != len(tokens):
        raise Unreadable(tokens[reader.place].value)
    return tree


def number(text: str) -> Fraction:
    """The exact value of a decimal literal."""
    if text.isdigit():
        return Fraction(int(text))
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_DIGITS:
        raise LimitExceeded("exponent of a number")
    return Fraction(mantissa.rstrip(".") or "0") * Fraction(10) ** int(exponent or 0)


class _Reader:
    def __init__(self, tokens: Sequence[Token]):
        self.tokens, self.place, self.depth = tokens, 0, 0

    def peek(self, ahead: int = 0) -> Token | None:
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else None

    def kind(self, ahead: int = 0) -> str:
        token = self.peek(ahead)
        return token.kind if token else ""

    def command(self, ahead: int = 0) -> str:
        token = self.peek(ahead)
        return token.value if token and token.kind == "cmd" else ""

    def take(self, kind: str) -> Token:
        token = self.peek()
        if token is None or token.kind != kind:
            raise Unreadable(f"expected {kind}")
        self.place += 1
        return token

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > 4 * MAX_NESTING:
            raise LimitExceeded("nesting of an expression")

    def sum(self) -> Tree:
        self.deeper()
        sign = self.sign()
        tree = self.product()
        if sign < 0:
            tree = ("neg", tree)
        terms = [tree]
        while self.kind() in ("+", "-"):
            negative = self.take(self.kind()).kind == "-"
            sign = self.sign() * (-1 if negative else 1)
            term = self.product()
            terms.append(("neg", term) if sign < 0 else term)
        self.depth -= 1
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def sign(self) -> int:
        sign = 1
        while self.kind() in ("+", "-"):
            sign *= -1 if self.take(self.kind()).kind == "-" else 1
        return sign

    def product(self) -> Tree:
        tree = self.power()
        while True:
            kind = self.kind()
            if kind in ("*", "/"):
                self.place += 1
                tree = ("mul" if kind == "*" else "div", tree, self.power())
            elif self.command() in ("bmod", "mod"):
                self.place += 1
                tree = ("mod", tree, self.power())
            elif self.begins_factor():
                tree = self.juxtaposed(tree)
            else:
                return tree

    def begins_factor(self) -> bool:
        kind = self.kind()
        if kind == "cmd":
            name = self.command()
            return name not in ("bmod", "mod", "pm", "mp") and self.known(name) and name not in ("rfloor", "rceil")
        return kind in _STARTS

    def known(self, name: str) -> bool:
        return (
            name in FUNCTIONS
            or name in GREEK
            or name in _CLOSING
            or name in ("frac", "binom", "pi", "infty", "overline", "hat")
        )

    def juxtaposed(self, tree: Tree) -> Tree:
        """Two adjacent factors: a mixed number, or a product."""
        before, token = self.tokens[self.place - 1], self.peek()
        assert token is not None
        if before.kind == "num" and tree[0] == "num" and tree[1].denominator == 1 and tree[1] > 0:
            if self.command() == "frac":
                part = self.power()
                if self.proper(part):
                    return ("add", tree, part)
                if part[0] in ("pct", "deg") and self.proper(part[1]):
                    return (part[0], ("add", tree, part[1]))
                return ("mul", tree, part)
            if token.kind == "num":
                if self.kind(1) == "/" and self.kind(2) == "num" and self.kind(3) not in ("^", "!"):
                    top, bottom = number(token.value), number(self.tokens[self.place + 2].value)
                    if 0 < top < bottom:
                        self.place += 3
                        return self.postfix(("add", tree, ("num", top / bottom)))
                raise Unreadable("two numbers side by side")
        exponent = self.place > 1 and self.tokens[self.place - 2].kind == "^"
        if token.kind == "num" and before.kind == "num" and not exponent:
            raise Unreadable("two numbers side by side")
        return ("mul", tree, self.power())

    @staticmethod
    def proper(tree: Tree) -> bool:
        return tree[0] == "div" and tree[1][0] == "num" and tree[2][0] == "num" and 0 < tree[1][1] < tree[2][1]

    def power(self) -> Tree:
        self.deeper()
        tree = self.postfix(self.atom())
        if self.kind() == "^":
            self.place += 1
            tree = self.postfix(("pow", tree, self.power()))
        self.depth -= 1
        return tree

    def postfix(self, tree: Tree) -> Tree:
        while True:
            kind = self.kind()
            if kind == "!":
                self.place += 1
                tree = ("fact", tree)
            elif kind == "deg":
                self.place += 1
                tree = ("deg", tree)
            elif kind == "%":
                self.place += 1
                tree = ("pct", tree)
            elif kind == "word" and self.peek() and self.tokens[self.place].value.lower() in SCALES:
                scale = SCALES[self.take("word").value.lower()]
                tree = ("mul", tree, ("num", Fraction(scale)))
            else:
                return tree

    def group(self, opening: str, closing: str) -> Tree:
        self.place += 1
        tree = self.sum()
        if self.kind() != closing and self.command() != closing:
            raise Unreadable(f"expected {closing} for {opening}")
        self.place += 1
        return tree

    def argument(self) -> Tree:
        if self.kind() != "{":
            raise Unreadable("expected an argument in braces")
        return self.group("{", "}")

    def atom(self) -> Tree:
        token = self.peek()
        if token is None:
            raise Unreadable("the end of the text")
        kind = token.kind
        if kind == "num":
            return self.literal()
        if kind in ("(", "[", "{"):
            return self.group(kind, _CLOSING[kind])
        if kind == "|":
            return ("abs", self.group("|", "|"))
        if kind == "id":
            self.place += 1
            return self.symbol(token.value)
        if kind == "word":
            return self.letters()
        if kind == "cmd":
            return self.commanded(token.value)
        if kind in ("+", "-"):
            sign = self.sign()
            tree = self.power()
            return ("neg", tree) if sign < 0 else tree
        raise Unreadable(token.value)

    def literal(self) -> Tree:
        token = self.take("num")
        value = number(token.value)
        if self.command() == "overline" and "." in token.value and self.tokens[self.place].start == token.end:
            self.place += 1
            digits = self.tokens[self.place + 1].value if self.kind(1) == "num" else ""
            if self.kind() != "{" or not digits.isdigit() or self.kind(2) != "}" or self.kind(3) == "num":
                raise Unreadable("repeating decimal")
            self.place += 3
            places = len(token.value.partition(".")[2])
            value += Fraction(int(digits), 10**places * (10 ** len(digits) - 1))
        if self.kind() == "_":
            raise Unreadable("a number in another base")
        return ("num", value)

    def symbol(self, name: str) -> Tree:
        while self.kind() in ("_", "'"):
            if self.take(self.kind()).kind == "'":
                name += "'"
                continue
            name += "_" + self.subscript()
        if self.kind() == "(" and (name[0] in "fgh" or (self.kind(1) == "num" and self.kind(2) == ")")):
            return ("call", name, self.group("(", ")"))
        if name == "e":
            return ("const", "e")
        if name == "i":
            return ("const", "i")
        return ("sym", name)

    def subscript(self) -> str:
        token = self.peek()
        if token is None:
            raise Unreadable("subscript")
        if token.kind != "{":
            self.place += 1
            return token.value
        depth = 0
        parts: list[str] = []
        while True:
            token = self.peek()
            if token is None:
                raise Unreadable("subscript")
            self.place += 1
            depth += {"{": 1, "}": -1}.get(token.kind, 0)
            if depth == 0:
                return "".join(parts)
            if token.kind not in "{}":
                parts.append(token.value)

    def letters(self) -> Tree:
        """A short run of letters is a product; a longer one is a word, which this language does not have."""
        token = self.take("word")
        if len(token.value) > 3:
            raise Unreadable(token.value)
        if self.kind() == "_" or self.kind() == "'":
            first = [("sym", c) if c not in "ei" else ("const", c) for c in token.value[:-1]]
            factors = [*first, self.symbol(token.value[-1])]
        else:
            factors = [("sym", c) if c not in "ei" else ("const", c) for c in token.value]
        tree: Tree = factors[0]
        for factor in factors[1:-1]:
            tree = ("mul", tree, factor)
        last = self.postfix(factors[-1])
        if self.kind() == "^":
            self.place += 1
            last = ("pow", last, self.power())
        return ("mul", tree, last)

    def commanded(self, name: str) -> Tree:
        self.place += 1
        if name == "frac":
            if self.kind(1) == "id" and self.tokens[self.place + 1].value == "d" and self.kind(2) == "}":
                raise Unreadable("a derivative")
            return ("div", self.argument(), self.argument())
        if name == "binom":
            return ("binom", self.argument(), self.argument())
        if name == "pi":
            return ("const", "pi")
        if name == "infty":
            return ("const", "inf")
        if name == "hat":
            inside = self.subscript()
            if inside not in ("i", "j", "k"):
                raise Unreadable("\\hat")
            return ("sym", f"\\hat{{{inside}}}")
        if name in GREEK:
            return self.symbol("\\" + name)
        if name in ("lfloor", "lceil"):
            self.place -= 1
            return (name[1:], self.group(name, _CLOSING[name]))
        if name == "sqrt":
            return self.root()
        if name in FUNCTIONS:
            return self.function(name)
        raise Unreadable("\\" + name)

    def root(self) -> Tree:
        index: Tree = ("num", Fraction(2))
        if self.kind() == "[":
            index = self.group("[", "]")
        if self.kind() not in ("{", "("):
            raise Unreadable("root without an argument")
        return ("root", self.group(self.kind(), _CLOSING[self.kind()]), index)

    def function(self, name: str) -> Tree:
        base: Tree | None = None
        exponent: Tree | None = None
        while self.kind() in ("_", "^"):
            if self.take(self.kind()).kind == "_":
                base = self.atom()
            else:
                exponent = self.power()
        if name in ("min", "max", "gcd", "lcm"):
            return (name, *self.arguments())
        argument = self.function_argument()
        if exponent == ("neg", ("num", Fraction(1))) and name in ("sin", "cos", "tan", "cot"):
            return ("fun", "arc" + name, argument)
        if name == "log" and base is not None:
            tree: Tree = ("div", ("fun", "ln", argument), ("fun", "ln", base))
        elif name == "lg":
            tree = ("div", ("fun", "ln", argument), ("fun", "ln", ("num", Fraction(10))))
        elif name in ("abs", "floor", "ceil"):
            tree = (name, argument)
        elif name == "cbrt":
            tree = ("root", argument, ("num", Fraction(3)))
        else:
            tree = ("fun", "ln" if name == "log" else name, argument)
        return tree if exponent is None else ("pow", tree, exponent)

    def arguments(self) -> list[Tree]:
        """Several values in brackets, separated by commas."""
        closing = {"(": ")", "\\{": "\\}", "[": "]"}.get(self.kind())
        if closing is None:
            raise Unreadable("values in brackets")
        trees = []
        while self.kind() != closing:
            self.place += 1
            trees.append(self.sum())
            if self.kind() not in (",", closing):
                raise Unreadable("values in brackets")
        self.place += 1
        return trees

    def function_argument(self) -> Tree:
        if self.kind() in ("(", "{", "[") or self.kind() == "|":
            return self.atom()
        sign = self.sign()
        tree = self.power()
        while self.begins_factor() and self.command() not in FUNCTIONS - {"sqrt"} and self.kind() != "(":
            tree = self.juxtaposed(tree)
        return ("neg", tree) if sign < 0 else tree
