"""Parse a judge's reply into a score. The engine makes one reader per rubric and calls it once per reply.

    reply ─▶ split_thinking ─┬▶ make_plain ─▶ numbers ─▶ claims: numbers put forward as the score ─▶ one value
                             ├▶ yes or no ─▶ claims                            └──▶ no claim: a lone number
                             └▶ JSON, or the user's own function

Readers accept the forms that judges really send. They refuse an ambiguous or out-of-range reply with `Unparseable` and
never guess.

A claim is a number with a label (`Score: 7`, `最终评分 7`), in `\\boxed{}`, as a fraction of the highest score,
`7/10`, alone on its line, or at the start or the end of the reply. Some claims can contradict a score but never make
one: quoted ones, ones that the judge only reports ("the response says Score: 10"), and ones whose label names something
else (`Answer: 7`). So the author of the response cannot supply the score, and an answer that the judge repeats is not
taken for one. Every step is linear in the text.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from freewheel.errors import ConfigError
from freewheel.judge.rubric import PARSERS, Rubric, number_text
from freewheel.judge.verdict import without_surrogates
from freewheel.utils.registry import find_object


class Unparseable(ValueError):
    """The reply holds no score that the rubric allows. The message shows what was found."""


_SHOWN_CHARS = 80
"""Length of a reply in an error message: enough to recognise it, short enough for a log line."""
MAX_ANSWER_CHARS = 65_536
"""Longest answer that is parsed, not counting the thinking. Parsing blocks the event loop."""

_THINK_TAG = re.compile(r"<(/?)(?:seed:)?(?:think(?:ing)?|thought)>|\[(/?)THINK\]|◁(/?)think▷", re.IGNORECASE)
_OPENING_VERDICT = re.compile(r"\A[\s*_#>`\"'-]{0,8}(?:[^\W\d_]{1,16}[\s*_:]{1,4}){0,3}\d{1,4}(?=[\s*_.,;:/!)-]|$)")

_FENCE_LINE = re.compile(r"(?m)^[ \t]*(?:`{3,}|~{3,})[ \t]*[A-Za-z]{0,16}[ \t]*$")
_FORMAT_TAG = re.compile(r"</?(?:b|strong|em|i|u|p|br|div|span|code|pre|h[1-6]|mark|center)\s?/?>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"</[A-Za-z][\w-]{0,30}>")
_OPENING_TAG = re.compile(r"<([A-Za-z][\w-]{0,30})>")
_ANSWER_MARK = re.compile(r"(?m)^[ \t>*_]{0,8}#{4}[ \t*_]{0,4}(?=[-+$]?\d)")
"""GSM8K's mark of an answer. The number after it is a repeated answer, not a score."""
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathbf|mathrm|bold|bf)\s{0,2}\{")
_INVISIBLE = "\u200b"
_HIDDEN_JOIN = re.compile(rf"\d{_INVISIBLE}+(?=\d)")


class _Uniform(dict[int, str]):
    """The replacement of each character, computed when the character is first seen. So normalizing a text takes linear
    time."""

    def __missing__(self, point: int) -> str:
        found = _INVISIBLE
        if unicodedata.category(chr(point)) != "Cf":
            found = unicodedata.normalize("NFKC", chr(point)).replace("\u2044", "/")
            if len(found) == 1 and found.isdecimal():
                found = str(unicodedata.decimal(found))
        self[point] = found
        return found


_SAME = {
    "-": "‐‑‒–—―−﹣－",
    "~": "~～〜∼",
    "^": "⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉",  # 7² is not 72
    "/": "⁄∕",
    ".": "٫",
    "": "\u20e3" + "".join(map(chr, range(0xFE00, 0xFE10))),  # parts of a keycap
}
_UNIFORM = _Uniform((ord(char), plain) for plain, chars in _SAME.items() for char in chars)


def _shorten(text: str) -> str:
    """Shorten `text` for an error message."""
    return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…")


def _split_thinking(reply: str) -> tuple[str, str]:
    """Separate the thinking from the answer after it. Returns the answer, and the text before an unopened tag.

    Thinking comes first: `<think>…</think>`, nested or repeated, or only the closing tag if the server's chat template
    removed the opening one. Text before such a closing tag is usually thinking, but it may be a verdict followed by a
    quoted tag. A tag in another place may be a quotation. A reply is refused if the tag could change the verdict.
    """
    tags = list(_THINK_TAG.finditer(reply))
    depth, cut = 0, 0
    unopened: list[str] = []
    for tag in tags:
        outside = "" if depth else reply[cut : tag.start()]
        if "/" not in tag[0]:
            if not depth and outside.strip():
                raise Unparseable(f"thinking begins in the middle of the reply: {_shorten(reply[cut:])}")
            depth += 1
        elif depth > 1:
            depth -= 1
        elif depth:
            depth, cut = 0, tag.end()
        else:
            if tag is tags[0] and outside.strip() and not outside.endswith(("\n", "\r")):
                raise Unparseable(f"a closing think tag in the middle of a line: {_shorten(outside[-_SHOWN_CHARS:])}")
            if _OPENING_VERDICT.match(outside):
                raise Unparseable(f"a verdict comes before a closing think tag: {_shorten(outside)}")
            unopened.append(outside)
            cut = tag.end()
    if depth:
        raise Unparseable(f"the thinking never ends: {_shorten(reply)}")
    if len(reply) - cut > MAX_ANSWER_CHARS:
        raise Unparseable(f"an answer of {len(reply) - cut} characters; at most {MAX_ANSWER_CHARS} are read")
    return reply[cut:], "\n".join(unopened)[-MAX_ANSWER_CHARS:]


def _make_plain(text: str) -> str:
    """Remove Markdown, HTML and LaTeX markup and invisible characters. Convert digits of any script, dashes and
    full-width forms to ASCII."""
    if not text.isascii():
        text = text.translate(_UNIFORM)
        if _HIDDEN_JOIN.search(text):
            raise Unparseable(f"an invisible character inside a number: {_shorten(text)}")
        text = text.replace(_INVISIBLE, "")
    text = _ANSWER_MARK.sub("answer: ", text)
    if "`" in text or "~~~" in text:
        text = _FENCE_LINE.sub("", text).replace("`", " ")
    if "<" in text:
        text = _FORMAT_TAG.sub(" ", text)
        text = _OPENING_TAG.sub(r" ; \1: ", _CLOSING_TAG.sub(" ; ", text))  # a separate clause, on the same line
    if "\\" in text:
        text = _LATEX_TEXT.sub(" ", text)
    return text.replace("*", " ").replace("$", " ").replace("\r", "\n").strip()


_LEAD_CHARS = 80
"""How many characters before a label count as its sentence."""

_STRONG = (
    r"scor(?:e|ing)|ratings?|grade|评分|得分|分数|打分|总分|评级|評分|分數|スコア|評価|得点|点数|採点|점수|평점|평가|"
    r"punktzahl|bewertung|wertung|calificaci[oó]n|puntuaci[oó]n|puntaje|pontua[cç][aã]o|punteggio|valutazione|"
    r"оценка|балл|рейтинг|الدرجة|التقييم|स्कोर|अंक|puan|điểm|skor"
)
"""These claim a score with or without a colon."""
_VERDICT = r"voto|marks?|punkte|overall|final|verdict|evaluation|assessment|judge?ment|decision|評定|評点"
"""These claim a score only with a colon after them and nothing after the number."""
_GRADED = r"notes?|nota|points?|total"
"""These claim a score only if it is written as 7/10: "Note: 7" is a remark, "Note : 7/10" is a grade."""
_RESTATED = r"answers?|results?|quality|итог|结果|结论|النتيجة"
"""These name the judged answer or a part of the verdict. They may contradict a score but never claim one."""
_LABEL = re.compile(
    rf"(?<![A-Za-z/\\])(?:(?P<strong>{_STRONG})|(?P<verdict>{_VERDICT})|(?P<graded>{_GRADED})|(?P<restated>{_RESTATED}))"
    r"(?![a-zA-Z])",
    re.IGNORECASE,
)
_NOT_THE_VERDICT = re.compile(
    r"\b(?:confidence|certainty|max(?:imum|imal)?|highest|possible|min(?:imum|imal)?|lowest|passing|reference|expected|"
    r"example)[ \t_-]{1,2}$",
    re.IGNORECASE,
)
"""Before a label: "Confidence score: 9" and "Maximum score: 10" are not the score of the response."""
_LONE_VERDICT = re.compile(
    rf"(?<![A-Za-z/\\])(?:{_STRONG}|scores|verdict|(?:note|nota|voto) (?:finale?|globale?|total|totale))(?![a-zA-Z])"
    r"(?!.*\b(?:difference|gap|level|range|change|count|threshold|confidence)\b)",
    re.IGNORECASE,
)
"""A label of a few words must contain this to claim a score ("Bewertung der Antwort: 7")."""
_RESTATED_LEAD = re.compile(
    rf"(?<![A-Za-z])(?:{_RESTATED}|solutions?|values?|probability|fraction|ответ|答案|antwort|réponse|respuesta)"
    r"(?: (?:is|was|are|equals?|should be|would be|must be|ist|est|es)|为|是)?[\s:=,_\"'(\[{|-]{0,8}$",
    re.IGNORECASE,
)
"""Before a `7/10`, a `\\boxed{7}` or a 7 alone on its line, this marks an answer."""
_SCORE_OF = re.compile(
    rf"(?<![A-Za-z])(?:{_STRONG}) (?:of|for|to)(?: (?:the|this|that|its|final|model's|student's)){{0,3}} $|"
    r"(?:scoring|grading|评分|得分|打分|評分)[ 的]?$",
    re.IGNORECASE,
)
"""If this precedes a label that claims nothing by itself, the number is a score: "Score for the answer: 7",
"评分结果：7"."""
_HEADING_WORDS = 4
"""A longer line without a colon is prose, not a heading of the next line."""
_LEADS_ON = re.compile(r"(?:[:=]|\b(?:is|was|are|equals?|be|ist|est|es)|为|是)[\s\"']{0,4}$", re.IGNORECASE)
_EQUALS = re.compile(r"=[\s(\[{]{0,4}$")
_SHORT_LABEL = re.compile(
    r"(?:^|\n)[ \t#>|;_\"'(\[{•-]{0,8}[^\W\d_][^\s:=]{0,24}(?:[ \t]{1,2}[^\s:=]{1,24}){0,2}[ \t]{0,2}[:=][ \t\"']{0,4}$"
)
_VERDICT_WORD = re.compile(r"overall|final|result|verdict|evaluation|assessment|judge?ment|decision", re.IGNORECASE)
"""With a colon, these may contradict a score even if prose follows the number ("Result: 3 of 4 tests pass")."""


def _claims_a_score(text: str, label: re.Match[str], *, over_top: bool, ends: bool) -> bool:
    """Whether a number with this label can be the score, rather than what was judged or a part of the verdict.

    `over_top`: the number is written as 7/10. `ends`: no text that belongs to it follows.
    """
    lead = text[max(0, label.start() - _LEAD_CHARS) : label.start()]
    if label["restated"]:
        return _SCORE_OF.search(lead) is not None
    if label["graded"] and not (over_top and ends):
        return False
    return not _NOT_THE_VERDICT.search(lead)


def _restates(text: str, begin: int) -> bool:
    """Whether the text before `begin` marks a number there as an answer ("so x = 7/10") and not as a score."""
    before = text[max(0, begin - _LEAD_CHARS) : begin]
    if _RESTATED_LEAD.search(before):
        return True
    label = _SHORT_LABEL.search(before)
    if label is None and not _EQUALS.search(before):
        return False
    named = label[0] if label else before.rpartition("\n")[2]
    return not any(found["strong"] or found["verdict"] or found["graded"] for found in _LABEL.finditer(named))


def _is_under_answer_heading(text: str, begin: int) -> bool:
    """Whether the line above ("## Answer") marks a number that is alone on its line as an answer and not as a score."""
    above = text[max(0, begin - _LEAD_CHARS) : begin].rstrip(" \t\n#>|_\"'([{•-")
    line = above.rpartition("\n")[2]
    if not line.strip() or not (_LEADS_ON.search(line) or len(line.split()) <= _HEADING_WORDS):
        return False
    return _restates(above, len(above))


_NUMBER_CHARS = 32
"""Longer digit strings are not scores. The bound also protects `float` from megabytes of digits."""
_MAX_TOKENS = 4096
"""A reply with more numbers is not a verdict. The bound limits the cost of a hostile reply."""
_LEAD_WORDS = 6
"""A label with more words before it in its sentence is prose, not a verdict line."""

_GLUE = r"0-9A-Za-z_\u00aa-\u024f\u0300-\u052f"
_TOKEN = re.compile(rf"(?:[{_GLUE}.,/^%+~-]|(?<=\d):(?=\d))+")
_EDGES = re.compile(r"^(?:\.{2,}|[,_])+|[_.,:]+$")
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4})?)(%?)")
_RATIO = re.compile(r"([+-]?\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)")
_HAS_DIGIT = re.compile(r"\d")

