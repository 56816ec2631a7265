"""Labels: which words before a number say that it is a score, and which that it is something else.

Called by `ScoreFinder`. A judge that restates an answer and forgets the score gives none, so only a verdict's own words
claim one; the others may contradict a score, and never make one.
"""

from __future__ import annotations

import re

LEAD_CHARS = 80
"""How far back from a label its sentence is looked at."""

_STRONG = (
    r"scor(?:e|ing)|ratings?|grade|评分|得分|分数|打分|总分|评级|評分|分數|スコア|評価|得点|点数|採点|점수|평점|평가|"
    r"punktzahl|bewertung|wertung|calificaci[oó]n|puntuaci[oó]n|puntaje|pontua[cç][aã]o|punteggio|valutazione|"
    r"оценка|балл|рейтинг|الدرجة|التقييم|स्कोर|अंक|puan|điểm|skor"
)
"""Claim a score with a colon or without one."""
_VERDICT = r"voto|marks?|punkte|overall|final|verdict|evaluation|assessment|judge?ment|decision|評定|評点"
"""Claim a score only with a colon after them and nothing but the number behind it."""
_GRADED = r"notes?|nota|points?|total"
"""Claim a score only if it is written over the top of the scale: "Note: 7" is a remark, "Note : 7/10" is a grade."""
_RESTATED = r"answers?|results?|quality|итог|结果|结论|النتيجة"
"""Name what was judged, or a part of the verdict. They may contradict a score, and never claim one."""
LABEL = re.compile(
    rf"(?<![A-Za-z/\\])(?:(?P<strong>{_STRONG})|(?P<verdict>{_VERDICT})|(?P<graded>{_GRADED})|(?P<restated>{_RESTATED}))"
    r"(?![a-zA-Z])",
    re.IGNORECASE,
)
_NOT_THE_VERDICT = re.compile(
    r"\b(?:confidence|certainty|max(?:imum|imal)?|highest|possible|min(?:imum|imal)?|lowest|passing|reference|expected|"
    r"example)[ \t_-]{1,2}$",
    re.IGNORECASE,
)
"""Before a label: "Confidence score: 9" and "Maximum score: 10" are not what the response got."""
_LONE_VERDICT = re.compile(
    rf"(?<![A-Za-z/\\])(?:{_STRONG}|scores|verdict|(?:note|nota|voto) (?:finale?|globale?|total|totale))(?![a-zA-Z])"
    r"(?!.*\b(?:difference|gap|level|range|change|count|threshold|confidence)\b)",
    re.IGNORECASE,
)
"""What a label of a few words must hold to claim a score ("Bewertung der Antwort: 7")."""
_RESTATED_LEAD = re.compile(
    rf"(?<![A-Za-z])(?:{_RESTATED}|solutions?|values?|probability|fraction|ответ|答案|antwort|réponse|respuesta)"
    r"(?: (?:is|was|are|equals?|should be|would be|must be|ist|est|es)|为|是)?[\s:=,_\"'(\[{|-]{0,8}$",
    re.IGNORECASE,
)
"""Before a `7/10`, a `\\boxed{7}` or a line with a 7 alone: it is an answer."""
_SCORE_OF = re.compile(
    rf"(?<![A-Za-z])(?:{_STRONG}) (?:of|for|to)(?: (?:the|this|that|its|final|model's|student's)){{0,3}} $|"
    r"(?:scoring|grading|评分|得分|打分|評分)[ 的]?$",
    re.IGNORECASE,
)
"""Before a label that claims nothing by itself: "Score for the answer: 7" and "评分结果：7" do."""
_HEADING_WORDS = 4
"""A line of more words without a colon is prose, and no heading of what stands under it."""
_LEADS_ON = re.compile(r"(?:[:=]|\b(?:is|was|are|equals?|be|ist|est|es)|为|是)[\s\"']{0,4}$", re.IGNORECASE)
_EQUALS = re.compile(r"=[\s(\[{]{0,4}$")
SHORT_LABEL = re.compile(
    r"(?:^|\n)[ \t#>|;_\"'(\[{•-]{0,8}[^\W\d_][^\s:=]{0,24}(?:[ \t]{1,2}[^\s:=]{1,24}){0,2}[ \t]{0,2}[:=][ \t\"']{0,4}$"
)
VERDICT_WORD = re.compile(r"overall|final|result|verdict|evaluation|assessment|judge?ment|decision", re.IGNORECASE)
"""With a colon and prose behind the number ("Result: 3 of 4 tests pass") these may still contradict a score."""


def claims_a_score(text: str, label: re.Match[str], *, over_top: bool, ends: bool) -> bool:
    """Whether a number with this label can be the score, and not what was judged or a part of the verdict.

    `over_top`: it is written as 7/10. `ends`: nothing that belongs to it comes after it.
    """
    lead = text[max(0, label.start() - LEAD_CHARS) : label.start()]
    if label["restated"]:
        return _SCORE_OF.search(lead) is not None
    if label["graded"] and not (over_top and ends):
        return False
    return not _NOT_THE_VERDICT.search(lead)


def is_lone_verdict(label: str) -> bool:
    """Whether a label of a few words claims a score."""
    verdict = _LONE_VERDICT.search(label)
    return verdict is not None and not _NOT_THE_VERDICT.search(label[: verdict.start()])


def restates(text: str, begin: int) -> bool:
    """Whether what leads up to `begin` says that a number there is an answer ("so x = 7/10") and not a score."""
    before = text[max(0, begin - LEAD_CHARS) : begin]
    if _RESTATED_LEAD.search(before):
        return True
    label = SHORT_LABEL.search(before)
    if label is None and not _EQUALS.search(before):
        return False
    named = label[0] if label else before.rpartition("\n")[2]
    return not any(found["strong"] or found["verdict"] or found["graded"] for found in LABEL.finditer(named))


def stands_under_another_label(text: str, begin: int) -> bool:
    """Whether the line above says that a number alone on its line is an answer ("## Answer") and not a score."""
    above = text[max(0, begin - LEAD_CHARS) : begin].rstrip(" \t\n#>|_\"'([{•-")
    line = above.rpartition("\n")[2]
    if not line.strip() or not (_LEADS_ON.search(line) or len(line.split()) <= _HEADING_WORDS):
        return False
    return restates(above, len(above))
