"""Spellings that older graders compare: the Hendrycks string, its variant with a list of units, the Minerva string.

Each function reproduces, quirk by quirk, what a published grader does to a string before comparing it. They are here
for numbers comparable with those systems; Lemma's own grader is `lemma.grade`.
"""

from __future__ import annotations

import re


def last_box(text: str) -> str | None:
    """The last `\\boxed` or `\\fbox` with its braces, or None; a box without a closing brace is none."""
    start = max(text.rfind("\\boxed"), -1)
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return None
    depth = 0
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return text[start : place + 1]
    return None


def box_content(text: str) -> str | None:
    """What is inside the last box; only `\\boxed{` counts."""
    box = last_box(text)
    return box[len("\\boxed{") : -1] if box is not None and box.startswith("\\boxed{") else None


def hendrycks_box(text: str) -> str | None:
    """The box as the MATH data set's own reader has it: `\\boxed 7`, up to a dollar sign, comes before braces."""
    mark = "\\boxed "
    return text.split(mark)[-1].split("$")[0] if mark in text else box_content(text)


def fix_fractions(text: str) -> str:
    """`\\frac12` and `\\frac1{72}` get their braces; a fraction cut short leaves the text alone."""
    head, *pieces = text.split("\\frac")
    out = head
    for piece in pieces:
        out += "\\frac"
        if piece[:1] == "{":
            out += piece
            continue
        if len(piece) < 2:
            return text
        out += "{" + piece[0] + "}" + (piece[1:] if piece[1] == "{" else "{" + piece[1] + "}" + piece[2:])
    return out


def fix_slash(text: str) -> str:
    """A whole text `a/b` of two integers becomes `\\frac{a}{b}`."""
    parts = text.split("/")
    if len(parts) != 2:
        return text
    try:
        top, bottom = int(parts[0]), int(parts[1])
    except ValueError:
        return text
    return f"\\frac{{{top}}}{{{bottom}}}" if text == f"{top}/{bottom}" else text


def fix_roots(text: str) -> str:
    head, *pieces = text.split("\\sqrt")
    return head + "".join("\\sqrt" + (p if p[:1] == "{" or not p else "{" + p[0] + "}" + p[1:]) for p in pieces)


def _drop_text_unit(text: str) -> str | None:
    """Cut at `\\text{ `, which starts a unit; None where there are two, on which the original gives up."""
    if "\\text{ " not in text:
        return text
    pieces = text.split("\\text{ ")
    return pieces[0] if len(pieces) == 2 else None


def _finish(text: str) -> str:
    """The common end of both Hendrycks strings."""
    cut = _drop_text_unit(text)
    if cut is None:
        raise ValueError("two units")
    text = cut.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = fix_fractions(fix_roots(text).replace(" ", ""))
    return fix_slash("\\frac{1}{2}" if text == "0.5" else text)


def hendrycks(text: str) -> str:
    """The string of the MATH data set's own grader. Raises ValueError where the original raises."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    return _finish(text)


def hendrycks_equal(left: str | None, right: str | None) -> bool:
    if left is None or right is None:
        return left is right
    try:
        return hendrycks(left) == hendrycks(right)
    except ValueError:
        return left == right


_UNIT_TEXT = (
    "east|degree|mph|kmph|ft|m sqaure| m east|sq m|deg|mile|q .|monkey|prime|ratio|profit of rs|rd|o|gm|p . m|lb|"
    "tile|per|dm|lt|gain|ab|way|west|a .|b .|c .|d .|e .|f .|g .|h .|t|a|h|no change|men|soldier|pie|bc|excess|"
    "st|inches|noon|percent|by|gal|kmh|c|acre|rise|a . m|th|π r 2|sq|mark|l|toy|coin|sq . m|gallon|° f|profit|"
    "minw|yr|women|feet|am|pm|hr|cu cm|square|v â € ™|are|rupee|rounds|cubic|cc|mtr|s|ohm|number|kmph|day|hour|"
    "minute|min|second|man|woman|sec|cube|mt|sq inch|mp|∏ cm ³|hectare|more|sec|unit|cu . m|cm 2|rs .|rs|kg|g|"
    "month|km|m|cm|mm|apple|liter|loss|yard|pure|year|increase|decrease|d|less|Surface|litre|pi sq m|s .|metre|"
    "meter|inch"
)
_UNITS = tuple(_UNIT_TEXT.split("|"))
_UNIT_PATTERNS = [(unit, re.compile(rf"(^|\W){unit}s?($|\W)")) for unit in _UNITS]
_ARRAY = (re.compile(r"\\begin\{array\}\{.*?\}"), re.compile(r"\\end\{array\}"))


def _drop_units(text: str, lone_letters: bool) -> str:
    for _ in range(2):
        for unit, pattern in _UNIT_PATTERNS:
            if not lone_letters and len(unit.replace(".", "").strip()) == 1:
                continue
            shorter = pattern.sub(r"\1\2", text)
            if shorter:
                text = shorter
    return text


def inside_text(text: str) -> str:
    r"""What `\text{}` holds, where it encloses the whole answer; otherwise the answer itself."""
    text = text.strip()
    whole = re.fullmatch(r"\\text\{(?P<text>.+?)\}", text)
    return whole["text"].strip() if whole else text


def mathd(text: str, lone_letters: bool = True) -> str:
    """The string of the boxed grader: Hendrycks plus matrices, signs and a list of units.

    `lone_letters` reproduces the original's defect of deleting single letters as units, so that x+a equals x+c.
    """
    text = inside_text(text)
    try:
        return _mathd(text, lone_letters)
    except ValueError:
        return text


def _mathd(text: str, lone_letters: bool) -> str:
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = _ARRAY[1].sub(r"\\end{pmatrix}", _ARRAY[0].sub(r"\\begin{pmatrix}", text)).replace("bmatrix", "pmatrix")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace("\\neq", "\\ne").replace("\\leq", "\\le").replace("\\geq", "\\ge")
    text = text.replace("\\left", "").replace("\\right", "")
    shorter = re.sub(r"\\text\{.*?\}$", "", text).strip()
    if shorter:
        text = shorter
    text = _drop_units(text, lone_letters)
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "").replace("$", "")
    return _finish(text)


_MINERVA_CHANGES = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_MINERVA_DROPPED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_MINERVA_PATTERNS = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)


def minerva(text: str) -> str:
    """The normalisation of the Minerva paper, appendix D."""
    text = text.split("=")[-1]
    for old, new in _MINERVA_CHANGES:
        text = text.replace(old, new)
    for dropped in _MINERVA_DROPPED:
        text = text.replace(dropped, "")
    for pattern, new in _MINERVA_PATTERNS:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text
