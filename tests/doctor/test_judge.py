"""The doctor's check of a judge: one call through the real client, against a real server on loopback."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from freewheel.doctor import judge as judging
from freewheel.doctor.run import list_judges
from freewheel.errors import ConfigError
from freewheel.judge.config import Endpoint, JudgeConfig
from freewheel.judge.testing import JudgeProfile, MockJudge
from freewheel.utils.findings import Finding, State, run_checks

KEY = "sk-of-the-tests-0123456789"


def asked(profile: JudgeProfile, *, model: str = "any", **settings: Any) -> tuple[Finding, int]:
    """What is found, and how many calls it took."""
    with MockJudge(profile).in_thread() as server:
        config = JudgeConfig(endpoint=server.base_url, model=model, cache=False, **settings)
        (found,) = judging.ask(config, *config.endpoints, model_key="--judge-model")
        return found, server.counts().received


def test_a_working_judge_is_ok_after_one_call():
    found, calls = asked(JudgeProfile())
    assert (found.what, found.state, found.remedy, calls) == ("judge", State.OK, "", 1)
    assert "a score of" in found.detail and "any" in found.detail


@pytest.mark.parametrize(
    ("profile", "state", "said", "remedy"),
    [
        ({"api_key": KEY}, State.PROBLEM, "it rejects the key: ", "export OPENAI_API_KEY=YOUR_KEY"),
        ({"model": "judge-7b"}, State.PROBLEM, "there is no such model or path: ", "--judge-model judge-7b"),
        ({"reject_above": 0}, State.WARNING, "it limits requests, for 1 s: ", judging.LATER),
        ({"insufficient_quota": True}, State.PROBLEM, "the account has no credit left: ", ""),
        ({"garbage_share": 1.0}, State.PROBLEM, "not a chat-completions server: ", "curl -v "),
        ({"error_share": 1.0, "error_status": 503}, State.PROBLEM, "a server error: ", ""),
        ({"error_share": 1.0, "error_status": 403}, State.PROBLEM, "the key has no access to it: ", "export "),
        ({"max_prompt_chars": 1}, State.PROBLEM, "it rejects the request: ", ""),
        ({"unparseable_share": 1.0}, State.PROBLEM, "it answers, but not as the rubric integer asks: ", ""),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_each_fault_of_a_judge_has_its_own_message_and_costs_one_call(profile, state, said, remedy):
    found, calls = asked(JudgeProfile(**profile))
    assert found.state is state and said in found.detail, found
    assert found.remedy.startswith(remedy) and calls == 1


def test_a_key_that_is_refused_is_named_by_where_it_came_from_and_never_shown(monkeypatch):
    found, _ = asked(JudgeProfile(api_key=KEY))
    assert "no key was sent: set OPENAI_API_KEY" in found.detail
    monkeypatch.setenv("MY_KEY", "sk-wrong-wrong-wrong")
    found, _ = asked(JudgeProfile(api_key=KEY), api_key_env="MY_KEY")
    assert "sent with the key from" in found.detail and "MY_KEY" in found.detail
    assert "sk-wrong" not in str(found) and found.remedy == "export MY_KEY=YOUR_KEY"
    monkeypatch.setenv("MY_KEY", KEY)
    assert asked(JudgeProfile(api_key=KEY), api_key_env="MY_KEY")[0].state is State.OK


def test_a_judge_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(judging, "CALL_S", 0.3)
    found, _ = asked(JudgeProfile(hang_share=1.0))
    assert found.state is State.PROBLEM and "it did not answer in time: no answer within 0.3 s" in found.detail


def test_an_address_where_nobody_listens_is_a_problem():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        config = JudgeConfig(endpoint=url, model="any", cache=False)
        (found,) = judging.ask(config, *config.endpoints, model_key="--judge-model")
    assert found.state is State.PROBLEM and "there is no answer: " in found.detail
    assert found.remedy == f"curl -v {url}/chat/completions"


def test_each_endpoint_is_asked_whatever_happens_to_another(monkeypatch):
    ask = judging.ask

    def break_once(config: JudgeConfig, endpoint: Endpoint, *, model_key: str) -> list[Finding]:
        if "broken" in endpoint.url:
            raise RuntimeError("odd")
        return ask(config, endpoint, model_key=model_key)

    monkeypatch.setattr(judging, "ask", break_once)
    with MockJudge(JudgeProfile()).in_thread() as well, MockJudge(JudgeProfile(api_key=KEY)).in_thread() as locked:
        endpoints = [{"url": url} for url in ("http://broken.invalid/v1", well.base_url, locked.base_url)]
        config = JudgeConfig(endpoint=endpoints, model="any", cache=False)  # type: ignore[arg-type]
        found = run_checks(list_judges(None, [config]))
    assert [one.state for one in found] == [State.PROBLEM, State.OK, State.PROBLEM]
    assert "http://broken.invalid/v1" in found[0].what


# -- the run's own ----------------------------------------------------------------------------------------------------

SETTINGS = {"api_endpoint": "http://127.0.0.1:1/v1", "model_name": "m"}


@pytest.mark.parametrize(
    ("settings", "key", "states"),
    [
        (None, KEY, []),
        (SETTINGS, "", ["warning"]),
        (SETTINGS, KEY, []),
        ({**SETTINGS, "enable_openai_reward": False}, KEY, ["ok"]),
        ({"peak_ratio": 0.2}, KEY, ["ok"]),  # a key never goes to an endpoint that nobody named
    ],
)
def test_the_judge_of_a_run_needs_an_endpoint_and_a_key(monkeypatch, settings, key, states):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    named, found = judging.of_run(settings)
    assert [one.state for one in found] == states
    assert (named is not None and named.model == "m") == (settings is SETTINGS and bool(key))
    if states == ["warning"]:
        assert found[0].remedy == "export OPENAI_API_KEY=YOUR_KEY"


@pytest.mark.parametrize(
    ("url", "says"),
    [("ftp://host", "--judge = 'ftp://host'"), ("https://host/v1?api_key=secret", "--judge = '<hidden>'")],
)
def test_a_url_that_cannot_be_asked_is_refused_by_the_flags_name(url, says):
    with pytest.raises(ConfigError) as refused:
        judging.at_url(url, "m", None)
    assert says in str(refused.value) and "secret" not in str(refused.value)
