"""The key stays in memory: each way in which a value usually gets out is tried on it."""

from __future__ import annotations

import copy
import json
import logging
import pickle

import msgspec
import pytest

from freewheel.judge import Secret

KEY = "sk-distinctive-0123456789"


def test_no_way_of_printing_shows_the_key(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret(KEY)
    logging.getLogger("freewheel.judge").warning("key %s %r", secret, secret)
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r:>40}", f"{secret:>40}", "%s" % secret, caplog.text]  # noqa: UP031
    shown.append(repr({"k": [secret]}))
    assert not any(KEY in text for text in shown)
    assert "the api_key argument" in repr(secret)


def test_no_way_of_serialising_shows_the_key() -> None:
    secret = Secret(KEY)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert KEY.encode() not in pickle.dumps(secret, protocol)
    for encode in (json.dumps, msgspec.json.encode, msgspec.msgpack.encode):
        with pytest.raises(TypeError):
            encode(secret)  # type: ignore[operator]
    with pytest.raises(TypeError):
        list(secret)  # type: ignore[call-overload]
    assert not hasattr(secret, "__dict__")


def test_a_copy_within_the_process_keeps_the_key() -> None:
    assert copy.deepcopy(Secret(KEY)).reveal() == copy.copy(Secret(KEY)).reveal() == KEY


def test_a_pickled_key_is_read_again_from_the_variable_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", f"  {KEY}\n")
    secret = Secret.from_env("SOME_KEY")
    assert secret is not None and secret.reveal() == KEY and "SOME_KEY" in repr(secret)
    pickled = pickle.dumps(secret)
    assert pickle.loads(pickled).reveal() == KEY
    monkeypatch.delenv("SOME_KEY")
    hollow = pickle.loads(pickled)
    assert not hollow
    with pytest.raises(ValueError, match="SOME_KEY was left out when its config was pickled"):
        hollow.reveal()


def test_an_unset_or_blank_variable_holds_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Secret.from_env("NOT_SET_ANYWHERE") is None
    monkeypatch.setenv("BLANK", "  ")
    assert Secret.from_env("BLANK") is None


def test_what_a_server_echoes_is_redacted() -> None:
    assert Secret(KEY).redact(f"bad key {KEY}!") == "bad key [key]!"
    assert Secret(None).redact("text") == "text"


def test_two_keys_are_equal_by_text_and_differ_from_text() -> None:
    assert Secret(KEY) == Secret(KEY, source="elsewhere") and hash(Secret(KEY)) == hash(Secret(KEY))
    assert Secret(KEY) != KEY and Secret(KEY) != Secret("other")
