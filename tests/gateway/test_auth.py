"""The token: who is let in, what is refused at the start, and that it shows nowhere."""

from __future__ import annotations

import base64

import pytest

from freewheel.gateway.limits import Doorkeeper
from freewheel.gateway.problem import Problem
from freewheel.judge import ConfigError, Secret

TOKEN = "a-token-of-enough-characters"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "judge.example"])
def test_other_machines_are_not_let_in_without_a_token(host: str):
    with pytest.raises(ConfigError, match=r"set FREEWHEEL_GATEWAY_TOKEN, or use 127\.0\.0\.1"):
        Doorkeeper(host)
    Doorkeeper(host, Secret(TOKEN))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_no_token(host: str):
    Doorkeeper(host).check({})


def test_a_token_that_could_be_guessed_is_refused_without_being_shown():
    with pytest.raises(ConfigError, match="at least 16") as caught:
        Doorkeeper("0.0.0.0", Secret("sesame"))
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer  {TOKEN}", basic("", TOKEN), basic("any", TOKEN)])
def test_the_token_comes_as_a_bearer_or_as_a_password(header: str):
    Doorkeeper("0.0.0.0", Secret(TOKEN)).check({"Authorization": header})


@pytest.mark.parametrize(
    "header",
    [
        "",
        TOKEN,
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \udcff",
        "Basic %",
        basic(TOKEN, ""),
    ],
)
def test_anything_else_is_a_401_that_does_not_show_the_token(header: str):
    with pytest.raises(Problem) as caught:
        Doorkeeper("127.0.0.1", Secret(TOKEN)).check({"Authorization": header})
    assert caught.value.status == 401
    assert TOKEN not in caught.value.body().decode()


def test_a_web_page_may_not_spend_through_a_gateway_without_a_token():
    with pytest.raises(Problem) as caught:
        Doorkeeper("127.0.0.1").check({"Origin": "https://evil.example"})
    assert caught.value.status == 403
