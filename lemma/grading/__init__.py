"""Grading: find the answer in a completion and decide whether it is the gold: right, wrong or unknown, and why.

extract     the final answer of a completion           normal_form one spelling for many
tokens, expression, evaluate                           simple LaTeX, read and computed exactly
structure, shapes, single, choice, units               lists, intervals, relations, matrices; part by part
guard, symbolic, worker, pool                          sympy behind an allow-list, in processes that can be killed
service, quick, grader                                 the pipeline, cheapest first
compat      graders of other systems, to the letter
"""

from __future__ import annotations

from lemma.grading.extract import Extraction, extract
from lemma.grading.rules import DEFAULT, Rules
from lemma.grading.service import GradingService, default_service, grade
from lemma.grading.verdict import REASONS, Verdict

__all__ = [
    "DEFAULT",
    "REASONS",
    "Extraction",
    "GradingService",
    "Rules",
    "Verdict",
    "default_service",
    "extract",
    "grade",
]