_UNIT = r"(?:分(?![钟之])|点(?!钟)|점|points?\b|pts?\b|punkte\b|puntos\b|баллов|балла|stars?\b)"
_SLASHED = re.compile(rf"(?<=\d)[ \t]{{0,3}}{_UNIT}?[ \t]{{0,3}}(?:/|\b(?:out of|von|sur|de|из)\b)[ \t]{{0,3}}(?=\d)")

_ENVELOPE = re.compile(
    r"\s*((?:<(reasoning|analysis|explanation|rationale)>[^<>]*</\2>\s*)?)<answer>([^<>]*)</answer>\s*", re.IGNORECASE
)
"""Some models send a verdict in exactly this form. In any other place, the tag marks the answer that was judged."""
_MARKS = r"[\s:=|_\"'()\[\]{}<>→]|-(?![\d.])"
_SEPARATOR = re.compile(
    rf"(?:{_MARKS}){{0,12}}(?:\b(?:is|of|was|would be|should be|est(?: de)?|ist|es|è|é|это)\b|为|是|は|が|:)?"
    rf"(?:{_MARKS}){{0,8}}(?:\ban?\b)?(?:{_MARKS}){{0,4}}",
    re.IGNORECASE,
)
_FIRST_PERSON = re.compile(
    r"\bI(?:'d|'ll| would| will| am going to)? (?:give|rate|assign|award|grade|score|say)"
    r"(?: (?:it|this|that|the|response|answer|a|an|score|rating|of|as|at)){0,5} (?=[+-]?\.?\d)",
    re.IGNORECASE,
)
_GIVEN = re.compile(r"(?:给出?|打|得|評価は)[^\d\n。，,.]{0,12}(?=[\d./]{1,32}分)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{\s{0,3}")
_COLON = re.compile(r"[:=|>→]")
_QUOTED = re.compile(r'"[^"\n]*"|“[^“”]*”|«[^«»]*»|「[^「」]*」|『[^『』]*』')
_CLAUSE_END = re.compile(r"[.,;:!?()。，；：！？\n]")
_REPORTING = re.compile(
    r"\b(?:says?|saying|said|claim(?:s|ed|ing)?|ask(?:s|ed|ing)?|demand(?:s|ed|ing)?|tell(?:s|ing)?|told|contain(?:s|ed|ing)?|"
    r"writ(?:es?|ing|ten)|wrote|end(?:s|ed|ing)|includ(?:es?|ed|ing)|instruct\w*|order(?:s|ed|ing)|request(?:s|ed|ing)?|"
    r"stat(?:es|ed|ing)|quot(?:es?|ed|ing)|output(?:s|ting)?|print(?:s|ed|ing)?|repl(?:y|ies|ied)|respond(?:s|ed|ing)?|"
    r"inject\w*|attempt(?:s|ed|ing)?|tr(?:y|ies|ied|ying)|insist(?:s|ed|ing)?|wants?|command(?:s|ed|ing)?|append(?:s|ed)?|"
    r"embed\w*|fakes?|faked|using|via|like|such as)\b|说|要求|写|声称|命令|と書|という",
    re.IGNORECASE,
)
_AFTER_END = re.compile(
    rf"[ \t]{{0,3}}{_UNIT}?[ \t]{{0,3}}(?:[\"')\]}}|_]{{0,4}})[ \t]{{0,3}}(?:$|[\n.,;:!)\]}}。，；！(-])"
)
_AFTER_LINE = re.compile(rf"[ \t]{{0,3}}{_UNIT}?[ \t\"')\]}}|_.。!,;]{{0,8}}(?:$|\n)")
_AND_ANOTHER = re.compile(
    r"[ \t]{0,3}(?:->?|→|~|,|&|、|to\b|or\b|and\b|bis\b|oder\b|ou\b|o\b|или\b|до\b|至|到|或|から)?[ \t]{0,3}[+-]?\.?\d"
)
_LINE_START = re.compile(r"(?:^|\n)[ \t#>|:;=_\"'(\[{•-]{0,16}$")
_SENTENCE_START = re.compile(r"[.!?。！？][ \t\"')\]]{0,4}$")
_CLOSING = re.compile(r"[ \t\n\"')\]};.。!分点]{0,8}\Z")
_NUMBERED_LIST = re.compile(r"1[.)](?=\s)(?s:.*?)\n[ \t]{0,8}2[.)]\s")


