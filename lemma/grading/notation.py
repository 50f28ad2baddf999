"""Notations that few answers use, rewritten in the usual one before anything else is read.

Colours and underlines go; aligned lines become one chain or list; `]a,b[` becomes (a,b); bold or hatted i, j, k become
`\\hat{i}`; 1.4 x 10^7, 1011_{two}, 且 and `\\qquad` between values, 3~5 and 75¢ are spelt as in most answers;
HTML becomes LaTeX or plain characters.
"""

from __future__ import annotations

import html
import re

from lemma.grading.tokens import names

_SPACE_RUN = re.compile(r"\s+")

_FIRST = re.compile(
    r"\\(?:(?:text)?color|f?colorbox|bbox|[hv]?phantom|tag|label|leftroot|uproot|underline|uline|uuline|mathop|mathord"
    r"|ensuremath|underbrace|overbrace|tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge|script(?:script)?style|strut|nonumber"
    r"|notag|math(?:rm|bf|it|sf|tt|bb)|boldsymbol|bold|bm|hat|widehat|vec|overrightarrow|root|begin|q?quad)"
    r"(?![A-Za-z])"
)
_DROPPED = re.compile(
    r"\\(?:[hv]?phantom|tag\*?|label|leftroot|uproot|fcolorbox\s*\{[^{}]*\}|(?:text)?color(?:\s*\[[^\]]*\])?"
    r"|colorbox(?:\s*\[[^\]]*\])?)\s*\{[^{}]*\}"
    r"|\\bbox\s*\[[^\]]*\]|\\(?:underline|uline|uuline|mathop|mathord|ensuremath)(?![A-Za-z])"
    r"|\\(?:tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge|script(?:script)?style|strut|nonumber|notag)"
    r"(?![A-Za-z])"
)
_BRACED = re.compile(r"\\(?:under|over)brace ?(\{(?:[^{}]|\{[^{}]*\})*\}) ?(?:[_^] ?(?:\w|\{[^{}]*\}))?")
_DOUBLE = re.compile(r"\{ ?\{([^{}]*)\} ?\}")
_UNBRACED = re.compile(
    r"\\(math(?:rm|bf|it|sf|tt|bb)|boldsymbol|bold|bm|hat|widehat|vec|overrightarrow)(?:\s+([A-Za-z0-9])(?![A-Za-z])|\s*(\\[ij]math)(?![A-Za-z]))"
)
_ROOT_OF = re.compile(r"\\root\s*\{?\s*(\w+)\s*\}?\s*\\of(?![A-Za-z])")

_UNIT_VECTOR = re.compile(
    r"\\(hat|widehat|vec|overrightarrow|mathbf|boldsymbol|bold|bm)\s*\{\s*"
    r"(?:\\(?:mathbf|mathrm|mathit|boldsymbol|bold|bm|hat|vec)\s*\{\s*\\?([ijk])(?:math)?\s*\}|\\?([ijk])(?:math)?)\s*\}"
)


def _vectors(text: str) -> str:
    """Bold or hatted i, j, k as `\\hat`; a bold i without j and k is the imaginary unit."""
    found = [(m[1], m[2] or m[3]) for m in _UNIT_VECTOR.finditer(text)]
    if not found or (all(letter == "i" for _, letter in found) and not any("hat" in mark for mark, _ in found)):
        return text
    return _UNIT_VECTOR.sub(lambda m: "\\hat{" + (m[2] or m[3]) + "}", text)


_LINES = re.compile(
    r"(?P<brace>\\\{\s*)?\\begin\s*\{(?P<name>(?:aligned|align|gathered|gather|split|alignedat|eqnarray|equation|multline|flalign)\*?"
    r"|array(?=\}\s*\{\s*r\s*c\s*l\s*\}))\}(?:\s*(?:\[[a-z]\]|\{[^{}&\\=]{1,8}\}))?(?P<body>.*?)\\end\s*\{(?P=name)\}",
    re.DOTALL,
)
_LINE_END = re.compile(r"\\\\(?:\[[^\]]*\])?")
_GOES_ON = re.compile(
    r"=|<|>|\+|-|\\(?:le|leq|ge|geq|ne|neq|approx|equiv|lt|gt|cdot|times|leqslant|geqslant)(?![A-Za-z])"
)
_FOLLOWS = re.compile(
    r"\\(?:Rightarrow|implies|Leftrightarrow|iff|therefore|Longrightarrow|rightarrow|to|Longleftrightarrow)(?![A-Za-z])"
)


