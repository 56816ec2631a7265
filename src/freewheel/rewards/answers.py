"""Finds the answer in a response: the number after `####`, the last box, the `Answer:` line. `rules` calls it.

Every search is linear in the text: a response may be 100,000 characters of one tag, repeated.
"""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST_ANSWER_CHARS = 200
"""A number, its unit and a remark; a longer line is no answer, and thousands of digits take quadratic time to read."""

_MARK = re.compile(r"(?<!#)####(?!#)")
_MINUS = str.maketrans(dict.fromkeys("−–‒﹣－", "-"))
_DIGITS = r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}|[0-9]{1,3}(?:\s[0-9]{3})+|[0-9]+"
"""Grouped by commas (by thousands, or the Indian way) or by spaces of any width, or not at all."""
_NUMBER = re.compile(
    rf"""\s* (?P<sign>[+-]?) \s* (?:\\?[$€£¥₹])? \s* (?P<late_sign>[+-]?) \s*
    (?: (?: (?P<whole>[0-9]+) \s+ )? (?P<over>{_DIGITS}) \s?/\s? (?P<under>{_DIGITS})
      | (?P<integer>{_DIGITS})? (?P<decimals>\.[0-9]+)? )
    [^\d¼-¾⅐-⅞]* \Z""",
    re.VERBOSE,
)
"""One number with its currency, its percent sign and its unit; a second number makes the answer ambiguous."""
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"\banswer\s*:([^\n]*)", re.IGNORECASE)


def marked_answer(text: str) -> str | None:
    """The rest of the line after the last `####`."""
    marks = list(_MARK.finditer(text))
    if not marks:
        return None
    lines = text[marks[-1].end() :].strip().splitlines()
    return lines[0] if lines else ""


def number_in(text: str) -> Fraction | None:
    """The one number that `text` states, exactly; None if it states none, or several."""
    found = _NUMBER.match(text.translate(_MINUS)) if len(text) <= LONGEST_ANSWER_CHARS else None
    if found is None or (found["sign"] and found["late_sign"]):
        return None
    if found["over"]:
        under = int(_bare(found["under"]))
        if not under:
            return None
        value = int(found["whole"] or 0) + Fraction(int(_bare(found["over"])), under)
    elif found["integer"] or found["decimals"]:
        value = Fraction(_bare(found["integer"] or "0") + (found["decimals"] or ""))
    else:
        return None
    return -value if "-" in (found["sign"], found["late_sign"]) else value


def _bare(digits: str) -> str:
    return re.sub(r"[,\s]", "", digits)


def last_box(text: str) -> str | None:
    """What the last `\\boxed{…}` with balanced braces holds; of nested ones the innermost."""
    opened: list[tuple[int, bool]] = []
    boxes: list[tuple[int, int]] = []
    for token in _BRACES.finditer(text):
        is_box = token[0].startswith("\\boxed")
        if is_box or token[0] == "{":
            opened.append((token.end(), is_box))
        elif token[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box:
                boxes.append((start, token.start()))
    return text[slice(*max(boxes))].strip() if boxes else None


def answer_line(text: str) -> str | None:
    """What stands on the last line that says `Answer:`, without its dollars and stars."""
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    return last_box(lines[-1]) or lines[-1].lstrip("*$ \t").rstrip("*$. \t\r")
