"""One snapshot in three shapes that agree: values, a line, Prometheus text."""

from __future__ import annotations

import re

import msgspec

from freewheel.judge import EndpointStats, JudgeStats

SAMPLE = re.compile(
    r'^freewheel_judge_[a-z_]+(\{[a-z_]+="(?:[^"\\\n]|\\.)*"(,[a-z_]+="(?:[^"\\\n]|\\.)*")*\})? [0-9.e+-]+$'
)


def stats() -> JudgeStats:
    first = EndpointStats(
        url='http://a/"q"\\', model="m\n2", sent=12, answered=9, throttled=2, faults={"timeout": 1}, in_flight=3,
        limit=32, cost=0.5, prompt_tokens=1_234_567_890, latency_p50_s=0.25,
    )  # fmt: skip
    second = EndpointStats(url="http://b", model="m", sent=1, limit=8, halted="401", breaker="closed")
    return JudgeStats(
        submitted=20, scored=15, skipped=1, failed={"auth": 2, "deadline": 1}, cache_hits_memory=3, cache_hits_disk=4,
        shared=2, retries=5, queued=6, endpoints=[first, second],
    )  # fmt: skip


def test_totals_are_over_all_endpoints_and_the_line_shows_them() -> None:
    got = stats()
    line = got.line()
    assert "15 scored, 3 failed, 1 skipped of 20" in line and "13 calls" in line and "\n" not in line
    assert (got.sent, got.throttled, got.in_flight, got.limit, got.cost, got.cache_hits) == (13, 2, 3, 40, 0.5, 7)
    got.endpoints[1].faults = {"timeout": 2, "broken": 4}
    assert got.faults == {"timeout": 3, "broken": 4}


def test_prometheus_text_is_well_formed_and_figures_are_unrounded() -> None:
    text = stats().prometheus()
    assert text.endswith("\n")
    families = set()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split(" ")
            assert kind in ("counter", "gauge") and name not in families
            assert name.endswith("_total") == (kind == "counter")
            families.add(name)
        else:
            assert SAMPLE.match(line), line
            assert re.split(r"[{ ]", line)[0] in families, "a sample follows its type"
    assert 'failed_total{reason="auth"} 2' in text
    assert 'cache_hits_total{tier="disk"} 4' in text
    assert 'prompt_tokens_total{endpoint="http://a/\\"q\\"\\\\",model="m\\n2"} 1234567890' in text
    assert 'endpoint_up{endpoint="http://b",model="m"} 0' in text
    plain = stats().to_dict()
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(plain)), JudgeStats) == stats()