def _one_line(match: re.Match[str]) -> str:
    """The lines of an environment: one that begins with a sign goes on, one that begins with an arrow replaces."""
    if "\\begin" in match["body"]:
        return match[0]
    lines: list[str] = []
    for piece in _LINE_END.split(match["body"]):
        line = piece.replace("&", " ").strip().rstrip(",.;").strip()
        arrow = _FOLLOWS.match(line)
        if arrow:
            lines, line = [], line[arrow.end() :].strip()
        if lines and _GOES_ON.match(line):
            lines[-1] += " " + line
        elif line:
            lines.append(line)
    return ", ".join(lines)


_GAP = re.compile(
    r"(?<=[\w)}\]]) ?(?:\\q?quad ?)+(?=[-\d]|[A-Za-z](?:_\{?\w{1,3}\}?)? ?(?:[=<>]|\\(?:in|leq?|geq?|neq?)(?![a-z]))"
    r"|\\(?:[dt]?frac|sqrt|pi|alpha|beta|theta|lambda)(?![a-z]))|(?<=\)) ?(?:\\q?quad ?)+(?=\()"
)
_INSIDE = r"(?P<inside>(?:\\sqrt\[\w{0,9}\]|[^\[\],;])*[,;](?:\\sqrt\[\w{0,9}\]|[^\[\]])*)"
_HALF_OPEN = re.compile(
    r"(?P<before>(?:^|[=,;:(]|\\(?:cup|cap|in|setminus)(?![A-Za-z])|(?<![A-Za-z])(?:U|or|and|from|is)(?= |\])) ?)"
    rf"\]{_INSIDE}(?P<end>[\[\]])"
)
_OPEN_AFTER = re.compile(rf"\[{_INSIDE}\[(?= ?(?:$|[,;.)$]|\\(?:cup|cap|setminus|\)|text)|U|or|and))")

_BASES = names("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen")
_TEXT = r"\\(?:text|mathrm|textrm|mbox) ?\{ ?"
_BASE = r"\(?(?:in )?(?:base[ -]?)?([a-z]{3,8}|\d{1,2}) ?\)?"
_IN_BASE = re.compile(
    rf"(?<=[0-9A-F)]) ?_ ?(?:(\d{{1,2}}|[a-z]{{3,8}})(?!\w)"
    rf"|\{{ ?(?:{_TEXT}{_BASE} ?\}}|{_TEXT}base ?\}} ?(\d{{1,2}})|{_BASE}) ?\}})"
)
_BASE_AFTER = re.compile(rf"(?<=[0-9A-F]) ?(?:{_TEXT}\(?(?=(?:in )?base){_BASE} ?\}}|\(?(?=(?:in )?base){_BASE})$")


def _base(match: re.Match[str]) -> str:
    name = next(group for group in match.groups() if group)
    if name.isdigit():
        return "_{" + name + "}"
    return "_{" + str(_BASES.index(name)) + "}" if name in _BASES else match[0]


_BETWEEN = re.compile(
    rf"^(?:{_TEXT})?(?:[Ff]rom|[Bb]etween)"
    rf" ?\}}? ?(-?[^a-z]{{1,40}}?) ?(?:{_TEXT})?(?:and|to) ?\}}? ?(-?[^a-z]{{1,40}}.*)$"
)
_FACTOR = re.compile(r"[xX] ?\d")
_CROSS = re.compile(r"(?<=[\d)])(?<![^.\d]0)(?<!^0) ?[xX] ?(?=\d)")
_SPAN = re.compile(r"(?<=[\d%°]) ?(?:~|\\sim(?![A-Za-z])) ?(?!0\d\d)(?=-?[\d.])")
_CHINESE = re.compile(
    r"(?<=[\x21-\x7e]) ?(?:\\text ?\{ ?)?(?:(?P<or>或者|或)|并且|而且|以及|且|和|与|及)(?: ?\})? ?(?=[\x21-\x7e])"
)
_OTHER = re.compile(r" (?<=[\d)}] )(?:(?P<or>или|ou|oder|o)|и|et|und|y|e) (?=[-\d(\\])")
_AMPERSAND = re.compile(r"(?<=[\d)}]) ?\\?& ?(?=[-\d(\\])")
_CENTS = re.compile(r"(?<=\d) ?(?:¢|\\cent(?![A-Za-z]))")
_DOLLARS = re.compile(r" ?\\?\$ ?(-?\d[\d,]*(?:\.\d+)?) ?")
_INDEX = r"(?:\{(\d+)\}|(\d))"
_CHOSEN = re.compile(
    r"(?<![A-Za-z\\\d])(?P<plain>C)\( ?(\d+) ?, ?(\d+) ?\)"
    rf"|(?:\{{ ?\}} ?|(?<![\w)}}]))[_^] ?{_INDEX} ?(?P<between>[CP]) ?_ ?{_INDEX}"
    rf"|(?<![A-Za-z\\\d_])(?P<before>[CP]) ?_ ?{_INDEX} ?\^ ?{_INDEX}"
)


