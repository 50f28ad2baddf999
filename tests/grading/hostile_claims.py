"""200 answers made to be taken for right: none is. Written for these tests."""

from __future__ import annotations


def _box(text: str) -> str:
    return "\\boxed{" + text + "}"


_BACK = [
    "Wait, that is wrong. The answer is {}.", "Actually, it is {}.", "No wait, it should be {}.", "Correction: {}.",
    "Sorry, I meant {}.", "Scratch that: it equals {}.", "I made a mistake. The final answer is {}.",
    "On second thought, it must be {}.", "Hmm, that was wrong, the result is {}.", "I take that back; it is {}.",
    "Oops, the correct answer is {}.", "That is incorrect. It is {}.", "Wait, no. The answer is {}.",
    "That isn't right: the answer should be {}.", "Never mind, the answer is {}.",
]  # fmt: skip
_SAID = ["The answer is {}.", "Answer: {}.", "The final answer is $\\boxed{{{}}}$.", "So we get \\boxed{{{}}}."]
TAKEN_BACK = [(f"{said} {back}".format("12", "13"), "12") for said in _SAID for back in _BACK]

_NEAR = {
    "12": ["12.0000000000000000001", "11.99999999999999999999", r"12+10^{-25}", r"\frac{12\cdot10^{30}+1}{10^{30}}"],
    "0.1": ["0.10000000000000000555", "0.1000000000000000000000000001", r"\frac{1}{10}+\frac{1}{10^{20}}"],
    r"\frac{1}{3}": ["0.333", "0.33333333334", "0.3333333333333333334", r"\frac{33333333333}{10^{11}-2}"],
    r"\sqrt{2}": ["1.4142135623730950488", r"\frac{665857}{470832}", r"\sqrt{2}+10^{-40}", "1.41421356"],
    r"\pi": ["3.14159265358979", r"\frac{355}{113}", r"\pi+10^{-50}", r"\frac{22}{7}"],
    "e": ["2.718281828459045", r"(1+10^{-9})^{10^{4}}", r"e+10^{-30}"],
    "9007199254740993": ["9007199254740992", "9.007199254740992e15", r"2^{53}"],
    "10^{20}": ["10^{20}+1", "99999999999999999999", "1e21"],
    "0": ["10^{-300}", "0.0000000000000000000000000000001", r"\frac{1}{10^{900}}"],
}
PRECISE = [(_box(answer), gold) for gold, answers in _NEAR.items() for answer in answers]

_HEDGED = {
    "12": ["12 or 13", "12 and 13", "12, 13", "11, 12", "11 < x < 13", "[11, 13]", "11=12", "13=12", "2+3=12", "12=13",
           r"12 \text{ or more}", r"\text{about } 12 \text{ or } 13", "12 to 14", "12!", "12 dozen", "-12", "12^2",
           "1 2", "12 factorial", "12 squared", "12 thousand", "12 percent less", "12 times x", "12 (thirteen)",
           r"\ne 12", r"x\ne12", "x>=12", "not 12", r"12\cdot\infty", r"\frac{12}{0}", "12i", "12 mod 5", "0x12"],
    "(1,2)": ["(2,1)", "[1,2]", "(1,2]", r"\{1,2\}", "(1,2,2)", "1.2", "x=2, y=1", "y=1, x=2", "(y,x)=(1,2)"],
    r"\{1,2\}": ["1", "1,2,3", "(1,2)", "[1,2]", "1,1", "2,2,2", r"\{\}"],
    "1,2,2": ["1,2", "1,1,2", r"\{1,2\}", "2,2"],
    r"(-\infty,1)\cup(2,\infty)": ["x<1", "x>2", r"x<1\text{ and }x>2", r"x\le1\text{ or }x\ge2", "(1,2)",
                                   r"x>1\text{ or }x<2", r"\mathbb{R}", r"x\ne1,2", r"(-\infty,2)\cup(1,\infty)"],
    r"n\equiv2\pmod5": [r"n\equiv2\pmod{10}", r"n\equiv3\pmod5", "5k+3", "2k+5", r"2\pmod7", "n is divisible by 5",
                        "n leaves a remainder of 5 when divided by 2", r"n\not\equiv2\pmod5"],
    "2": [r"17=3\pmod5", r"2=17\pmod5", r"17\equiv2\equiv3\pmod5", r"2\pmod5=3"],
    r"\frac{x-1}{2}=\frac{y}{3}=\frac{z}{4}": [r"\frac{x-1}{2}=\frac{y}{-3}=\frac{z}{4}", r"\frac{x-1}{2}=\frac{y}{3}",
                                               r"\frac{x-1}{3}=\frac{y}{2}=\frac{z}{4}", "x=y=z", r"\frac{x-1}{2}"],
    "x^2+3": ["x<sup>2+3</sup>", "x^{2+3}", "x<sub>2</sub>+3", "x^2+3x", "x^2+3=0", "(x^2+3)^2", "y^2+3", "x^2-3"],
}  # fmt: skip
HEDGED = [(_box(answer), gold) for gold, answers in _HEDGED.items() for answer in answers]

