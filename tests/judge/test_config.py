"""A setting that cannot work is refused when the config is made: by its key, with its value and the remedy."""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
from typing import Any

import msgspec
import pytest

from freewheel.judge import ConfigError, Endpoint, JudgeConfig, Price, Secret, load_rubric
from freewheel.judge.config import parse_concurrency

URL = "http://127.0.0.1:8000/v1"
NONE, ANY_OBJECT = None, object()
NUMBERS = [math.nan, math.inf, -math.inf, -1, -0.5, "1", True, [], ANY_OBJECT]
WHOLE = [math.nan, math.inf, -1, 1.5, "1", True, [], ANY_OBJECT]
TEXTS = [1, 1.5, True, [], ANY_OBJECT]
ROADS = [1, True, [], ANY_OBJECT]

BAD: dict[str, list[Any]] = {
    "endpoint": [NONE, 1, "", [], {}, True, ANY_OBJECT, [1], {"url": 1}, {"nonsense": URL},
                 {"url": URL, "weight": "x"}],
    "model": [NONE, 1, "", "  ", True, [], "\ud800"],
    "rubric": [NONE, 1, "no-such-rubric", "missing.toml", [], ANY_OBJECT],
    "api_key": [1, True, ["k"], "tab\tin", "line\nin", "ключ", ANY_OBJECT],
    "api_key_env": [1, "", True, []],
    "concurrency_start": [0, -1, 1.5, True, None, "", "auto"],
    "concurrency": [0, -1, 1.5, True, None, "", "many", "fixed:", "fixed:0", "fixed:-1", "fixed:1.5",
                    "0", "٣", "fixed:fixed:3", []],
    "temperature": NUMBERS,
    "max_tokens": [0, *WHOLE],
    "sampling": [NONE, 1, "x", [], {"top_p": math.nan}, {"a": {"b": [math.inf]}}, {"x": ANY_OBJECT}, {"n": 2},
                 {"messages": []},
                 {"stream": True}, {"model": "m"}, {"temperature": 1}, {"max_tokens": 1}, {1: 2, "x": {2: ANY_OBJECT}}],
    "placement": [NONE, 1, "", "gpu", "Process", []],
    "attempt_timeout_s": [NONE, 0, *NUMBERS],
    "request_deadline_s": [NONE, 0, *NUMBERS],
    "batch_deadline_s": [0, *NUMBERS],
    "max_attempts": [NONE, 0, *WHOLE],
    "reasks": [NONE, *WHOLE],
    "requests_per_minute": [0, *NUMBERS],
    "tokens_per_minute": [0, *NUMBERS],
    "prices": [NONE, 1, "x", [], {"m": 1}, {"m": {}}, {"m": {"input": 1}}, {"m": {"input": math.nan, "output": 1}},
               {"m": {"input": -1, "output": 1}}, {"m": {"input": "1", "output": 1}},
               {"m": {"input": 1, "output": 1, "x": 1}}],
    "max_cost": [0, 1.0, *NUMBERS],
    "cache": [NONE, 0, 1, "yes", "false", []],
    "cache_dir": [*ROADS, ""],
    "cache_max_bytes": [NONE, 0, 1, *WHOLE],
    "cache_ttl_s": [0, *NUMBERS],
    "memory_cache_bytes": [NONE, *WHOLE],
    "ca_file": [*ROADS, ""],
}  # fmt: skip
BAD_ENDPOINT: dict[str, list[Any]] = {
    "url": [NONE, 1, "", "\ud800"],
    "weight": [NONE, *NUMBERS],
    "model": ["", " ", *TEXTS],
    "api_key": [1, "line\nin"],
    "api_key_env": ["", *TEXTS],
    "api_key_header": [NONE, "", "with space", "line\r\nX: y", *TEXTS],
    "requests_per_minute": [0, *NUMBERS],
    "tokens_per_minute": [0, *NUMBERS],
}


TWO = [Endpoint(url="http://a"), Endpoint(url="http://b", model="other")]


def config(**settings: Any) -> JudgeConfig:
    return JudgeConfig(**{"endpoint": URL, "model": "m", **settings})


def test_every_setting_has_bad_values_here() -> None:
    assert set(BAD) == set(JudgeConfig.__struct_fields__)
    assert set(BAD_ENDPOINT) == set(Endpoint.__struct_fields__)


