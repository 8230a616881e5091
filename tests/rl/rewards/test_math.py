"""The reward `math`: which answers are equal, and that a part of an answer is not."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal

import pytest

from mtpctl.data.problems import Problem
from mtpctl.recipe.reward import RewardConfig
from mtpctl.rl.rewards import math
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.samples import Sample

SAMPLE = Sample("p", "0", [1])


def reward(response: str, answer: str, **args: float) -> float:
    return math.score(response, Problem("p", "what?", answer), SAMPLE, **args)


WAYS = ["{}", r"\boxed{{{}}}", "The answer is {}.", "#### {}", "So we get:\nAnswer: {}", "Hence the result is {}."]
"""Forms in which a response states its answer."""

SEVERAL = [
    ("1331 and 1728", ["1331", "1728"], ["1728 and 1331", "1331, 1728", "$1331$ and $1728$", r"1331 \text{ and } 1728", "1,331 and 1,728"]),
    ("x = 1 or x = 2", ["1", "2", "x = 1", "x = 2"], ["x = 2 or x = 1", "1, 2", "x=1, 2", r"x = 1 \text{ or } x = 2"]),
    ("3 or -3", ["3", "-3"], ["-3 or 3", r"\pm 3", "$-3$ or $3$", "\u22123, 3"]),
    ("5 to 7", ["5", "7", "6"], ["from 5 to 7", "5\u20137", "5-7", "[5, 7]"]),
    ("between 2 and 4", ["2", "4", "2 and 4"], ["between 2 and 4", "2 to 4", "(2, 4)"]),
    ("1, 2 and 3", ["1", "3", "1, 2", "2 and 3", "1, 2, 3, 4"], ["1, 2, 3", "3, 1 and 2", r"\{1, 2, 3\}", "1, 2, and 3"]),
    ("either 0 or 6", ["0", "6"], ["0 or 6", "6, 0"]),
    ("x = 4, y = 9", ["4", "9", "y = 9", "x = 9, y = 4"], ["y = 9, x = 4", "x = 4 and y = 9", "(4, 9)", "4, 9"]),
    ("(3, 5)", ["3", "5", "(5, 3)", "3, 6"], ["(3,5)", "(x, y) = (3, 5)", r"\left(3, 5\right)"]),
    ("-1, 0, 1", ["1", "-1", "0, 1"], ["1, 0, -1", "1; 0; -1"]),
    ("12 and 13", ["12", "13", "1213"], ["13 and 12"]),
    (r"\frac{1}{2} or 3", ["3", r"\frac{1}{2}"], ["3 or 0.5"]),
    ("$2 and $5", ["5", "2"], ["$5 and $2"]),
    ("[0, 1)", ["0", "1", "(0, 1)", "[0, 1]"], ["[0,1)", r"\left[0, 1\right)", r"x \in [0, 1)"]),
]


@pytest.mark.parametrize(("answer", "parts", "same"), SEVERAL, ids=[row[0] for row in SEVERAL])
def test_several_values_are_compared_as_a_whole(answer: str, parts: list[str], same: list[str]) -> None:
    for way, text in itertools.product(WAYS, [answer, *same]):
        assert reward(way.format(text), answer) == 1.0, (way, text)
    for way, part in itertools.product(WAYS, parts):
        assert reward(way.format(part), answer) == 0.0, (way, part)
        assert reward(way.format(answer), part) == 0.0, (way, part)


@pytest.mark.parametrize(
    ("answer", "responses"),
    [
        (
            "5",
            [
                r"\boxed {5}",
                "The answer is $5. He has $3 left.",
                "He had $8 and paid $3. The answer is $5.",
                "The answer is $x = 5$.",
                r"\boxed 5. That is all.",
                r"$\boxed 5$",
                r"\fbox{5}",
                r"\boxed{\boxed{5}}",
                r"\boxed{5\text{ cm}}",
                r"\boxed{5 \text{ m/s}}",
                r"\boxed{5\ \mathrm{kg}}",
                r"\boxed{x = 5}",
                r"\boxed{f(2) = 5}",
            ],
        ),
        ("-5", ["\\boxed{\u22125}", "\\boxed{\u20135}", "\\boxed{\u20145}"]),
        ("1000", [r"\boxed{1\,000}", r"\boxed{1 000}", "\\boxed{1\u202f000}", r"\boxed{1{,}000}"]),
        ("1000000", [r"\boxed{1 000 000}"]),
        ("11111", [r"\boxed{11,\! 111}"]),
        ("1000.5", [r"\boxed{1,000.5}"]),
        ("50", [r"\boxed{50\%}"]),
        ("0.5", [r"\boxed{50\%}", r"\boxed{50}\%"]),
        (r"\frac{1}{2}", ["50%"]),
        (r"50\%", ["50 percent"]),
        ("2.5", [r"\boxed{2 1/2}", r"\boxed{2\frac12}", "\\boxed{2\u00bd}"]),
        ("-2.5", [r"\boxed{-2\frac{1}{2}}"]),
        ("15", [r"\boxed{15\mbox{ cm}^2}"]),
        ("60", [r"\boxed{60 miles per hour}"]),
        ("9", ["\\boxed{9 cm\u00b2}"]),
        ("18 dollars", [r"\boxed{18}"]),
        ("18", [r"\boxed{\$18}"]),
        ("x = 5", [r"\boxed{5}"]),
        ("90", [r"\boxed{90^\circ}", r"\boxed{90^{\circ}}", r"\boxed{90 degrees}"]),
        (r"90^\circ", ["\\boxed{90\u00b0}"]),
        (r"90\text{ degrees}", [r"\boxed{90}"]),
        ("5000000", [r"\boxed{5 million}"]),
        ("5,000,000", [r"\boxed{5}million"]),
        ("1500000", [r"\boxed{1.5\times 10^{6}}", r"\boxed{1.5e6}"]),
        (r"\frac{1}{3}", [r"\boxed{0.\overline{3}}"]),
        (
            "42",
            [
                r"\boxed{\dfrac{84}{2}}",
                r"\boxed{84/2}",
                r"\boxed{\sqrt{1764}}",
                r"\boxed{\mathbf{42}}",
                r"\boxed{42.}",
                r"\boxed{17+25=42}",
                r"\boxed{x = 17 + 25 = 42}",
            ],
        ),
        ("2", [r"\boxed{\sqrt[3]{8}}"]),
        (r"3\sqrt{13}", [r"\boxed{\sqrt{117}}"]),
        (r"\frac{3+\sqrt{5}}{2}", [r"\boxed{\frac{6+2\sqrt5}{4}}"]),
        (r"\frac{10}{3}", [r"\boxed{\frac{10}{3} \approx 3.33}"]),
    ],
)
def test_notations_of_the_same_value_are_equal(answer: str, responses: list[str]) -> None:
    assert [response for response in responses if reward(response, answer) != 1.0] == []


@pytest.mark.parametrize(
    ("answer", "responses"),
    [
        (
            "42",
            [
                r"\boxed{17+25}",
                r"\boxed{6\times 7}",
                r"\boxed{6*7}",
                r"\boxed{6 \cdot 7}",
                r"\boxed{(6)(7)}",
                r"\boxed{6(7)}",
                r"\boxed{50 - 8}",
                r"\boxed{84 \div 2}",
                r"\boxed{\frac{80+4}{2}}",
                r"\boxed{|-42|}",
                "The answer is 17 + 25.",
                "17+25",
                "#### 17+25",
                r"\boxed{41 = 42}",
                r"\boxed{17+25 = 41 = 42}",
                r"\boxed{x = 41 = 42}",
                r"\boxed{42 = 17+25}",
                r"\boxed{42 = 41}",
                "The answer is 41 = 42",
                r"\boxed{3 \approx 42}",
            ],
        ),
        (r"\frac{5}{6}", [r"\boxed{\frac{1}{2} + \frac{1}{3}}"]),
        ("32", [r"\boxed{2^5}"]),
        ("120", [r"\boxed{5!}", r"\boxed{\binom{10}{3}}"]),
        ("6", [r"\boxed{\gcd(12, 18)}"]),
        (r"3\sqrt{13}", [r"\boxed{\sqrt{36+81}}"]),
        ("(3, 5)", [r"\boxed{(1+2, 5)}"]),
        ("3, 5", [r"\boxed{1+2, 5}"]),
        ("60", ["5*12=50 #50=60"]),
    ],
)
def test_unevaluated_expressions_and_false_equations_are_wrong(answer: str, responses: list[str]) -> None:
    assert [response for response in responses if reward(response, answer) != 0.0] == []


def test_sum_equals_a_row_answer_that_is_the_same_sum() -> None:
    assert reward(r"\boxed{2^{100}-1}", "2^{100}-1") == 1.0
    assert reward(r"\boxed{-1 + 2^{100}}", "2^{100} - 1") == 1.0
    assert reward(r"\boxed{2^{99}-1}", "2^{100} - 1") == 0.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("9.1e-31", "1.6e-19", False),
        (r"9.1 \times 10^{-31}", "9.1e-31", True),
        ("0.0000001", "0.0000002", False),
        ("1e-7", "0.0000001", True),
        ("6.626e-34", "6.63e-34", False),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", False),
        ("0.333333", r"\frac{1}{3}", True),
        ("0.166667", r"\frac{1}{6}", True),
        ("0.3333", r"\frac{1}{3}", False),
        ("3.141593", r"\pi", True),
        ("3.14", r"\pi", False),
        ("1.414214", r"\sqrt{2}", True),
        ("1000.0", "1000", True),
        ("1000000.4", "1000000", False),
        ("602214076000000000000000", "6.02214076e23", True),
        ("0", "1e-9", False),
        ("0", "0.0", True),
    ],
)
def test_numbers_are_compared_by_relative_difference(one: str, other: str, same: bool) -> None:
    assert reward(rf"\boxed{{{one}}}", other) == reward(rf"\boxed{{{other}}}", one) == float(same)


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("at least 5", "5"),
        ("more than 5", "5"),
        ("not 5", "5"),
        ("negative 5", "5"),
        ("5 million", "5"),
        ("half of 10", "10"),
        ("5 feet 6 inches", "6"),
        ("5 feet 6 inches", "5"),
        ("3 hours and 20 minutes", "20"),
        ("6 feet, of which 2 are wet", "2"),
        (r"\frac{1}{2} bh", r"\frac{1}{2}"),
        ("xy + 2", "2"),
        ("width + 2", "2"),
        ("2 ab", "2"),
        ("2x = 42", "42"),
        ("x + 1 = 42", "42"),
        ("2x", "2"),
        ("x > 5", "5"),
        ("5 apples and 3 oranges", "3"),
        ("3:4", "4"),
        ("5 out of 7", "7"),
        ("5 to the power of 3", "3"),
        ("3 as well as 5", "5"),
        ("no solution", "solution"),
    ],
)
def test_number_is_not_the_value_of_a_longer_phrase(written: str, answer: str) -> None:
    for way in WAYS[:4]:
        assert reward(way.format(written), answer) == 0.0, way
    assert reward(rf"\boxed{{{answer}}}", written) == 0.0
    assert reward(rf"\boxed{{{written}}}", written) == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        (r"so it is $\frac{1}{2}$", "0.5", True),
        (r"\boxed{1/2}", r"\frac{1}{2}", True),
        ("$1+x$", "x+1", True),
        ("#### 1,000", "1000", True),
        ("no idea", "3", False),
        ("", "3", False),
        ("a line\nand 7", "7", True),
        (r"\boxed{2}", r"2\pi", False),
        (r"\boxed{x^2+1}", "1+x^2", True),
        (r"\boxed{6-5i}", "6-5i", True),
        (r"\boxed{42}", "4 and 38 make #### 42", True),
        # The last box counts, with the boxes that form a list with it.
        (r"\boxed{41}, no: \boxed{42}", "42", True),
        (r"\boxed{42}, no: \boxed{41}", "42", False),
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2", True),
        (r"$\boxed{1}$ and $\boxed{2}$", "2", False),
        (r"\boxed{1} paper and \boxed{2} bins", "2", False),
        (r"\boxed{\frac{1}{2}} or \boxed{", "0.5", True),
        (r"The answer is \boxed{4", "4", False),
        ("9+3+0=12 #12", "12", True),
        ("4*12=48 3*12=36 #408", "408", True),
        ("16 - 3 - 4 = 9 eggs, and 9 * 2 = 18", "18", True),
        ("The answer is 5. I hope that the 3 steps are clear.", "5", True),
        ("**Final Answer**\n\n5", "5", True),
        ("Thus the area is 5 because 3 + 2 = 5", "5", True),
        (r"\boxed{m+n = 42}", "42", True),
        (r"\boxed{P(X > 2) = \frac{3}{8}}", "0.375", True),
        (r"We have \[ x = 3 \] as the answer.", "3", True),
        (r"$$a \geq \frac{2}{1}.$$ Therefore it increases by 100%.", "100", True),
        ("Step 1: 3+4=7\nStep 2: 7*2=14", "14", True),
        ("The identity is $\\begin{pmatrix}1 & 0 \\\\ 0 & 1\\end{pmatrix}$.", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}", True),
        (r"\boxed{\text{Evelyn}}", "Evelyn", True),
        (r"\boxed{\text{odd}}", "odd", True),
        (r"\boxed{\text{no solution}}", "no solution", True),
        (r"\boxed{Paris and London}", "London and Paris", True),
        (r"\boxed{Paris}", "London and Paris", False),
        (r"\boxed{(-\infty, 1) \cup (2, \infty)}", r"(-\infty,1)\cup(2,\infty)", True),
        (r"\boxed{y = 2x + 3}", "2x+3", True),
        (r"\boxed{y = 2x + 3}", "y = 3 + 2x", True),
        (r"\boxed{x^2 + y^2 = 4}", "y^2 + x^2 - 4 = 0", True),
    ],
)
def test_final_answer_of_a_response(response: str, answer: str, correct: bool) -> None:
    assert reward(response, answer) == float(correct)


DIFFERENT = [
    # Kinds of rows in the tests of math-verify 0.9.0 (`tests/` of its source distribution) for which the verdict here differs:
    # kind, response, answer, their verdict, the verdict here, reason.
    ("unevaluated sum for a number", r"Answer \((9+2)\)", "11", 1, 0, "a sum of numerals is not an answer"),
    ("chain of equations with a false member", "$x = 4+4+1 = 7 = 9$", "$x = 9$", 1, 0, "an equation has to hold"),
    ("false equation before a rounded value", r"$x = 4+4 = 1/4 \approx 8$", "$x = 1/4$", 1, 0, "an equation has to hold"),
    ("assignment by another false sum", "$z = 4+4 = 3$", "$z = 1 + 2 = 3$", 1, 0, "an equation has to hold"),
    ("line breaks inside inline mathematics", "Answer $ \n 8 \n $", "$8$", 0, 1, "TeX ignores them as well"),
    ("decimal comma in a sentence", "Total : 3,75 $ b..", "3.75", 1, 0, "may be a list; a decimal comma is read if it is alone"),
    (
        "two digits for a third, by an option",
        r"$\begin{pmatrix}0.67\\0.5\end{pmatrix}$",
        r"$\begin{pmatrix}\frac{2}{3}\\ \frac{1}{2}\end{pmatrix}$",
        1,
        0,
        "six decimals count here, always",
    ),
    (
        "rounded end of an interval, by an option",
        "$(0.4,1.6667]$",
        r"$(\frac{2}{5},\frac{5}{3}]$",
        1,
        0,
        "six decimals count here, always",
    ),
    (
        "another box before the final sentence",
        r"we get \boxed{25}. The final answer is $1,045$.",
        "$1045$",
        1,
        0,
        "a box outranks a sentence",
    ),
    ("inequality for an interval", r"$-3 \le x \le 8$", r"$x \in [-3,8]$", 0, 1, "they are the same set"),
    ("boxes apart without a word of connection", r"$\boxed{25 cm} ++++++ \boxed{3}$", "$25 cm, 3$", 1, 0, "only the last box is stated"),
    ("box that is not closed", r"\boxed{W(n) = 2 \text{ and } W(n) = -2", "W(n)=2, -2", 1, 0, "the answer may be cut off"),
    ("other variable, by an option", "$f(x)$", "$f(z)$", 1, 0, "variables are compared, always"),
    ("other sign before e", r"$2 + \frac{1}{\mathrm{e}}$", r"$2 - \frac{1}{\mathrm{e}}$", 1, 0, "they are different numbers"),
]


@pytest.mark.parametrize(("kind", "response", "answer", "theirs", "ours", "reason"), DIFFERENT, ids=[row[0] for row in DIFFERENT])
def test_verdict_differs_from_math_verify(kind: str, response: str, answer: str, theirs: int, ours: int, reason: str) -> None:
    assert theirs != ours, reason
    assert reward(response, answer) == ours, f"{kind}: {reason}"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        # Kinds of rows in the tests of lm-eval 0.4.13; the verdict is the same here.
        ("(3,5)", "(3,5)", True),
        ("(-2,1,4)", "(-2,1,4)", True),
        ("[1,6)", "[1,6)", True),
        (r"(-\infty,2]", r"(-\infty,2]", True),
        (r"\begin{pmatrix}2\\3\end{pmatrix}", r"\begin{pmatrix}2\\3\end{pmatrix}", True),
        (r"\text{west}", r"\text{west}", True),
        ("(3,5)", "(4,6)", False),
        ("[1,6)", "[1,7)", False),
        ("(3,5)", "(5,3)", False),
        (r"\text{west}", r"\text{north}", False),
        ("", "", False),
        (r"\frac{1}{4}", "0.25", True),
        ("0,2", "(0,2)", True),
        ("0,2", "0, 2", True),
        ("2,4,6", "246", False),
        ("200,000", "200000", True),
        ("12,345", "12345", True),
        ("23,45", "2345", False),
        ("2345,6789", "23456789", False),
        ("-2,048", "-2048", True),
        (r"\sqrt[3]{27}", "3", True),
        (r"\sqrt[3]{5}+1", r"1+\sqrt[3]{5}", True),
        (r"\sqrt[3]8", r"\sqrt[3]{8}", True),
        (r"\sqrt3", r"\sqrt{3}", True),
        (r"\sqrt[3]{2}", r"\sqrt{2}", False),
    ],
)
def test_verdict_agrees_with_lm_eval(one: str, other: str, same: bool) -> None:
    assert reward(rf"\boxed{{{one}}}", other) == float(same)


def test_batch_with_invalid_answers_gets_one_score_per_sample_in_order() -> None:
    """Responses that cannot be parsed do not shift the scores of those after them."""
    bad = ["", r"\boxed{", "\u7b54\u6848", "7" * 1_000_000, r"\boxed{\frac{}{}}", "\ud800", "no idea"]
    responses = [text for number in range(4) for text in (rf"\boxed{{{number}}}", *bad)]
    problems = [Problem(f"p:{number}", "what?", str(number // (len(bad) + 1))) for number in range(len(responses))]

    async def scored() -> list[float | None]:
        async with Rewarder(RewardConfig(function="math", workers=2)) as reward:
            outcomes = await asyncio.gather(*(reward(*pair, SAMPLE) for pair in zip(responses, problems, strict=True)))
        return [outcome.reward for outcome in outcomes]

    assert asyncio.run(scored()) == [1.0 if response.startswith(r"\boxed{") and response[7:8].isdigit() else 0.0 for response in responses]


def test_answers_that_cannot_be_parsed_score_zero() -> None:
    digits = "7" * 1_000_000
    hostile = [
        "",
        " ",
        r"\boxed{",
        r"\boxed{}",
        r"\boxed{\frac{1}{0}}",
        "(" * 100_000,
        r"\boxed{" * 20_000,
        r"\frac" * 9_000,
        "\ud800",
        "$" * 9999,
    ]
    for response in [*hostile, digits, "$" * 9999, rf"\boxed{{{digits}}}", r"\boxed{10^{10^{10^{10}}}}", "\u221e", r"\boxed{\left(}"]:
        assert reward(response, "3", seconds=1.0) == 0.0, response[:40]
    assert reward(r"\boxed{3}", "(" * 1000) == 0.0


@pytest.mark.parametrize(("response", "answer"), [(r"\boxed 3.5", "3.5"), (r"\boxed 1,234", "1234"), (r"$\boxed 0.25$.", "1/4")])
def test_box_without_braces_ends_after_its_number(response: str, answer: str) -> None:
    assert (reward(response, answer), reward(response, answer[0])) == (1.0, 0.0)


def test_timer_that_fires_at_the_end_of_its_block_has_no_effect() -> None:
    """The handlers stay installed until both timers are disarmed."""
    before = signal.getsignal(signal.SIGALRM)
    upstream, fired = signal.setitimer, []

    def fire(timer: int, seconds: float) -> object:
        if not seconds:
            fired.append(timer)
            os.kill(os.getpid(), signal.SIGALRM)
        return upstream(timer, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "setitimer", fire)
        with math._time_limit(5.0):
            pass
    assert len(fired) == 2 and signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL)[0] == 0