def _chosen(match: re.Match[str]) -> str:
    letter, top, bottom = sorted((part for part in match.groups() if part), key=str.isdigit)
    if int(top) < int(bottom):
        return match[0]
    return f"\\binom{{{top}}}{{{bottom}}}" if letter == "C" else f"\\frac{{{top}!}}{{({top}-{bottom})!}}"


_NO_BRACES = {ord("{"): None, ord("}"): None}
_RATE = re.compile(r"(?<=\d) (k?[mgJN]|[LlCVW])/([smhLl]|kg|min)(\^\{?2\}?)?$")

# The module in which a program finds a function: np.arcsin, math.asin.
_MODULE = re.compile(r"\b(?:np|math)\.(?=[a-z])(a(?=(?:sin|cos|tan)\b))?")


def _joined(match: re.Match[str]) -> str:
    return " \\text{or} " if match["or"] else " \\text{and} "


def usual(text: str) -> str:
    """The text in the usual notation; a text that is in it already comes back as it is, with single spaces."""
    if "  " in text or not text.isprintable():
        text = _SPACE_RUN.sub(" ", text)
    if "\\" in text and _FIRST.search(text):
        text = _ROOT_OF.sub(
            r"\\sqrt[\1]",
            _UNBRACED.sub(
                lambda m: f"\\{m[1]}{{{m[2] or m[3]}}}",
                _DOUBLE.sub(r"{\1}", _DROPPED.sub(" ", _BRACED.sub(r"\1", text))),
            ),
        )
        text = _vectors(text)
        if "\\begin" in text:
            text = _LINES.sub(_one_line, text)
        elif "quad" in text:
            text = _GAP.sub(" , ", text)
    if "[" in text or "]" in text:
        text = _HALF_OPEN.sub(lambda m: m["before"] + "(" + m["inside"] + (")" if m["end"] == "[" else "]"), text)
        text = _OPEN_AFTER.sub(r"[\g<inside>)", text)
    if "_" in text or "base" in text:
        text = _BASE_AFTER.sub(_base, _IN_BASE.sub(_base, text))
    if ("x" in text or "X" in text) and _FACTOR.search(text):
        text = _CROSS.sub(r" \\times ", text)
    if "etween" in text or "rom" in text:
        text = _BETWEEN.sub(r"\1 to \2", text)
    if "~" in text or "\\sim" in text:
        text = _SPAN.sub(" to ", text)
    if "np." in text or "math." in text:
        text = _MODULE.sub(lambda m: "arc" if m[1] else "", text)
    if "/" in text:
        text = _RATE.sub(lambda m: f"\\text{{ {m[1]}/{m[2]}{m[3].translate(_NO_BRACES) if m[3] else ''}}}", text)
    if "C" in text or "P" in text:
        text = _CHOSEN.sub(_chosen, text)
    if not text.isascii():
        text = _CHINESE.sub(_joined, text)
    if " " in text:
        text = _OTHER.sub(_joined, text)
    if "&" in text and "\\begin" not in text:
        text = _AMPERSAND.sub(r" \\text{and} ", text)
    if "¢" in text or "\\cent" in text:
        text = _CENTS.sub(r" \\text{ cents}", text)
    if "$" in text and (money := _DOLLARS.fullmatch(text)):
        text = money[1] + "\\text{ dollars}"
    return text


_ENTITY = re.compile(r"&(?:#\d{1,6}|#x[0-9A-Fa-f]{1,5}|[A-Za-z]{2,8}\d{0,2});")
_RAISED_FRACTION = re.compile(r"<sup>\s*(-?\d{1,18})\s*</sup>\s*[/⁄]\s*<sub>\s*(\d{1,18})\s*</sub>", re.IGNORECASE)
_RAISED = re.compile(r"<(sup|sub)>([^<>]{1,200})</\1>", re.IGNORECASE)
_STYLED = re.compile(r"<(b|i|u|em|strong|var|span|p|math|code)(?: [^<>]{0,100})?>([^<>]{0,2000})</\1>", re.IGNORECASE)
_LINE_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)


def without_html(text: str) -> str:
    """The text with `<sup>`, `<sub>`, entities and pairs of style tags replaced by what they mean."""
    if "&" in text and ";" in text:
        text = _ENTITY.sub(lambda m: html.unescape(m[0]), text)
    if "</" not in text:
        return _LINE_BREAK.sub(" ", text) if "<br" in text else text
    text = _RAISED_FRACTION.sub(r" \\frac{\1}{\2}", text)
    for _ in range(3):
        shorter = _RAISED.sub(lambda m: ("^{" if m[1].lower() == "sup" else "_{") + m[2] + "}", text)
        shorter = _STYLED.sub(r"\2", shorter)
        if shorter == text:
            break
        text = shorter
    return _LINE_BREAK.sub(" ", text)