class _Token(NamedTuple):
    start: int
    end: int
    value: float | None
    """None: the token has digits, but is not a number that could be a score."""
    over_top: bool
    """True if it is a fraction of the highest score, as in 7/10."""
    plain_number: bool
    """A number, a percentage or a ratio, whatever its value; not a date, a version or a word with digits in it."""


class _Claim(NamedTuple):
    token: _Token
    own: bool
    """The judge claims it itself: neither quoted nor reported."""
    loose: bool
    """The number only starts or ends a line of prose, so any other number in the reply makes it doubtful."""
    firm: bool
    """It is put forward as the score, not as an answer or a part of the verdict."""


class _Quotes:
    """Tells the judge's own claims in a text from quoted and reported ones."""

    def __init__(self, text: str) -> None:
        self._text = text
        spans = [match.span() for match in _QUOTED.finditer(text)]
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]

    def around(self, begin: int, end: int) -> bool:
        """Whether text[begin:end] lies within one pair of quotation marks."""
        index = bisect_left(self._starts, begin) - 1
        return index >= 0 and end < self._ends[index]

    def is_own_claim(self, begin: int, end: int) -> bool:
        """Whether the judge itself claims text[begin:end]: it is not quoted, and the clause before it is short and has
        no word such as "says"."""
        clause = _CLAUSE_END.split(self._text[max(0, begin - _LEAD_CHARS) : begin])[-1]
        is_reported = len(clause.split()) > _LEAD_WORDS or _REPORTING.search(clause)
        return not is_reported and not self.around(begin, end)


