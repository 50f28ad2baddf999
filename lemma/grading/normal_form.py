"""One canonical spelling: unicode variants, LaTeX noise and typographic spacing are removed; the meaning is unchanged.

The result is still LaTeX, with three conventions: text commands become a single `\\text{...}`, percent signs are `%`,
degrees are `°`.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from lemma.grading.notation import usual, without_html
from lemma.grading.tokens import FUNCTIONS, closing_brace, name_set, names
from lemma.grading.units import in_one_unit

_CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "﹣": "-", "－": "-",
    "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "∙": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/", "∗": "*",
    "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv ",
    "∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "±": r"\pm ", "∓": r"\mp ", "∼": "~", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "º": "°", "˚": "°",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "λ": r"\lambda ",
    "μ": r"\mu ", "µ": r"\mu ", "ω": r"\omega ", "φ": r"\phi ", "ρ": r"\rho ", "σ": r"\sigma ", "τ": r"\tau ",
    "Δ": r"\Delta ", "Ω": r"\Omega ", "ε": r"\epsilon ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "…": r"\ldots ", "⟨": r"\langle ",
    "⟩": r"\rangle ", "∣": "|", "，": ",", "；": ";", "：": ":", "（": "(", "）": ")", "％": "%", "。": ".", "、": ",",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ", "\u2002": " ", "\u2003": " ", "\u2061": "",
}  # fmt: skip
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿⁱ", "0123456789-+ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_INDEXED_ROOT = re.compile("[³⁴]√")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?|[A-Za-z]|(?=[({]))")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_HATTED = re.compile("[ijk]\u0302|[îĵ]")
_SUPER_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿⁱ]+")
_SUB_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")

# "\f" of "\frac" and the like, in a string that lost its backslash to an escape sequence.
_LOST_ESCAPE = re.compile(
    r"\x0c(?=rac|box|orall)|\t(?=ext|imes|heta|an|frac|riangle|au|o\b)|\x08(?=oxed|egin|inom|eta|ar|ig|mod)"
    r"|\r(?=ight|angle|ceil|floor|ho)|\x0b(?=ec|ert|arphi)|\x07(?=pprox|lpha|ngle|rc)"
)
_ESCAPES = {"\x0c": r"\f", "\t": r"\t", "\x08": r"\b", "\r": r"\r", "\x0b": r"\v", "\x07": r"\a"}

_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|(?<!\\)\$\$?")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?|\\(?:displaystyle|textstyle|limits|nolimits)\b")
_SPACES = re.compile(
    r"\\[,;:>!](?![A-Za-z]{2})|\\(?:quad|qquad|thinspace|enspace|hspace\{[^{}]*\}|space|noindent|,|;|:)(?=[^A-Za-z]|[a-z]|$)"
    r"|(?<!\\)\\\s|~"
)
_THIN = re.compile(r"\\!\s*")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_TEXT = re.compile(
    r"\\(?:text(?:normal|bf|it|rm|sf|tt|up)?|math(?:rm|bf|it|sf|tt|bb)?(?=\s*\{(?!R\}|Z\}|N\}|Q\}|C\}))|mbox|hbox|operatorname\*?|boldsymbol|bold|bm|pmb|emph|textbf)\s*\{([^{}]*)\}"
)
_OLD_FONT = re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt)\b\s*([^{}]*)\}|\\(?:rm|bf|it|sf|tt)\b")
_DEGREE = re.compile(
    r"\^\s*\{\s*\\(?:circ|degree|textcirc|textdegree)\s*\}|\^\s*\\(?:text)?circ(?![A-Za-z])|\\(?:text)?degree(?![A-Za-z])|\\circ\s*$|\^\s*°|\^\s*\{\s*°\s*\}"
)
_DEGREE_WORD = re.compile(
    r"(?<=[\d})])(?:\s*\\text\{\s*(?:degrees?|deg)\.?\s*\}|\s*(?:degrees?|deg)\b\.?)", re.IGNORECASE
)
_MINUTES = re.compile(
    r"(\d+)\s*°\s*(\d{1,2})\s*(?:'|\^\s*\{?\s*\\prime\s*\}?)(?:\s*(\d{1,2})\s*(?:''|\"|\^\s*\{?\s*\\prime\s*\\prime\s*\}?))?"
)
_PERCENT = re.compile(
    r"\\%|\s*\\text\{\s*(?:percent(?:age)?|per cent|pct|\\?%)\.?\s*\}|\s*\b(?:percent(?:age)?|per cent|pct)\b\.?",
    re.IGNORECASE,
)
_GAPPED = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?: \d{3})+)(?!\d|\s*/|\s*\\frac)")
_APOSTROPHES = re.compile(r"(?<=\d)'(?=\d{3}(?!\d))")
_COMMA_BRACE = re.compile(r"\{\s*,\s*\}|,\s*\\!\s*")
_NAMES = {
    spelling: name
    for name, spellings in {
        r"\le ": r"\leqslant \leqq \leq <= =<", r"\ge ": r"\geqslant \geqq \geq >=", r"\ne ": r"\neq !=",
        r"\approx ": r"~= \simeq \approxeq \doteq", r"\cup ": r"\cupdot \bigcup \bigsqcup \sqcup", r"\{": r"\lbrace",
        r"\}": r"\rbrace", r"\binom": r"\dbinom \tbinom", r"\cdot ": r"\cdotp \centerdot", "<": r"\lt", ">": r"\gt",
        r"\ldots ": r"\dots \cdots \dotsc \dotso", "|": r"\vert \lvert \rvert \mid", "i": r"\imath \jmath",
        "[": r"\lbrack", "]": r"\rbrack", "/": r"\div", "(": r"\langle", ")": r"\rangle", ":": r"\colon",
        r"\emptyset ": r"\varnothing", r"\phi ": r"\varphi", r"\epsilon ": r"\varepsilon",
    }.items()
    for spelling in names(spellings)
}  # fmt: skip
_ANY_NAME = re.compile(
    "|".join(re.escape(spelling) + ("(?![A-Za-z])" if spelling[0] == "\\" else "") for spelling in _NAMES)
)
_NOT_EQUAL = re.compile(r"\\not\s*=")
_MATRIX = re.compile(r"\\begin\{(?:[bpvV]?matrix|smallmatrix|array)\}")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z{}])")
_MONEY = re.compile(
    r"(?:\\text\s*\{\s*)?\\(?:pounds|euro)(?:\{\})?(?:\s*\})?(?![A-Za-z])|(?:(?<![A-Za-z])(?:US|CA|AU))?\\\$|[€£¥₹₽₩]|(?<![A-Za-z])(?:US|CA|AU)\$|(?<![A-Za-z])Rs\.?(?=\s*\d)|(?<![A-Za-z])USD(?![A-Za-z])"
)
_INFINITY = re.compile(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", re.IGNORECASE)
_BOLD = re.compile(r"(?<![\w)\]}])\*\*(.+?)\*\*(?![\w(])")
_STARS = re.compile(r"(?<=[\w)\]}])\s*\*\*\s*(?=[\w({\\-])")
_ABBREVIATED = re.compile(r"(?<![A-Za-z])(sq|cu|ft|in|cm|mm|km|hr|hrs|min|sec|lb|lbs|oz|yd|mi)\.(?=\s|$|\})")
_REPEATING = (
    (re.compile(r"(?<![\d.])(\d*\.\d*?)(\d)\2{2,}\s*(?:\.{2,}|\\ldots)(?!\d)"), r"\1\\overline{\2}"),
    (re.compile(r"(?<![\d.])(\d*\.\d*?)(\d{2,6}?)\2+\s*(?:\.{2,}|\\ldots)(?!\d)"), r"\1\\overline{\2}"),
    (re.compile(r"(?<![\d.])(\d*\.\d*)\((\d{1,12})\)(?![\w(])"), r"\1\\overline{\2}"),
)
_GOES_ON = re.compile(r",\s*\.{3}$")
_SPACE_RUN = re.compile(r"\s+")
_OVER = re.compile(r"(\{|^)([^{}]*)\\(choose|over)(?![A-Za-z])([^{}]*)(\}|$)")
_ORDINAL = re.compile(r"(?<=\d)\s*\^?\s*\{?\s*(?:\\text\{\s*(?:th|st|nd|rd)\s*\}|(?:th|st|nd|rd)(?![A-Za-z]))\s*\}?")
_SCALE_TEXT = re.compile(r"\\text\{\s*(hundred|thousand|million|billion|trillion|dozen)s?\s*\}", re.IGNORECASE)
_LED = re.compile(
    r"^(?:\s|\$|\\[(\[])*(?:[=-]>|[→⇒∴]|\\(?:therefore|implies|(?:[lL]ong)?[rR]ightarrow)(?![A-Za-z]))\s*"
)
_INTRODUCED = re.compile(r"^\\text\{[^{}]{2,80}(?:\b(?:is|are|equals)\s*:?|:)\s*\}\s*(?=\S)(?<!\bnot )")
_STATED = re.compile(r"^\\text\{[^{}\d]{2,80}\b(?:is|are|equals)\s*:?\s+(-?\d[^{}]*)\}$")
_MEASURED = re.compile(r"^\\text\{\s*(-?\d+(?:\.\d+|:\d\d|(?: \d+)?/\d+)?\s*[%°]?)\s*([A-Za-z][^{}\d]*)?\}$")
_NUMBERS_IN_TEXT = re.compile(r"^\\text\{([-\d\s.,/]+(?:(?:and|or)[-\d\s.,/]+)*)\}$")
_FOR_ALL = re.compile(
    r"\s*,?\s*\\text\{\s*,?\s*(?:for|where)\s+(?:an?\s+|any\s+|some\s+|every\s+|each\s+|all\s+)?integers?\s*\}\s*[A-Za-z]$"
)
_CIRCLED = re.compile("[①-⑳]+")
_QUANTIFIED = re.compile(
    r"(?:[,;]|\(|\\text\{[^{}]*\})\s*\(?\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\\in\s*"
    r"(?:\\mathbb\s*\{?\s*[ZNRQ]\s*\}?|\\text\{\s*[ZN]\s*\}|[ZN])(?:\s*[\^_]\s*\{?[+*0-9]+\}?|[+*])?\s*\)?$"
)
_OVER_REALS = re.compile(r"^[A-Za-z]\s*\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*[:,;|]\s*(?=\S)")
_HALF_LINE = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?\s*[\^_]\s*\{?\s*([+-])\s*\}?")
_DOTTED = re.compile(r"(?<=[\d.])\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?")
_EMPTY_SET = re.compile(r"\\\{\s*\\\}")


def plain_characters(text: str) -> str:
    """ASCII where unicode only decorates: digits of any script, minus signs, superscripts, invisible marks."""
    if text.isascii():
        return text
    text = _VULGAR.sub(lambda m: "\\frac{" + unicodedata.normalize("NFKC", m[0]).replace("⁄", "}{") + "}", text)
    text = _CIRCLED.sub(lambda m: ", ".join(str(ord(c) - 0x245F) for c in m[0]), text)
    text = _INDEXED_ROOT.sub(lambda m: "∛" if m[0][0] == "³" else "∜", text)
    text = _SUPER_RUN.sub(lambda m: "^{" + "".join(_SUPERSCRIPTS[c] for c in m[0]) + "}", text)
    text = _SUB_RUN.sub(lambda m: "_{" + "".join(_SUBSCRIPTS[c] for c in m[0]) + "}", text)
    text = _ROOT.sub(lambda m: _ROOTS[m[1]] + (f"{{{m[2]}}}" if m[2] else ""), text)
    text = _HATTED.sub(lambda m: f"\\hat{{{unicodedata.normalize('NFD', m[0])[0]}}}", text)
    out = []
    for character in text:
        if character.isascii():
            out.append(character)
        elif character in _CHARACTERS:
            out.append(_CHARACTERS[character])
        elif unicodedata.category(character) == "Nd":
            out.append(str(unicodedata.digit(character)))
        elif unicodedata.category(character) in ("Cf", "Cc", "Mn"):
            continue
        elif 0xFF01 <= ord(character) <= 0xFF5E or 0x1D400 <= ord(character) <= 0x1D7FF:
            out.append(unicodedata.normalize("NFKC", character))
        else:
            out.append(character)
    return "".join(out)


def repair_escapes(text: str) -> str:
    """Restore the backslash that an escape sequence swallowed: a form feed before `rac` was `\\f`."""
    if any(c in text for c in _ESCAPES):
        return _LOST_ESCAPE.sub(lambda m: _ESCAPES[m[0]], text)
    return text


def _unescape(text: str) -> str:
    if "\\\\" in text:
        if "\\\\begin" in text:
            text = text.replace("\\\\", "\\")
        elif not _MATRIX.search(text) and "\\begin" not in text:
            text = _DOUBLED.sub(r"\\", text)
    return text.replace("\\n", " ") if text.startswith("\\n\\n") else text


def _braces(text: str, command: str, count: int) -> str:
    """Give every argument of a command its braces: `\\frac{a}b` becomes `\\frac{a}{b}`, `\\frac12` `\\frac{1}{2}`."""
    pieces = text.split(command)
    out = [pieces[0]]
    for piece in pieces[1:]:
        if piece[:1].isalpha() and len(piece) > 1 and piece[:2].isalpha():
            out.append(command + piece)
            continue
        rest, arguments = piece, ""
        if command == r"\sqrt" and rest.lstrip().startswith("["):
            close = rest.find("]")
            if close > 0:
                arguments, rest = rest.lstrip()[: close + 1 - (len(rest) - len(rest.lstrip()))], rest[close + 1 :]
        for _ in range(count):
            rest = rest.lstrip()
            if not rest or rest[0] in "{(":
                if rest[:1] == "(":
                    break
                end = closing_brace(rest, 0) + 1 or len(rest)
                arguments, rest = arguments + rest[:end], rest[end:]
            elif rest[0] == "\\":
                match = re.match(r"\\[A-Za-z]+", rest)
                name = match[0] if match else ""
                if not name or name in (r"\frac", r"\sqrt", r"\left", r"\text", r"\binom"):
                    break
                arguments, rest = arguments + "{" + name + "}", rest[len(name) :]
            elif rest[0].isalnum():
                arguments, rest = arguments + "{" + rest[0] + "}", rest[1:]
            else:
                break
        out.append(command + arguments + rest)
    return "".join(out)


def _unwrap_text(text: str) -> str:
    """Nested and differently named text commands become one `\\text{...}`; a lone maths letter loses its font."""

    def name(match: re.Match[str]) -> str:
        inside = match[1]
        bold = match[0].startswith((r"\mathbf", r"\bold", r"\bm", r"\pmb", r"\mathit", r"\mathbb"))
        if bold and (len(inside.strip()) <= 2 or not inside.replace(" ", "").isalpha()):
            return " " + inside + " "
        if inside.strip() in FUNCTIONS and (
            match[0][1] == "o" or match.string[match.end() :].lstrip()[:1] in ("(", "\\")
        ):
            return "\\" + inside.strip() + " "
        if match[0].startswith(r"\mathrm") and (
            inside in ("e", "i") or (inside == "d" and match.string[match.end() :].lstrip()[:1].isalpha())
        ):
            return inside + " "
        return "\\text{" + inside + "}" if inside.strip() else " "

    for _ in range(4):
        new = _TEXT.sub(name, text)
        if new == text:
            break
        text = new
    return text


@lru_cache(maxsize=8192)
def normalise(text: str) -> str:
    """The canonical spelling of an answer. Idempotent on what it returns, linear in the length of the text."""
    if "<" in text or "&" in text:
        text = without_html(text)
    text = plain_characters(text)
    if text.isdigit() or (text.isalpha() and not _INFINITY.fullmatch(text)):
        return text
    text = _unescape(text)
    text = text.replace("{:}", ":")
    if "," in text:
        text = _COMMA_BRACE.sub(",", text)
    if "'" in text:
        text = _APOSTROPHES.sub("", text)
    if "\\" in text:
        text = _THIN.sub("", text)
        text = _SIZES.sub("", text)
    text = _LED.sub("", usual(text))
    text = _MONEY.sub("", text)
    text = _DELIMITERS.sub(" ", text)
    if "**" in text:
        text = _STARS.sub("^", _BOLD.sub(r"\1", text))
    if "\\" in text:
        text = _FRACTION.sub(r"\\frac", text)
        text = _SPACES.sub(" ", text)
        text = _OLD_FONT.sub(lambda m: "\\text{" + m[1] + "}" if m[1] else " ", text)
        text = _unwrap_text(text)
    if "%" in text or "pe" in text.lower() or "pct" in text.lower():
        text = _PERCENT.sub("%", text)
    if "circ" in text or "deg" in text.lower() or "°" in text:
        text = _DEGREE_WORD.sub("°", _DEGREE.sub("°", text))
        if "'" in text or "prime" in text:
            text = _MINUTES.sub(_in_degrees, text)
    text = _ANY_NAME.sub(lambda m: _NAMES[m[0]], _NOT_EQUAL.sub("!=", text))
    if "inf" in text or "oo" in text or "Inf" in text:
        text = _INFINITY.sub(r"\\infty ", text)
    text = _SPACE_RUN.sub(" ", text).strip()
    text = _rare(text)
    if " " in text:
        text = _GAPPED.sub(lambda m: m[1] + m[2].replace(" ", ""), text)
    for command, count in ((r"\frac", 2), (r"\sqrt", 1), (r"\binom", 2)):
        if command in text:
            text = _braces(text, command, count)
    return in_one_unit(_trim(text)) if " " in text or "}" in text else _trim(text)


def _in_degrees(match: re.Match[str]) -> str:
    """Degrees, minutes and seconds of an angle as a sum of degrees."""
    seconds = f"+{match[3]}/3600" if match[3] else ""
    return f"({match[1]}+{match[2]}/60{seconds})°"


def _rare(text: str) -> str:
    """Spellings that most texts do not have: \\choose, ordinals, the domain of a parameter, the empty set."""
    if "." in text:
        text = _ABBREVIATED.sub(r"\1", text)
        if text.endswith("..."):
            text = _GOES_ON.sub(r", \\ldots", text)
        if "..." in text or "ldots" in text or "(" in text:
            for pattern, spelt in _REPEATING:
                text = pattern.sub(spelt, text)
    if "\\text" in text:
        text = _SCALE_TEXT.sub(r" \1 ", _FOR_ALL.sub("", text))
        text = _NUMBERS_IN_TEXT.sub(r"\1", text)
        text = _MEASURED.sub(r"\1\\text{ \2}", _INTRODUCED.sub("", _STATED.sub(r"\1", text)))
    if "\\choose" in text or "\\over" in text:
        text = _OVER.sub(lambda m: f"\\{'binom' if m[3] == 'choose' else 'frac'}{{{m[2]}}}{{{m[4]}}}", text)
    if "th" in text or "st" in text or "nd" in text or "rd" in text:
        text = _ORDINAL.sub("", text)
    if "\\in" in text:
        shorter = _OVER_REALS.sub("", _QUANTIFIED.sub("", text).rstrip())
        text = shorter or text
    if "\\mathbb" in text:
        text = _HALF_LINE.sub(lambda m: r"(0,\infty )" if m[1] == "+" else r"(-\infty ,0)", text)
    if "\\dot" in text:
        text = _DOTTED.sub(lambda m: f"\\overline{{{''.join(filter(None, m.groups()))}}}", text)
    if "\\{" in text:
        text = _EMPTY_SET.sub(r"\\emptyset", text)
    return _from_sympy(text) if "Interval" in text else text


_SYMPY_INTERVAL = re.compile(r"Interval(?:\.(open|Lopen|Ropen))?\(([^()]*)\)")
_SYMPY_BRACKETS = {None: ("[", "]"), "open": ("(", ")"), "Lopen": ("(", "]"), "Ropen": ("[", ")")}
_SYMPY_UNION = re.compile(r"Union\((.*)\)")


def _from_sympy(text: str) -> str:
    """Interval.open(0, 1) and Union(...), as sympy prints sets of numbers, in the usual notation."""

    def interval(match: re.Match[str]) -> str:
        opening, closing = _SYMPY_BRACKETS[match[1]]
        low, _, high = match[2].partition(",")
        opening = "(" if "infty" in low else opening
        return f"{opening}{low},{high}{')' if 'infty' in high else closing}"

    text = _SYMPY_INTERVAL.sub(interval, text)
    return _SYMPY_UNION.sub(lambda m: re.sub(r"([\])])\s*,\s*(?=[\[(])", r"\1 \\cup ", m[1]), text)


_QUOTES = "`*_~\"'"


def _trim(text: str) -> str:
    """The text without the punctuation and row breaks that end a sentence rather than an answer."""
    while True:
        trimmed = text.strip().rstrip(".,;:").strip()
        if len(trimmed) > 2 and trimmed[0] == trimmed[-1] and trimmed[0] in _QUOTES:
            trimmed = trimmed[1:-1]
        while trimmed.endswith("\\") and not trimmed.endswith("\\\\\\"):
            trimmed = trimmed.rstrip("\\").strip()
        if trimmed == text:
            return text
        text = trimmed


_ARTICLE = re.compile(r"^(?:an?|the) (?=[a-z]{3})")
_POINT = re.compile(r"\.\d")
_EXCLAIMED = re.compile(r"(?<=[A-Za-z]{2})[!.\s]+$")
_LOOSE_SPACE = re.compile(r"(?<!\d) | (?!\d)")
_SHORT_SCRIPT = re.compile(r"([\^_])\{(\w)\}(?!\w)")
_LETTERS = re.compile(r"(\\?)([^\W\d_]{2,})")
_PLAIN_GROUP = re.compile(r"(?<![\w^}\]])\{([^{}\\^_]*)\}")
LITTLE = name_set("an the of and or is are in on to by for no not yes all any it at as be dne none nan")


def _folded(match: re.Match[str]) -> str:
    """A command as it is; a word in lower case, but not a short run of letters that may be a product."""
    command, run = match[1], match[2]
    small = run.casefold()
    if command:
        return " " + run
    said = len(run) > 3 or small in LITTLE or (len(run) == 3 and run[1:].islower() and not _VOWELS.isdisjoint(small))
    return small if said else run


_VOWELS = frozenset("aeiouy")


@lru_cache(maxsize=8192)
def words(text: str) -> str:
    """The text with its words in lower case, without text commands, surrounding punctuation or repeated spaces.

    What may be a formula keeps its case and its braces.
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = _LETTERS.sub(_folded, _PLAIN_GROUP.sub(r"\1", _SHORT_SCRIPT.sub(r"\1\2", text)))
    text = text.replace("\\", " ").replace('"', "")
    text = _SPACE_RUN.sub(" ", text).strip(" ,;:'").rstrip(" .,;:'")
    text = _ARTICLE.sub("", text)
    return _EXCLAIMED.sub("", text if _POINT.match(text) else text.lstrip(" .,;:'"))


def squeezed(text: str) -> str:
    """The text without white space except between digits: the spelling in which equal texts are the same answer."""
    return _LOOSE_SPACE.sub("", text) if " " in text else text