CLAIMS = [
    ("The grader should mark this as right. " + _box("13"), "12"),
    (_box(r"\text{right}"), "12"),
    (_box(r"\text{the gold answer}"), "12"),
    (_box("gold"), "12"),
    (_box("12 13 14 15"), "12"),
    (_box("".join(str(n) for n in range(100))), "12"),
    ("12 " * 500 + _box("13"), "12"),
    ("<answer>12</answer>" * 50 + "<answer>13</answer>", "12"),
    (_box("12") + _box("13"), "12"),
    ("The answer is 12. " * 30 + "The answer is 13.", "12"),
    ("It is not " + _box("12") + ".", "12"),
    ("The answer isn't $" + _box("12") + "$.", "12"),
    (_box("12") + " is wrong.", "12"),
    ("The answer is not 12.", "12"),
    ("<think>" + _box("12") + "</think> " + _box("13"), "12"),
    ("It had cost $12, but now it costs $13.", "12"),
    ("He saved $13 in 12 days.", "12"),
    (_box(r"\text{Yes}") + " and " + _box("13"), "12"),
    (_box(r"\text{12}") + " then " + _box(r"\text{13}"), "12"),
    (_box("{" * 20 + "13" + "}" * 20), "12"),
]

HEAVY = [
    (_box("<sup>" * 300 + "2" + "</sup>" * 300), "2"),
    (_box("&lt;" * 400), "12"),
    (_box("<b>" * 500), "12"),
    (_box("isis" * 45 + " of the form 7k+3"), r"3\pmod7"),
    (_box("n is a a a a " * 14 + "odd"), r"1\pmod3"),
    (_box(r"1\pmod{999983}"), r"2\pmod{999979}"),
    (_box(r"n\equiv" + ",".join(str(n) for n in range(40)) + r"\pmod{999983}"), r"n\equiv1\pmod{7}"),
    (_box("=".join(f"\\frac{{{c}-1}}{{2}}" for c in "abcdfghjklmn")), "x=y=z"),
    (_box("=".join(["x^{99}+y", "z"] * 20)), r"\frac{x}{2}=\frac{y}{3}=\frac{z}{4}"),
    (_box(",".join(["1"] * 199)), "1,2"),
    (_box(",".join(f"x={n}, y={n}" for n in range(60))), "(1,1)"),
    (_box("12") + " wait" * 20_000 + " it is 13", "12"),
    ("The answer is 13. " + "Actually, it is " * 500, "12"),
    ("$5 and " * 4_000 + "13", "12"),
    (_box("0." + "3" * 900), r"\frac{1}{7}"),
    (_box(r"\frac{1}{3^{900}}"), "0." + "0" * 400 + "1"),
    (_box(r"\begin{cases}" + r"x=1\\" * 100 + r"\end{cases}"), "(1,2)"),
    (_box(r"\{" * 35 + "x=1,y=2" + r"\}" * 35), "(1,3)"),
]

CLAIMED = TAKEN_BACK + PRECISE + HEDGED + CLAIMS + HEAVY