class _ScoreFinder:
    """Reads one number within [low, high] from a reply, or raises `Unparseable`."""

    def __init__(self, *, low: float, high: float, integer: bool, place: str) -> None:
        self._low, self._high, self._integer, self._place = low, high, integer, place
        top, bottom = re.escape(number_text(high)), re.escape(number_text(low))
        span = rf"(?:{bottom}|0|1)\s{{0,2}}(?:-|~|to|bis|à|至|到)\s{{0,2}}{top}(?![\d.])"
        self._scale = re.compile(
            rf"满分\s{{0,2}}[为是:]?\s{{0,2}}{top}\s{{0,2}}分?|(?<!\d)\bout of {top}(?![\d.])|"
            rf"(?:on|in|using)? ?\b(?:a|the)? ?scale (?:of|from)? ?{span}|[(\[]\s?(?:out of )?{span}\s?分?[)\]]|"
            rf"[(\[]\s?(?:max(?:imum)?|out of|of|/)\s?{top}\s?[)\]]",
            re.IGNORECASE,
        )

    def __call__(self, reply: str) -> float:
        answer, unopened = _split_thinking(reply)
        envelope = _ENVELOPE.fullmatch(answer)
        text = self._prepare(f"{envelope[1]}\n{envelope[3]}" if envelope else answer)
        if len(text) > 1 and text[0] == text[-1] == '"' and text.count('"') == 2:
            text = text[1:-1].strip()
        tokens = self._tokens(text)
        quotes = _Quotes(text)
        claims = self._claims(text, tokens, quotes)
        chosen = self._choose(claims, tokens, reply) if claims else self._lone(text, tokens, quotes, reply)
        if chosen.value is None:
            raise Unparseable(
                f"no score on this scale: {_shorten(text[chosen.start : chosen.end])} in {_shorten(reply)}"
            )
        if not self._low <= chosen.value <= self._high:
            raise Unparseable(
                f"{number_text(chosen.value)} is outside {number_text(self._low)} to {number_text(self._high)}"
            )
        if unopened and self._place == "only" and not self._find_claimed(unopened) <= {chosen.value}:
            raise Unparseable(f"another score before a closing think tag in {_shorten(reply)}")
        return chosen.value

    def _prepare(self, text: str) -> str:
        return self._scale.sub(" ", _SLASHED.sub("/", _make_plain(text)))

    def _find_claimed(self, text: str) -> set[float | None]:
        """The values that `text` puts forward as the score."""
        text = self._prepare(text)
        return {claim.token.value for claim in self._claims(text, self._tokens(text), _Quotes(text))}

    def _tokens(self, text: str) -> dict[int, _Token]:
        found: dict[int, _Token] = {}
        for match in _TOKEN.finditer(text):
            if _HAS_DIGIT.search(match[0]):
                token = self._token(match[0], match.start())
                found[token.start] = token
                if len(found) > _MAX_TOKENS:
                    raise Unparseable(f"more than {_MAX_TOKENS} numbers in the reply")
        return found

    def _token(self, word: str, start: int) -> _Token:
        edge = _EDGES.match(word)
        if edge:
            start += edge.end()
        word = _EDGES.sub("", word)
        end = start + len(word)
        if len(word) <= _NUMBER_CHARS:
            number = _NUMBER.fullmatch(word)
            if number:
                return _Token(start, end, self._value(number[1], number[2] == "%"), False, True)
            ratio = _RATIO.fullmatch(word)
            if ratio:
                over_top = float(ratio[2]) == self._high
                return _Token(start, end, self._value(ratio[1], False) if over_top else None, over_top, True)
        return _Token(start, end, None, False, False)

    def _value(self, digits: str, percent: bool) -> float | None:
        value = float(digits)
        if percent:
            if self._low == 0 and self._high == 1:
                return value / 100
            return value if self._high == 100 and not self._integer else None
        if self._integer and (not value.is_integer() or "e" in digits.lower()):
            return None
        return value

    def _claims(self, text: str, tokens: dict[int, _Token], quotes: _Quotes) -> list[_Claim]:
        found: dict[int, _Claim] = {}

        def add(token: _Token, begin: int, *, firm: bool, own: bool = True, loose: bool = False) -> None:
            own = own and firm and quotes.is_own_claim(begin, token.end)
            if token.start not in found or (own and not found[token.start].own):
                if _AND_ANOTHER.match(text, token.end):
                    token = token._replace(value=None)
                found[token.start] = _Claim(token, own, loose, firm)

        for token, begin, firm in self._find_labelled(text, tokens):
            add(token, begin, firm=firm)
        for token in tokens.values():
            if token.start in found:
                continue
            if token.over_top:
                add(token, token.start, firm=not _restates(text, token.start))
            elif unlabelled := _find_unlabelled(text, token):
                own, loose = unlabelled
                add(token, token.start, own=own, loose=loose, firm=not _is_under_answer_heading(text, token.start))
        return [found[start] for start in sorted(found)]

    def _find_labelled(self, text: str, tokens: dict[int, _Token]) -> Iterator[tuple[_Token, int, bool]]:
        """Yield each number with a label, the start of the label, and whether the number can be the judge's score."""
        for label in _LABEL.finditer(text):
            gap = _SEPARATOR.match(text, label.end())
            token = tokens.get(gap.end()) if gap else None
            if token is None or gap is None:
                continue
            if "\n" in gap[0] and not _AFTER_LINE.match(text, token.end):
                continue  # the first item of a list under a heading
            strong, ends = label["strong"] is not None, _AFTER_END.match(text, token.end) is not None
            if not _COLON.search(gap[0]):
                if not strong or not (ends or _AND_ANOTHER.match(text, token.end)):
                    continue  # prose like "a score of 10 is not warranted"
            elif not strong and not (token.over_top or ends):
                if _VERDICT_WORD.match(label[0]):
                    yield token, label.start(), False  # "Result: 3 of 4 tests pass" may contradict, but is not a score
                continue  # prose like "Note: 3 steps are wrong"
            yield token, label.start(), _claims_a_score(text, label, over_top=token.over_top, ends=ends)
        for pattern in (_FIRST_PERSON, _GIVEN, _BOXED):
            for match in pattern.finditer(text):
                token = tokens.get(match.end())
                if token is not None:
                    yield token, match.start(), pattern is not _BOXED or not _restates(text, match.start())

    def _choose(self, claims: list[_Claim], tokens: dict[int, _Token], reply: str) -> _Token:
        if self._place != "only":
            firm = [claim.token for claim in claims if claim.firm]
            if not firm:
                raise Unparseable(f"no number is labelled as a score in {_shorten(reply)}")
            return firm[0 if self._place == "first" else -1]
        values = {claim.token.value for claim in claims}
        if all(claim.loose for claim in claims):
            values |= {token.value for token in tokens.values() if token.plain_number}
        if len(values) > 1:
            raise Unparseable(f"scores that contradict each other in {_shorten(reply)}")
        if not any(claim.own for claim in claims):
            raise Unparseable(f"the only score is quoted, reported, or not for the response in {_shorten(reply)}")
        return claims[0].token

    def _lone(self, text: str, tokens: dict[int, _Token], quotes: _Quotes, reply: str) -> _Token:
        numbers = [token for token in tokens.values() if token.plain_number]
        if numbers and self._place != "only":
            return numbers[0 if self._place == "first" else -1]
        if len({text[token.start : token.end] for token in numbers}) > 1:
            raise Unparseable(f"several numbers and no label in {_shorten(reply)}")
        for token in numbers:
            label = _SHORT_LABEL.search(text[max(0, token.start - _LEAD_CHARS) : token.start])
            verdict = _LONE_VERDICT.search(label[0]) if label else None
            if label is None or verdict is None or _NOT_THE_VERDICT.search(label[0][: verdict.start()]):
                continue
            is_reported = _REPORTING.search(label[0]) or quotes.around(token.start, token.end)
            if not is_reported and _AFTER_END.match(text, token.end):
                return token
        raise Unparseable(f"no number that is labelled as a score in {_shorten(reply)}")


