"""Parse a judge's reply into a score. The engine makes one reader per rubric and calls it once per reply.

Readers accept the forms that judges really send. They refuse an ambiguous or out-of-range reply with `Unparseable` and
never guess. `scores.py` finds numbers in prose; this module reads the other forms: yes or no, JSON, custom functions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from freewheel.errors import ConfigError
from freewheel.judge.request import without_surrogates
from freewheel.judge.rubric import PARSERS, Rubric, number_text
from freewheel.judge.scores import Quotes, ScoreFinder, Unparseable, make_plain, shorten, split_thinking
from freewheel.utils.registry import find_object

__all__ = ["Reading", "Unparseable", "make_reader"]

_FAST_INTEGERS = 1000
"""As many integers of the scale are looked up in a table."""
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
"""The readings of a text, in order, each with whether the judge claims it itself."""


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
    find = ScoreFinder(low=rubric.low, high=rubric.high, integer=not decimals, place=rubric.place)
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
    """The reading of `reply` at the rubric's `place`."""
    answer, unopened = split_thinking(reply)
    found = find(answer)
    if not found:
        raise Unparseable(f"no verdict in the form that the rubric asks for in {shorten(reply)}")
    if place == "only":
        if any(reading != found[0][0] for reading, _ in found):
            raise Unparseable(f"verdicts that contradict each other in {shorten(reply)}")
        if not any(own for _, own in found):
            raise Unparseable(f"the only verdict is quoted or reported in {shorten(reply)}")
        if unopened and any(reading != found[0][0] for reading, _ in find(unopened)):
            raise Unparseable(f"another verdict before a closing think tag in {shorten(reply)}")
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
        text = make_plain(text)
        quotes = Quotes(text)
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
    number_in = ScoreFinder(low=rubric.low, high=rubric.high, integer=False, place="only")

    def find(text: str) -> _Claims:
        claims = []
        for fields, own in _objects(text):
            missing = [name for name in weights if name not in fields]
            if len(missing) == len(weights):
                continue
            if missing:
                raise Unparseable(f"no score for {missing[0]!r} in {shorten(text)}")
            parts = {}
            for name in weights:
                value = fields[name]
                parts[name] = number_in(value) if isinstance(value, str) else _checked(value, rubric, repr(name))
            mean = math.fsum(weights[name] * score for name, score in parts.items()) / total
            reading = Reading(min(max(mean, rubric.low), rubric.high), parts if rubric.criteria else {})
            claims.append((reading, own))
        return claims

    return find


def _checked(value: object, rubric: Rubric, name: str) -> float:
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
    """The outermost JSON objects of a text, in order, each with whether the judge claims it itself."""
    found: list[tuple[dict[str, Any], bool]] = []
    quotes = Quotes(text)
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
        raise Unparseable(f"too many braces to read as JSON in {shorten(text)}")
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
            score = _checked(value, rubric, f"the result of {rubric.parser}")
        except Unparseable:
            raise
        except Exception as error:  # the user's code may raise anything, and then could not read this reply
            raise Unparseable(f"{rubric.parser}: {type(error).__name__}: {shorten(str(error))}") from error
        if not all(map(math.isfinite, named.values())):
            raise Unparseable(f"{rubric.parser} returned a part that is not finite")
        return Reading(score, named)

    return read
