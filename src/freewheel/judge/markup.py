"""From a judge's reply as it came to plain text in which scores can be looked for. Every step is linear in the text.

reply ──▶ answer_part (thinking cut off) ──▶ plain (digits, dashes, markup made uniform)
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple


class Unparseable(ValueError):
    """The reply holds no score that the rubric allows; the message says what was seen."""


SHOWN_CHARS = 80
"""How much of a reply an error message shows: enough to recognise it, short enough for a log line."""
MAX_ANSWER_CHARS = 65_536
"""The longest answer, its thinking not counted, that is read: the engine's loop waits while a reply is read."""

_THINK_TAG = re.compile(r"<(/?)(?:seed:)?(?:think(?:ing)?|thought)>|\[(/?)THINK\]|◁(/?)think▷", re.IGNORECASE)
_OPENING_VERDICT = re.compile(r"\A[\s*_#>`\"'-]{0,8}(?:[^\W\d_]{1,16}[\s*_:]{1,4}){0,3}\d{1,4}(?=[\s*_.,;:/!)-]|$)")

_FENCE_LINE = re.compile(r"(?m)^[ \t]*(?:`{3,}|~{3,})[ \t]*[A-Za-z]{0,16}[ \t]*$")
_FORMAT_TAG = re.compile(r"</?(?:b|strong|em|i|u|p|br|div|span|code|pre|h[1-6]|mark|center)\s?/?>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"</[A-Za-z][\w-]{0,30}>")
_OPENING_TAG = re.compile(r"<([A-Za-z][\w-]{0,30})>")
_ANSWER_MARK = re.compile(r"(?m)^[ \t>*_]{0,8}#{4}[ \t*_]{0,4}(?=[-+$]?\d)")
"""GSM8K's mark of an answer: a judge that restates one gives no score."""
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathbf|mathrm|bold|bf)\s{0,2}\{")
_INVISIBLE = "\u200b"
_HIDDEN_JOIN = re.compile(rf"\d{_INVISIBLE}+(?=\d)")

_DASHES = "‐‑‒–—―−﹣－"
_WAVES = "~～〜∼"
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉"
_KEYCAP_PARTS = (0x20E3, *range(0xFE00, 0xFE10))


class _Uniform(dict[int, str]):
    """What each character counts as, worked out on first sight. Per character, so that the cost stays linear."""

    def __missing__(self, point: int) -> str:
        char = chr(point)
        if char in _DASHES:
            found = "-"
        elif char in _WAVES:
            found = "~"
        elif char in _SUPERSCRIPTS:
            found = "^"  # 7² is not 72
        elif char in "⁄∕":
            found = "/"
        elif char == "٫":
            found = "."
        elif point in _KEYCAP_PARTS:
            found = ""
        elif unicodedata.category(char) == "Cf":
            found = _INVISIBLE
        else:
            found = unicodedata.normalize("NFKC", char).replace("\u2044", "/")
            if len(found) == 1 and found.isdecimal():
                found = str(unicodedata.decimal(found))
        self[point] = found
        return found


_UNIFORM = _Uniform()


def shorten(text: str) -> str:
    """`text` for an error message."""
    return repr(text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…")


class Parts(NamedTuple):
    """A reply, taken apart."""

    answer: str
    unopened: str
    """Text before a closing think tag that was never opened: thinking, most likely, or a verdict and a quoted tag."""


def split_thinking(reply: str) -> Parts:
    """`reply` without the thinking before its answer.

    Thinking stands first: `<think>…</think>`, nested or several, or only its end where the server's chat template
    swallowed the opening tag. A tag elsewhere may be a quotation, and is refused where it could change the verdict.
    """
    tags = list(_THINK_TAG.finditer(reply))
    depth, cut = 0, 0
    unopened: list[str] = []
    for tag in tags:
        outside = "" if depth else reply[cut : tag.start()]
        if "/" not in tag[0]:
            if not depth and outside.strip():
                raise Unparseable(f"thinking begins in the middle of the reply: {shorten(reply[cut:])}")
            depth += 1
        elif depth > 1:
            depth -= 1
        elif depth:
            depth, cut = 0, tag.end()
        else:
            if tag is tags[0] and outside.strip() and not outside.endswith(("\n", "\r")):
                raise Unparseable(f"a closing think tag in the middle of a line: {shorten(outside[-SHOWN_CHARS:])}")
            if _OPENING_VERDICT.match(outside):
                raise Unparseable(f"a verdict stands before a closing think tag: {shorten(outside)}")
            unopened.append(outside)
            cut = tag.end()
    if depth:
        raise Unparseable(f"the thinking never ends: {shorten(reply)}")
    if len(reply) - cut > MAX_ANSWER_CHARS:
        raise Unparseable(f"an answer of {len(reply) - cut} characters; at most {MAX_ANSWER_CHARS} are read")
    return Parts(reply[cut:], "\n".join(unopened)[-MAX_ANSWER_CHARS:])


def uniform(text: str) -> str:
    """`text` with digits, dashes and widths of any script in their ASCII form, and without invisible characters."""
    if text.isascii():
        return text
    text = text.translate(_UNIFORM)
    if _INVISIBLE in text:
        if _HIDDEN_JOIN.search(text):
            raise Unparseable(f"an invisible character inside a number: {shorten(text)}")
        text = text.replace(_INVISIBLE, "")
    return text


def plain(text: str) -> str:
    """`text` without Markdown, HTML and LaTeX dress, its characters made uniform."""
    text = _ANSWER_MARK.sub("answer: ", uniform(text))
    if "`" in text or "~~~" in text:
        text = _FENCE_LINE.sub("", text).replace("`", " ")
    if "<" in text:
        text = _FORMAT_TAG.sub(" ", text)
        text = _OPENING_TAG.sub(r" ; \1: ", _CLOSING_TAG.sub(" ; ", text))  # a clause of its own, on the same line
    if "\\" in text:
        text = _LATEX_TEXT.sub(" ", text)
    return text.replace("*", " ").replace("$", " ").replace("\r", "\n").strip()