def _find_unlabelled(text: str, token: _Token) -> tuple[bool, bool] | None:
    """Return `own` and `loose` if a number without a label forms a line, or starts or ends the text; else None. A
    number alone on its line counts as the judge's own only on the first or the last line: between them it may be a
    quotation.
    """
    before = text[max(0, token.start - _LEAD_CHARS) : token.start]
    if not token.plain_number:
        return None
    if _LINE_START.search(before):
        if _AFTER_LINE.match(text, token.end):
            return text.find("\n", 0, token.end) < 0 or text.find("\n", token.start) < 0, False
        starts = "\n" not in before and _AFTER_END.match(text, token.end)
        return (True, True) if starts and not _NUMBERED_LIST.match(text, token.start) else None
    return (True, True) if _SENTENCE_START.search(before) and _CLOSING.match(text, token.end) else None


# -- readers -----------------------------------------------------------------------------------------------------------


_FAST_INTEGERS = 1000
"""At most this many integers of the scale are looked up in a table."""
_BARE_DECIMAL = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")
_JSON_ATTEMPTS = 64
"""Opening braces that are tried as the start of an object. The bound keeps the work linear."""


class Reading(NamedTuple):
    """A parsed reply."""

    value: float
    parts: dict[str, float]
    """Score by criterion, for rubrics that have several."""


