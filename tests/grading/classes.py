"""Answers by class: gold, then equivalent spellings (right), then near misses (wrong). Written for these tests."""

CLASSES: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "integers": [
        (
            "17",
            ["17", "+17", "017", "17.0", "17.", "$17$", r"\(17\)", r"\text{17}", "{17}", "１７", "٠١٧", "(17)"],
            ["71", "-17", "1.7", "170", "17.1", "17i"],
        ),
        ("-8", ["-8", "−8", "–8", "- 8", r"$-8$", "-8.0", "－8"], ["8", "-80", "0.8"]),
        ("025", ["25", "025", "25.0"], ["52", "250"]),
        ("0", ["0", "0.0", "-0", "0/5", r"\frac{0}{7}"], ["1", "00.1", "O"]),
    ],
    "decimals": [
        (
            "0.75",
            [".75", "3/4", r"\frac{3}{4}", "0.750", "75%", r"75\%", r"\dfrac34", "6/8"],
            ["0.57", "0.74999", "4/3", "7.5"],
        ),
        ("2.5", ["5/2", r"2\frac12", "2 1/2", "2.50", r"\frac{5}{2}"], ["2.05", "25", "2/5"]),
        ("0.5", ["0,5", "1/2"], ["5", "0,6"]),
        ("5", ["5.0"], [".5"]),
    ],
    "fractions": [
        (
            r"\frac{7}{12}",
            [
                "7/12",
                r"\dfrac{7}{12}",
                r"\tfrac7{12}",
                r"\frac{14}{24}",
                r"\frac7{12}",
                "$7/12$",
                "{7}/{12}",
                r"\cfrac{7}{12}",
            ],
            ["12/7", "-7/12", r"\frac{7}{11}", "0.583"],
        ),
        (
            r"-\frac{3}{5}",
            ["-3/5", r"\frac{-3}{5}", r"\frac{3}{-5}", "-0.6", r"-\frac35", r"\frac{-3}5"],
            ["3/5", "-5/3"],
        ),
        (r"\frac{a}{b}", [r"\frac ab", r"\frac{a}b", "a/b", r"a \div b"], [r"\frac{b}{a}", "ab"]),
        (
            r"\frac{x+1}{2}",
            ["(x+1)/2", r"\frac{1}{2}(x+1)", r"\frac x2+\frac12", "0.5x+0.5"],
            ["x+1/2", r"\frac{x+1}{3}"],
        ),
    ],
    "mixed numbers": [
        (
            r"3\frac{2}{5}",
            ["17/5", "3.4", "3 2/5", r"3 \frac{2}{5}", r"\frac{17}{5}"],
            ["6/5", r"\frac{32}{5}", r"2\frac35"],
        ),
    ],
    "percentages": [
        (r"33\frac{1}{3}\%", [r"\frac{100}{3}\%", r"33\frac13", r"\text{33 1/3 percent}"], ["33", r"34\%"]),
        ("75", [r"\text{75 percent}", r"75\%"], ["7.5"]),
        (
            r"35\%",
            ["35%", "35 percent", "0.35", "35 \\%", r"35\text{ percent}", "35", "7/20", "35 pct"],
            ["3.5%", "0.035", "53%"],
        ),
        ("0.08", ["8%", r"8\%", "8 percent"], ["0.8%", "80%", "0.08%"]),
        (r"0.5\%", ["0.005", r"\frac{1}{200}"], ["0.5", "5"]),
        ("12.5", [r"12.5\%"], [r"1.25\%"]),
    ],
    "money": [
        (
            "12.50",
            ["$12.50", r"\$12.50", "12.5 dollars", "$12.5", "€12.50", "£ 12.50", r"12.50\text{ dollars}"],
            ["$125.0", "$12.05"],
        ),
        (r"\$3,200", ["3200", "3,200", "$3200", "3200 dollars", r"3{,}200", "USD 3200"], ["320", "32,000"]),
    ],
    "thousands": [
        (
            "1234567",
            ["1,234,567", r"1{,}234{,}567", "1 234 567", r"1\,234\,567", r"1,\!234,\!567"],
            ["1,234,576", "1234,567"],
        ),
        ("10,000", ["10000", "10^4", "1e4", r"10{,}000"], ["1000", "10,001"]),
    ],
    "scientific": [
        (
            r"3.2 \times 10^{5}",
            ["320000", "3.2e5", "3.2*10^5", r"3.2\cdot10^5", "320,000", "32 × 10⁴"],
            ["3.2e4", r"3.2\times10^{-5}"],
        ),
        (r"4\times10^{-3}", ["0.004", "4e-3", "4E-3", "1/250"], ["0.04", "4e3"]),
    ],
    "units": [
        (
            r"12\text{ cm}",
            ["12", "12 cm", "12cm", r"12\,\mathrm{cm}", "12 centimeters", "0.12 meters", r"120\text{ mm}"],
            ["12 meters", "21 cm", "13"],
        ),
        (
            "45",
            [
                "45 minutes",
                r"45\text{ minutes}",
                "45 apples",
                r"45 \text{ students}",
                r"45\text{ cm}^2",
                r"45\ \mathrm{km/h}",
                "45 miles per hour",
                r"45\text{ square units}",
            ],
            ["54 minutes", "45 million"],
        ),
        (r"9.8 \text{ m/s}^2", ["9.8", r"9.8\,\text{m/s}^2", r"9.8 \mathrm{m}/\mathrm{s}^2"], ["8.9 m/s^2"]),
        ("6 hours", ["6", "6 hr", "6hours", "360 minutes"], ["6 minutes", "7 hours"]),
        (
            r"36\pi\text{ cm}^3",
            [r"36\pi", "36π cm³", r"36 \pi \text{ cubic centimeters}"],
            [r"36\text{ cm}^3", r"63\pi"],
        ),
    ],
    "letters are not units": [
        ("MG-mg", ["-mg+MG"], ["mg-MG"]),
        ("5", [r"5\text{ apples}"], [r"5\text{ is wrong}"]),
        ("x+a", ["a+x"], ["x+c", "x"]),
        (r"\frac{a}{c}", ["a/c"], [r"\frac{d}{c}"]),
        (r"\sqrt{m}", [r"m^{1/2}"], [r"\sqrt{s}"]),
        ("5m", ["5 m", r"5\cdot m"], ["5s"]),
    ],
    "degrees": [
        (
            r"65^\circ",
            ["65", r"65^{\circ}", "65°", "65 degrees", r"65\text{ degrees}", r"\frac{13\pi}{36}"],
            ["56", r"65\pi", r"66^\circ"],
        ),
        (
            r"\frac{\pi}{4}",
            [r"45^\circ", "π/4", r"0.25\pi", r"\pi/4", "pi/4"],
            [r"\frac{\pi}{3}", r"40^\circ", "0.785"],
        ),
        (r"\cos 60^\circ", ["0.5", r"\frac12", r"\sin 30^\circ"], [r"\sin 60^\circ"]),
    ],
    "degrees and minutes": [
        (
            r"30^\circ 15'",
            ["30.25°", "30°15'", r"30^{\circ} 15^{\prime}", r"\frac{121}{4}^\circ"],
            [r"30^\circ", r"30^\circ 51'"],
        ),
    ],
    "times": [
        ("7:45", ["7:45", "07:45", "7:45:00", r"7:45\text{ a.m.}", "7:45 AM"], ["7:54", "8:45"]),
        (r"3:20\text{ p.m.}", ["3:20 PM", "3:20pm", "15:20", "3:20"], ["3:20 am", "3:02 pm"]),
    ],
    "ratios": [
        ("4:3", ["4:3", "8:6", "4/3", r"\frac43", "4 : 3"], ["3:4", "4:5"]),
        ("2:3:5", ["2:3:5", "4:6:10"], ["2:5:3", "2:3"]),
    ],
    "intervals": [
        (
            "[2,7)",
            [
                "[2, 7)",
                r"\left[2,7\right)",
                r"x\in[2,7)",
                r"2\le x<7",
                r"7 > x \ge 2",
                r"\{x\mid 2\le x<7\}",
                r"2 \leqslant x < 7",
            ],
            ["(2,7)", "[2,7]", "[2,8)", "2<x<7", "(7,2]"],
        ),
        (
            r"(-\infty, 4]",
            [r"x\le4", "x <= 4", r"4 \geq x", "(-∞,4]", r"\left(-\infty,4\right]", r"\{x: x \leq 4\}"],
            ["x<4", r"[4,\infty)", r"(-\infty,4)"],
        ),
        (
            r"a > \frac{1}{2}",
            [r"(\frac12,\infty)", "a>0.5", r"(0.5, +\infty)", r"\frac{1}{2}<a"],
            [r"[\frac12,\infty)", "a<1/2"],
        ),
    ],
    "unions": [
        (
            r"(-\infty,-1)\cup(5,\infty)",
            [
                r"(5,\infty)\cup(-\infty,-1)",
                "(-inf,-1) U (5,inf)",
                r"x<-1\text{ or }x>5",
                "x < -1 or x > 5",
                r"\left(-\infty, -1\right) \cup \left(5, \infty\right)",
            ],
            [r"(-\infty,-1]\cup(5,\infty)", r"(-1,5)", r"(-\infty,1)\cup(5,\infty)"],
        ),
        (
            r"\{x \mid x < 4\} \setminus \{-2\}",
            [r"(-\infty,-2)\cup(-2,4)", r"(-\infty, 4) - \{-2\}", r"x<4 \text{ and } x\neq -2"],
            [r"(-\infty,4)", r"(-\infty,-2)\cup(-2,4]", r"(-\infty,2)\cup(2,4)"],
        ),
        (r"(1,6)", [r"x>1\text{ and }x<6", "x > 1, x < 6"], ["x>1 or x<6", r"x>1\text{ and }x\le 6"]),
        (r"\mathbb{R}", [r"(-\infty,\infty)", "all real numbers", r"x \in \mathbb{R}"], [r"(0,\infty)", "R_1"]),
        (r"[0,3]\cup[3,5]", ["[0,5]", r"0\le x\le5"], ["(0,5)", "[0,3]"]),
        (r"x \neq 3", [r"(-\infty,3)\cup(3,\infty)", "x≠3", "x != 3"], ["x=3", r"x\neq -3"]),
    ],
    "sympy's sets": [
        (
            "Union(Interval.open(-oo, -4), Interval(7, oo))",
            [r"(-\infty,-4)\cup[7,\infty)", "x<-4 or x>=7"],
            [r"(-\infty,-4]\cup[7,\infty)"],
        ),
        ("Interval.Lopen(0, 1/3)", [r"(0,\frac13]"], [r"[0,\frac13)"]),
    ],
    "delimiters": [("1,2,3", [r"\[1,2,3\]", r"\(3,2,1\)", "$$1,2,3$$", r"$1$, $2$ and $3$"], [r"\[1,2\]"])],
    "tuples": [
        (
            "(3,-1)",
            [
                "(3, -1)",
                r"\left(3,-1\right)",
                "(3.0,-1)",
                r"(x,y)=(3,-1)",
                "3,-1",
                r"\left( \frac{6}{2}, -1 \right)",
                "(3 , −1)",
            ],
            ["(-1,3)", "(3,1)", "[3,-1]", r"\{3,-1\}", "(3,-1,0)"],
        ),
        ("(1,2,3)", ["(1, 2, 3)", "1,2,3", "(1,2,3)"], ["(1,3,2)", "(1,2)"]),
        ("(120,450,780)", ["(120, 450, 780)", "(120,450,780)"], ["(120,450,870)"]),
    ],
    "lists": [
        (
            "2,5,11",
            [
                "11, 5, 2",
                "2, 5 and 11",
                r"2,\ 5,\ 11",
                r"2, 5, \text{ and } 11",
                r"\{2,5,11\}",
                "2;5;11",
                "x=2, x=5, x=11",
                r"$2$, $5$, $11$",
            ],
            ["2,5", "2,5,12", "2,5,11,12", "2,5,5"],
        ),
        (r"\pm 6", ["6,-6", "-6, 6", r"x=\pm6", r"\{-6,6\}", "6 or -6", "6 and -6"], ["6", "-6", r"\pm 5"]),
        (
            r"2\pm\sqrt{3}",
            [r"2+\sqrt3, 2-\sqrt3", r"x=2\pm\sqrt{3}", r"2-\sqrt{3},2+\sqrt{3}"],
            [r"2+\sqrt3", r"-2\pm\sqrt3"],
        ),
        (
            "(1,2),(3,4)",
            ["(3,4), (1,2)", r"(1,2)\text{ and }(3,4)", r"\{(1,2),(3,4)\}"],
            ["(2,1),(3,4)", "(1,2)", "1,2,3,4"],
        ),
        ("a=2, b=7", ["2,7", "b=7, a=2", "a = 2 and b = 7"], ["7,2", "a=7, b=2"]),
    ],
    "sets": [
        (
            r"\{1,4,9\}",
            [r"\{9,4,1\}", "1,4,9", r"\left\{1, 4, 9\right\}", "{1,4,9}", "{4, 1, 9}"],
            [r"\{1,4\}", r"\{1,4,8\}", "(1,4,9)"],
        ),
        (r"\{5\}", ["5", r"\{ 5 \}", "x=5"], ["6", r"\{5,6\}"]),
    ],
    "matrices": [
        (
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            [
                r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
                r"\begin{pmatrix}1&2\\3&4\\\end{pmatrix}",
                r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)",
                r"\begin{pmatrix} 1 & \frac{4}{2} \\ 3 & 4.0 \end{pmatrix}",
                r"\left[\begin{matrix}1&2\\3&4\end{matrix}\right]",
            ],
            [
                r"\begin{pmatrix}1&3\\2&4\end{pmatrix}",
                r"\begin{pmatrix}1&2\\3&5\end{pmatrix}",
                r"\begin{pmatrix}1&2&3&4\end{pmatrix}",
            ],
        ),
        (
            r"\begin{pmatrix} -1 \\ 6 \end{pmatrix}",
            [r"\begin{bmatrix}-1\\6\end{bmatrix}", "(-1,6)"],
            [r"\begin{pmatrix}6\\-1\end{pmatrix}", r"\begin{pmatrix}1\\6\end{pmatrix}"],
        ),
    ],
    "equations": [
        ("y=3x-2", ["3x-2", "y = -2+3x", "3x-y-2=0", "y=3x-2", r"y+2=3x", "3x-y=2"], ["y=3x+2", "y=2x-3", "x=3y-2"]),
        ("x^2+y^2=25", ["y^2+x^2=25", "x^2+y^2-25=0", "2x^2+2y^2=50"], ["x^2+y^2=5", "x^2-y^2=25", "25"]),
        ("f(x)=x^2+1", ["x^2+1", "f(t)=t^2+1", "f(x) = 1+x^2"], ["f(x)=x^2-1", "g(x)=x^2+2"]),
        ("x=7", ["7", "x = 7", "7=x", "x=3+4=7"], ["x=-7", "y=8"]),
        ("k=3", ["3"], ["-3", "k=4"]),
    ],
    "inequalities": [
        ("2x+3>7", ["7<2x+3", "4x+6>14", "2x>4", "x>2"], ["2x+3<7", "2x+3>=7", "x>3"]),
        ("a<b<c", ["c>b>a"], ["b<a<c"]),
    ],
    "expressions": [
        (
            r"3\sqrt{5}",
            [
                r"\sqrt{45}",
                r"\sqrt5\cdot3",
                r"3\cdot\sqrt{5}",
                "3√5",
                r"\frac{15}{\sqrt5}",
                "3sqrt(5)",
                r"3*\sqrt5",
                "3*5^{1/2}",
            ],
            [r"5\sqrt3", r"\sqrt{15}", "6.708"],
        ),
        (
            r"x^2-5x+6",
            ["(x-2)(x-3)", r"(x-3)\cdot(x-2)", "6-5x+x^2", "x^{2}-5x+6"],
            ["(x+2)(x-3)", "x^2-5x-6", "y^2-5y+6"],
        ),
        (
            r"\frac{\sqrt{2}}{2}",
            [r"\frac{1}{\sqrt2}", r"2^{-1/2}", r"\sqrt{\frac12}", r"\sqrt{0.5}"],
            [r"\frac{\sqrt3}{2}", r"\sqrt2"],
        ),
        (r"\log_2 3", [r"\frac{\ln 3}{\ln 2}", r"\log_{2}(3)", r"\frac{\log 3}{\log 2}"], [r"\log_3 2", r"\log_2 5"]),
        (r"2^{n+1}", [r"2\cdot2^n", r"2^{1+n}"], [r"2^n", r"2^{n-1}"]),
        (r"\sin^2 x", [r"1-\cos^2x", r"(\sin x)^2", r"\sin(x)^2"], [r"\cos^2 x", r"\sin x^2"]),
        (r"\binom{8}{3}", ["56", r"\frac{8!}{3!5!}", r"\dbinom{8}{5}"], ["65", r"\binom{8}{2}"]),
        ("3+4i", ["4i+3", r"3+4\mathrm{i}"], ["3-4i", "4+3i", "5"]),
        (r"e^{2x}", [r"(e^x)^2", r"\exp(2x)"], [r"e^{x}", r"2e^x"]),
        (r"n!", [r"n(n-1)!"], [r"(n-1)!"]),
        (r"\sqrt[3]{4}", [r"4^{1/3}", r"2^{2/3}", r"\sqrt[3]4"], [r"\sqrt{4}", r"\sqrt[4]{3}"]),
        (r"0.\overline{3}", ["1/3", r"\frac13", r"0.\overline{33}"], ["0.3", "0.333"]),
        (r"|x-1|", [r"|1-x|", r"\left|x-1\right|", r"\lvert x-1\rvert"], ["x-1", "|x+1|"]),
        (r"\lfloor n/2\rfloor", [r"\left\lfloor\frac{n}{2}\right\rfloor", "⌊n/2⌋"], [r"\lceil n/2\rceil", "n/2"]),
    ],
    "named functions": [
        (r"I(0) e^{-t/2}", [r"e^{-\frac{t}{2}} I(0)"], [r"I(0) e^{t/2}", r"I(1) e^{-t/2}", "0"]),
        ("f(3)+2", ["2+f(3)"], ["f(2)+3", "3f+2", "g(3)+2"]),
        ("f(a+b)", ["f(b+a)"], ["f(a-b)", "f(a)+f(b)"]),
        ("k(k+1)", ["k^2+k"], ["k^2+1"]),
    ],
    "choices": [
        (
            "B",
            ["B", "(B)", "B.", "B)", r"\text{B}", r"\textbf{(B)}", r"\text{(B)}", "(B) 12", "B: twelve", "option B"],
            ["C", "(A)", "A) B", "12"],
        ),
        (
            r"\textbf{(C)}\ 14",
            ["14", "C", "(C)", "(C) 14", r"\text{C}", r"\textbf{(C) }14"],
            ["41", "(B)", "(B) 14", "D"],
        ),
        (r"\mathrm{(E)}\ \frac{1}{3}", ["1/3", "E", r"\frac{1}{3}", "(E)"], ["(D)", "3"]),
    ],
    "words": [
        (
            "Monday",
            ["monday", r"\text{Monday}", "Monday.", r"\textbf{Monday}", "MONDAY", r"\mathrm{Monday}"],
            ["Tuesday", "Mondays are", "Sunday"],
        ),
        (r"\text{odd}", ["odd", "Odd", r"\text{ odd }"], ["even", "dod"]),
        ("blue whale", [r"\text{blue whale}", "Blue Whale", r"\text{blue}\ \text{whale}"], ["whale", "blue"]),
        ("seven", ["7", "Seven", r"\text{seven}"], ["8", "eleven"]),
        ("Yes", ["yes", r"\text{Yes}", "YES."], ["No", "yesterday"]),
    ],
    "bases": [
        ("1101_2", ["1101_{2}", "1101_2", "(1101)_2"], ["1011_2", "1101_3"]),
    ],
    "doubled backslashes": [
        (r"\frac{2}{9}", [r"\\frac{2}{9}", "\x0crac{2}{9}"], [r"\\frac{9}{2}"]),
    ],
    "parameters": [
        (
            r"x=\frac{\pi}{4}+n\pi",
            [r"x=\frac{\pi}{4}+k\pi", r"\frac{\pi}{4}+\pi k"],
            [r"x=\frac{\pi}{4}+2k\pi", r"n\pi"],
        ),
        (
            r"\frac{\pi}{6}+k\pi, k\in\mathbb{Z}",
            [r"k\pi+\frac{\pi}{6}", r"\frac{\pi}{6}+k\pi \ (k \in Z)", "30°+180°k"],
            [r"\frac{\pi}{3}+k\pi"],
        ),
        (
            r"[2k\pi, 2k\pi+\pi], k \in \mathbb{Z}",
            [r"[2k\pi,\pi+2k\pi]", r"[2k\pi, (2k+1)\pi] (k\in\mathbb{Z})"],
            [r"(2k\pi,\pi+2k\pi)", r"[2k\pi,2\pi+2k\pi]"],
        ),
    ],
    "numbered unknowns": [
        (
            "x_1=4, x_2=-9",
            ["4,-9", "-9, 4", "x=4 or x=-9", "x_1=-9, x_2=4", r"x_{1}=4,\quad x_{2}=-9"],
            ["4,9", "x_1=4", "x_1=4, x_2=9"],
        ),
        ("(x,y)=(2,5)", ["x=2, y=5", "(2,5)", "2,5", "x = 2 and y = 5"], ["(5,2)", "x=5, y=2"]),
    ],
    "several options": [
        ("ABD", ["A, B, D", "(A), (B), (D)", "A,B and D", r"\text{ABD}", "BAD"], ["AB", "ABC", "A, B"]),
        ("DCBA", ["DCBA"], ["ABCD", "A, B, C, D"]),
        ("②③", ["2, 3", "②③", "②, ③", "3,2"], ["①②", "23", "2"]),
    ],
    "nothing": [
        (r"\{\}", [r"\emptyset"], ["0"]),
        (
            "No solution",
            [r"\text{no solution}", "no solutions", r"\emptyset", "None", r"\{\}", "∅"],
            ["0", "solution", "one solution"],
        ),
        (r"\emptyset", ["no solution", r"\varnothing", r"\{ \}"], [r"\{0\}", "0"]),
    ],
    "ordinals": [
        ("7", ["7th", r"7^{\text{th}}", r"7\text{th}"], ["17th", "8th"]),
        (r"21^{\text{st}}", ["21", "21st"], ["12"]),
    ],
    "binomials": [
        (r"\binom{n}{2}", [r"{n \choose 2}", r"\frac{n(n-1)}{2}", "n(n-1)/2"], [r"\binom{n}{3}", "n(n+1)/2"])
    ],
    "ratios of roots": [
        (r"1:\sqrt{3}", [r"\frac{1}{\sqrt3}", r"\sqrt{3}:3", r"1 : \sqrt{3}"], [r"\sqrt3:1", r"1:\sqrt2"])
    ],
    "vectors": [
        (
            r"\langle 2,-1,4\rangle",
            ["(2,-1,4)", r"\begin{pmatrix}2\\-1\\4\end{pmatrix}", "2,-1,4"],
            ["(2,1,4)", "(4,-1,2)"],
        )
    ],
    "single sets": [(r"\{(1,-2)\}", ["(1,-2)", r"\{(1, -2)\}"], ["(-2,1)"])],
    "curves": [
        (
            r"\frac{x^2}{4}+\frac{y^2}{3}=1",
            ["3x^2+4y^2=12", r"\frac{y^2}{3}+\frac{x^2}{4}=1", r"\frac{x^{2}}{4} + \frac{y^{2}}{3} - 1 = 0"],
            [r"\frac{x^2}{3}+\frac{y^2}{4}=1", "3x^2+4y^2=1"],
        ),
        ("(x-1)^2+(y+2)^2=9", ["x^2+y^2-2x+4y-4=0"], ["(x+1)^2+(y-2)^2=9", "x^2+y^2-2x+4y+4=0"]),
    ],
    "complex": [
        (
            r"\frac{1}{2}+\frac{\sqrt{3}}{2}i",
            [r"e^{i\pi/3}", r"\cos 60^\circ+i\sin 60^\circ", r"\frac{1+\sqrt3 i}{2}", r"\frac{1+i\sqrt{3}}{2}"],
            [r"\frac{1}{2}-\frac{\sqrt{3}}{2}i", "1"],
        ),
    ],
    "identities": [
        (r"\cos 2x", [r"2\cos^2x-1", r"1-2\sin^2 x", r"\cos(2x)", r"\cos^2 x-\sin^2 x"], [r"\cos x^2", r"2\cos x"]),
        (r"\ln 8", [r"3\ln2", r"\log 8", r"\ln(8)"], [r"\ln 6", r"\lg 8"]),
        (r"\frac{a^2-b^2}{a-b}", ["a+b"], ["a-b"]),
    ],
    "units of text": [
        (
            r"20 \mathrm{~m} / \mathrm{s}",
            ["20", "20 m/s", r"20\text{ m/s}", "72 km/h", "20 meters per second"],
            ["20 km/h", "2"],
        ),
        (r"3 \mathrm{~cm}", ["3", "3 cm", "30 mm"], ["3 kg"]),
        ("5 kg", ["5", "5000 g" + "rams", "5 kilograms"], ["5 grams"]),
    ],
    "names": [
        (r"\angle A=70^\circ", ["70", r"70^\circ", r"\angle A = 70^{\circ}"], ["110"]),
        ("AB=12", ["12", "AB = 12"], ["21"]),
        ("S_{ABC}=6", ["6", "6 square units"], ["7"]),
        (r"\frac{AB}{CD}=\frac{2}{3}", ["2/3", "2:3"], ["3/2"]),
    ],
    "by sympy": [
        (r"\frac{n(n+1)}{2}", [r"\sum_{i=1}^{n} i", r"\sum_{k=1}^n k"], [r"\sum_{i=1}^{n} i^2"]),
        (
            "-2",
            [r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}", r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}"],
            [r"\begin{vmatrix} 1 & 2 \\ 3 & 5 \end{vmatrix}"],
        ),
        ("2x", [r"\frac{d}{dx} x^2"], [r"\frac{d}{dx} x^3"]),
        (r"\frac13", [r"\int_0^1 x^2 dx", r"\int_0^1 x^2 \, dx = \frac{1}{3}"], [r"\int_0^1 x^3 dx"]),
    ],
    "functions of several": [
        ("6", [r"\gcd(12,18)", r"\max(3,6)", r"\min\{7,6\}", "lcm(2,3)"], [r"\gcd(12,8)", r"\max(6,7)"]),
    ],
    "residues": [("2", [r"17 \equiv 2 \pmod 5", r"2 \pmod{5}", r"17 \bmod 5"], [r"17 \equiv 3 \pmod 7"])],
    "scales": [
        ("36", ["3 dozen", "thirty-six", "thirty six"], ["3", "twenty-six"]),
        ("2000000", ["2 million", r"2\text{ million}"], ["2", "2 billion"]),
    ],
    "stars": [("8", ["2**3", "**8**"], ["3**2"])],
    "repeating decimals": [
        (r"\frac{1}{3}", ["0.333...", "0.(3)", r"0.\overline{3}", r"0.333\ldots"], ["0.333", "0.(33)4", "0.334..."]),
        (r"\frac{1}{6}", ["0.1666...", "0.1(6)"], ["0.1666"]),
    ],
    "labelled answers": [("12", [r"\text{(A) }12", "(A) 12", "B. 12"], ["(A) 13", "A"])],
    "abbreviated units": [("9", ["9 sq. units", "9 sq. ft.", "9 in."], ["8 sq. ft."])],
}