@pytest.mark.parametrize("key", BAD)
def test_a_setting_that_cannot_work_is_refused_by_its_name(key: str) -> None:
    for value in BAD[key]:
        given = {"endpoint": URL, "model": "m", key: value}
        for make in (lambda given=given: JudgeConfig(**given), lambda given=given: JudgeConfig.from_dict(given)):
            with pytest.raises(ConfigError, match=f"{key}.*: ."):
                make()


@pytest.mark.parametrize("key", BAD_ENDPOINT)
def test_an_endpoints_setting_that_cannot_work_is_refused_by_its_name(key: str) -> None:
    for value in BAD_ENDPOINT[key]:
        with pytest.raises(ConfigError, match="endpoint" if key == "url" else key):
            Endpoint(**{"url": URL, key: value})


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        *((url, "scheme must be http or https") for url in ("ftp://host/v1", "host:8000/v1", "127.0.0.1:8000", "")),
        *((url, "names no host") for url in ("http:///v1", "https://", "http://two hosts/v1")),
        *((url, "not a URL") for url in ("http://host:port/v1", "http://host:99999/v1", "http://[::1/v1")),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        config(endpoint=url)
    assert caught.value.key == "endpoint"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://h/", "http://h/v1/chat/completions"),
        (" http://h:8000/v1/ ", "http://h:8000/v1/chat/completions"),
        ("https://H.Example/V1/", "https://h.example/V1/chat/completions"),
        ("https://g.example/v1beta/openai/", "https://g.example/v1beta/openai/chat/completions"),
        (
            "https://a.example/openai/deployments/X?api-version=2024-10-21",
            "https://a.example/openai/deployments/X/chat/completions?api-version=2024-10-21",
        ),
        ("http://h?key=1", "http://h/v1/chat/completions?key=1"),
        ("https://h/deep/chat/completions", "https://h/deep/chat/completions"),
        ("https://h/d/chat/completions/?api-version=2", "https://h/d/chat/completions?api-version=2"),
        ("https://h/v1#part", "https://h/v1/chat/completions"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1/chat/completions"),
    ],
)
def test_a_base_url_is_completed_as_openai_clients_do(given: str, asked: str) -> None:
    assert config(endpoint=given).endpoints[0].url == asked


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"concurency": 3}, r"concurency = 3: unknown key; known are .*concurrency"),
        ({"endpoint": [{"url": URL, "nonsense": 1}]}, r"endpoint.nonsense = 1: unknown key"),
        ({"endpoint": [{"weight": 1}]}, r"endpoint.url = None: it is missing"),
        ({"model": "  "}, "model"),
        ({"endpoint": [Endpoint(url=URL), Endpoint(url=URL + "/")]}, "twice"),
        ({"endpoint": Endpoint(url=URL, weight=0)}, "at least one endpoint needs a weight"),
        ({"endpoint": TWO, "max_cost": 1}, "prices for m, other"),
        ({"endpoint": TWO, "max_cost": 1, "prices": {"m": Price(input=1, output=2)}}, "prices for other"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        JudgeConfig.from_dict({"endpoint": URL, "model": "m", **given})


def test_a_price_for_every_model_is_enough_for_a_spend_ceiling() -> None:
    config(endpoint=TWO, max_cost=1, prices={"m": {"input": 1, "output": 2}, "other": {"input": 0, "output": 0}})


@pytest.mark.parametrize(
    ("value", "meaning"), [("auto", (None, None)), (7, (7, None)), ("7", (7, None)), ("fixed:7", (None, 7))]
)
def test_concurrency_is_auto_a_bound_or_fixed(value: int | str, meaning: tuple[int | None, int | None]) -> None:
    assert parse_concurrency(value) == meaning


def test_a_key_is_taken_from_the_nearest_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    monkeypatch.setenv("OTHER", "from-other")
    plain, own = Endpoint(url="http://a"), Endpoint(url="http://b", api_key="own")
    named = Endpoint(url="http://c", api_key_env="OTHER")

    def keys(made: JudgeConfig) -> list[str]:
        return [key.reveal() if (key := made.key_for(endpoint)) else "" for endpoint in made.endpoints]

    assert keys(config(endpoint=[plain, own, named])) == ["from-env", "own", "from-other"]
    assert keys(config(endpoint=[plain, own, named], api_key="given")) == ["given", "own", "from-other"]
    monkeypatch.delenv("OPENAI_API_KEY")
    assert keys(config(endpoint=[plain], api_key="  ")) == [""]
    assert keys(config(endpoint=[{"url": "http://a", "api_key": "in-dict"}])) == ["in-dict"]


def test_a_key_in_the_environment_that_no_header_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-one\nsk-two")
    made = config()
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
        made.key_for(made.endpoints[0])
    assert "sk-" not in str(caught.value)


def test_plain_values_go_out_and_come_back_without_the_key() -> None:
    made = config(
        endpoint=[Endpoint(url="http://a", api_key="sk-two"), Endpoint(url="http://b", weight=0)],
        api_key="sk-one",
        prices={"m": Price(input=1, output=2)},
        sampling={"top_p": 0.5},
    )
    plain = made.to_dict()
    assert "sk-one" not in str(plain) and "sk-two" not in str(plain)
    assert plain["api_key"] == "<key from the api_key argument>"
    with pytest.raises(ConfigError, match="api_key"):
        JudgeConfig.from_dict(plain)  # the placeholder of a key is no key
    plain["api_key"] = plain["endpoint"][0]["api_key"] = None
    back = JudgeConfig.from_dict(plain)
    assert back.endpoints[1] == made.endpoints[1] and back.prices == made.prices and back.rubric == made.rubric
    msgspec.json.encode(plain)


def test_a_config_is_copied_with_its_key_and_pickled_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(api_key="sk-one", rubric=load_rubric("yes_no"), endpoint=[Endpoint(url="http://a", weight=2)])
    for twin in (copy.copy(made), copy.deepcopy(made), msgspec.structs.replace(made, model="m2")):
        assert isinstance(twin.api_key, Secret) and twin.api_key.reveal() == "sk-one"
    pickled = pickle.dumps(made)
    assert b"sk-one" not in pickled
    back = pickle.loads(pickled)
    assert back.rubric == made.rubric and back.endpoints == made.endpoints
    assert back.key_for(back.endpoints[0]) is None
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    key = back.key_for(back.endpoints[0])
    assert key is not None and key.reveal() == "from-env"


# -- the key ---------------------------------------------------------------------------------------------------------

KEY = "sk-distinctive-0123456789"


def test_printing_and_serialising_never_show_the_key(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret(KEY)
    logging.getLogger("freewheel.judge").warning("key %s %r", secret, secret)
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r:>40}", "%s" % secret, repr([secret]), caplog.text]  # noqa: UP031
    shown += [pickle.dumps(secret, protocol).decode("latin-1") for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    assert not any(KEY in text for text in shown)
    assert "the api_key argument" in repr(secret)
    for encode in (json.dumps, msgspec.json.encode, msgspec.msgpack.encode, list, format_wide):
        with pytest.raises(TypeError):
            encode(secret)
    assert not hasattr(secret, "__dict__")


def format_wide(secret: Secret) -> str:
    return f"{secret:>40}"


def test_a_pickled_key_is_read_again_from_the_variable_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", f"  {KEY}\n")
    secret = Secret.from_env("SOME_KEY")
    assert secret is not None and secret.reveal() == KEY and "SOME_KEY" in repr(secret)
    pickled = pickle.dumps(secret)
    assert pickle.loads(pickled).reveal() == KEY
    monkeypatch.setenv("SOME_KEY", "  ")
    assert Secret.from_env("SOME_KEY") is None
    hollow = pickle.loads(pickled)
    assert not hollow
    with pytest.raises(ValueError, match="SOME_KEY was left out when its config was pickled"):
        hollow.reveal()
    assert pickle.loads(pickle.dumps(Secret("EMPTY"))).reveal() == "EMPTY", "the placeholder is no secret"


def test_a_key_in_a_servers_reply_is_redacted_and_keys_are_compared_by_text() -> None:
    assert Secret(KEY).redact(f"bad key {KEY}!") == "bad key [key]!"
    assert Secret(None).redact("text") == "text"
    assert Secret(KEY) == Secret(KEY, source="elsewhere") != KEY