Reader = Callable[[str], Reading]
_Claims = list[tuple[Reading, bool]]
"""The readings of a text, in order. The flag is False for a reading that the judge only quotes or reports."""


def make_reader(rubric: Rubric) -> Reader:
    """Make the reader of `rubric`: it returns the `Reading` of a reply, or raises `Unparseable` and nothing else."""
    if rubric.parser not in PARSERS:
        return _custom_reader(rubric)
    if rubric.parser in ("integer", "number"):
        return _number_reader(rubric)
    find = _find_words(rubric) if rubric.parser == "yes_no" else _find_scores_in_json(rubric)
    return lambda reply: _read_at_place(find, rubric.place, reply)


def _number_reader(rubric: Rubric) -> Reader:
    decimals = rubric.parser == "number"
    find = _ScoreFinder(low=rubric.low, high=rubric.high, integer=not decimals, place=rubric.place)
    first, last = math.ceil(rubric.low), math.floor(rubric.high)
    bare = {str(value): float(value) for value in range(first, min(last + 1, first + _FAST_INTEGERS))}

    def read(reply: str) -> Reading:
        text = reply.strip()
        value = bare.get(text)
        if value is None and decimals and _BARE_DECIMAL.fullmatch(text) and rubric.low <= float(text) <= rubric.high:
            value = float(text)
        return Reading(find(reply) if value is None else value, {})

    return read


def _read_at_place(find: Callable[[str], _Claims], place: str, reply: str) -> Reading:
    """Return the reading of `reply` that the rubric's `place` selects."""
    answer, unopened = _split_thinking(reply)
    found = find(answer)
    if not found:
        raise Unparseable(f"no verdict in the form that the rubric asks for in {_shorten(reply)}")
    if place == "only":
        if any(reading != found[0][0] for reading, _ in found):
            raise Unparseable(f"verdicts that contradict each other in {_shorten(reply)}")
        if not any(own for _, own in found):
            raise Unparseable(f"the only verdict is quoted or reported in {_shorten(reply)}")
        if unopened and any(reading != found[0][0] for reading, _ in find(unopened)):
            raise Unparseable(f"another verdict before a closing think tag in {_shorten(reply)}")
    return found[-1 if place == "last" else 0][0]


_YES = "yes|true|是|是的|对|正确|はい|예|네|oui|ja|sí|si|sim|да"
_NO = "no|false|否|不是|不对|错误|いいえ|아니요|아니오|non|nein|não|нет"
_WORDS = {word: word in _YES.split("|") for word in f"{_YES}|{_NO}".split("|")}
_WORD = rf"({_YES}|{_NO})"
_EDGE = r"[\s\"'_#>(){}\[\]-]{0,8}"
_WORD_END = r"(?=[ \t\"'_)\]}]{0,4}(?:$|[\n.,;:!。，；：！(-]))"
_OPENING_WORD = re.compile(rf"\A{_EDGE}{_WORD}{_WORD_END}", re.IGNORECASE)
_LINE_WORD = re.compile(rf"(?m)^[ \t\"'_#>(){{}}\[\]-]{{0,8}}{_WORD}[ \t\"'_)\]}}.。!,]{{0,8}}$", re.IGNORECASE)
_CLOSING_WORD = re.compile(rf"[.!?。！？][ \t\n\"']{{0,4}}{_WORD}[.。!\"']{{0,3}}\Z", re.IGNORECASE)
_LABELLED_WORD = re.compile(
    rf"(?<![A-Za-z/])(?:verdict|answer|result|decision|judge?ment|correct|conclusion|score|final|判定|结论|答案|回答|結論)"
    rf"[\"'_ \t]{{0,4}}(?:[:=]|\bis\b|是|为)[\s\"'_]{{0,6}}{_WORD}{_WORD_END}",
    re.IGNORECASE,
)


def _find_words(rubric: Rubric) -> Callable[[str], _Claims]:
    def find(text: str) -> _Claims:
        text = _make_plain(text)
        quotes = _Quotes(text)
        claims: dict[int, tuple[Reading, bool]] = {}
        for pattern in (_OPENING_WORD, _LINE_WORD, _LABELLED_WORD, _CLOSING_WORD):
            for match in pattern.finditer(text):
                score = rubric.high if _WORDS[match[1].lower()] else rubric.low
                own = pattern is _OPENING_WORD or quotes.is_own_claim(*match.span())
                claims.setdefault(match.start(1), (Reading(float(score), {}), own))
        return [claims[start] for start in sorted(claims)]

    return find


def _find_scores_in_json(rubric: Rubric) -> Callable[[str], _Claims]:
    weights = rubric.criteria or {rubric.json_field: 1.0}
    total = math.fsum(weights.values())
    number_in = _ScoreFinder(low=rubric.low, high=rubric.high, integer=False, place="only")

    def find(text: str) -> _Claims:
        claims = []
        for fields, own in _objects(text):
            missing = [name for name in weights if name not in fields]
            if len(missing) == len(weights):
                continue
            if missing:
                raise Unparseable(f"no score for {missing[0]!r} in {_shorten(text)}")
            parts = {}
            for name in weights:
                value = fields[name]
                parts[name] = number_in(value) if isinstance(value, str) else _check_number(value, rubric, repr(name))
            mean = math.fsum(weights[name] * score for name, score in parts.items()) / total
            reading = Reading(min(max(mean, rubric.low), rubric.high), parts if rubric.criteria else {})
            claims.append((reading, own))
        return claims

    return find


def _check_number(value: object, rubric: Rubric, name: str) -> float:
    """Check `value` as a score in `rubric`'s range."""
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise Unparseable(f"{name} is a {type(value).__name__}, not a number")
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise Unparseable(f"{name} is not a number: {error}") from error
    if not rubric.low <= score <= rubric.high:  # NaN is refused here too
        raise Unparseable(f"{name} is {score:g}, outside {number_text(rubric.low)} to {number_text(rubric.high)}")
    return score


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if found[key] != value:
                raise Unparseable(f"{key!r} appears twice in one object, with different values")
    return found


def _no_constant(name: str) -> float:
    raise Unparseable(f"{name} is not a score")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=float, parse_constant=_no_constant, strict=False)


def _objects(text: str) -> list[tuple[dict[str, Any], bool]]:
    """Return the outermost JSON objects of a text, in order. The flag is False for an object that the judge only quotes
    or reports."""
    found: list[tuple[dict[str, Any], bool]] = []
    quotes = _Quotes(text)
    position = text.find("{")
    for _ in range(_JSON_ATTEMPTS):
        if position < 0:
            return found
        try:
            value, end = _DECODER.raw_decode(text, position)
        except Unparseable:
            raise
        except (ValueError, RecursionError):
            end = position + 1
        else:
            found.append((value, quotes.is_own_claim(position, end)))
        position = text.find("{", end)
    if position >= 0:
        raise Unparseable(f"too many braces to read as JSON in {_shorten(text)}")
    return found


def _custom_reader(rubric: Rubric) -> Reader:
    function = find_object("rubric.parser", rubric.parser)
    if not callable(function):
        raise ConfigError("rubric.parser", rubric.parser, "it is not callable")

    def read(reply: str) -> Reading:
        try:
            result = function(reply)
            value, parts = result if isinstance(result, tuple) else (result, {})
            named = {without_surrogates(str(name)): float(part) for name, part in dict(parts).items()}
            score = _check_number(value, rubric, f"the result of {rubric.parser}")
        except Unparseable:
            raise
        except Exception as error:  # the user's code may raise anything; the reply is then unreadable
            raise Unparseable(f"{rubric.parser}: {type(error).__name__}: {_shorten(str(error))}") from error
        if not all(map(math.isfinite, named.values())):
            raise Unparseable(f"{rubric.parser} returned a part that is not finite")
        return Reading(score, named)

    return read
