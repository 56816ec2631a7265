"""The judge's settings: the only place where a default stands. `docs/configuration.md` is generated from here.

A setting that cannot work is refused when the config is made, with the key, the value and the remedy.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit, urlunsplit

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.limiter import START
from freewheel.judge.rubric import Rubric, load_rubric
from freewheel.utils.checks import check_integer, check_number, check_text, shown_value


class Secret:
    """An API key and the name of its source. `reveal()` is the only way to the text.

    A pickle may come to lie on a disk, so it carries the source and not the key: where the source is an
    environment variable the other process reads it there; a key given as text must be given there again.
    """

    __slots__ = ("_text", "source")

    def __init__(self, text: str | None, *, source: str = "the api_key argument") -> None:
        self._text = text
        self.source = source

    @classmethod
    def from_env(cls, name: str) -> Secret | None:
        """The key in environment variable `name`, or None where it is unset or empty."""
        text = os.environ.get(name, "").strip()
        return cls(text, source=_env_source(name)) if text else None

    def reveal(self) -> str:
        if self._text is None:
            raise ValueError(
                f"the API key from {self.source} was left out when its config was pickled; "
                "set it in the environment of this process (api_key_env), or give api_key here"
            )
        return self._text

    def redact(self, text: str) -> str:
        """`text` without the key in it, for what servers echo back in their errors."""
        return text.replace(self._text, "[key]") if self._text else text

    def __bool__(self) -> bool:
        """False where pickling left the key out: it is then looked for elsewhere."""
        return self._text is not None

    def __repr__(self) -> str:
        return f"<key from {self.source}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (self.source,))

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __iter__(self) -> NoReturn:
        raise TypeError("a Secret is not text; call reveal()")


def _env_source(name: str) -> str:
    return f"environment variable {name}"


def _restore(source: str) -> Secret:
    prefix = _env_source("")
    if source.startswith(prefix):
        return Secret.from_env(source.removeprefix(prefix)) or Secret(None, source=source)
    return Secret(None, source=source)


COMPLETIONS_PATH = "/chat/completions"
Placement = Literal["process", "thread"]

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model costs, in your currency per million tokens."""

    input: float
    """Per million prompt tokens."""
    output: float
    """Per million completion tokens."""

    def __post_init__(self) -> None:
        check_number("prices.input", self.input, low=0)
        check_number("prices.output", self.output, low=0)

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        return (prompt_tokens * self.input + completion_tokens * self.output) / 1e6


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several places that serve the judge."""

    url: str
    """A base URL as the OpenAI clients take it, or a chat-completions URL. `/chat/completions` is appended to a path
    that does not end so, and `/v1` stands for no path."""
    weight: float = 1.0
    """Its share of the requests while all have room. 0 = a standby, used while no other endpoint works."""
    model: str | None = None
    """The model's name there, where it differs from the judge's `model`."""
    api_key: Secret | None = None
    """The key for this endpoint; by default the judge's."""
    api_key_env: str | None = None
    """The environment variable with this endpoint's key."""
    api_key_header: str = "Authorization"
    """The header for the key: `Authorization` sends `Bearer KEY`, any other the bare key (`api-key` on Azure)."""
    requests_per_minute: float | None = None
    """A budget to stay under. What the endpoint's `x-ratelimit-*` headers say is honoured without it."""
    tokens_per_minute: float | None = None
    """A budget to stay under, prompt and completion together."""

    def __post_init__(self) -> None:
        _set(self, "url", _normal_url("endpoint", self.url))
        _set(self, "api_key", _secret("endpoint.api_key", self.api_key))
        check_number("endpoint.weight", self.weight, low=0)
        check_text("endpoint.model", self.model, "give the model's name as this endpoint knows it", optional=True)
        check_text("endpoint.api_key_env", self.api_key_env, "give an environment variable's name", optional=True)
        check_text("endpoint.api_key_header", self.api_key_header, "give a header's name, such as api-key")
        if not _HEADER_NAME.fullmatch(self.api_key_header):
            raise ConfigError("endpoint.api_key_header", self.api_key_header, "no HTTP header can have this name")
        for key in ("requests_per_minute", "tokens_per_minute"):
            check_number(f"endpoint.{key}", getattr(self, key), above=0, optional=True)


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a `Judge` needs to know."""

    endpoint: str | Endpoint | tuple[Endpoint, ...]
    """Where the judge is: a URL, or several `Endpoint`s with weights. The first one names the judge in the cache."""
    model: str
    """The model's name as the endpoint knows it."""
    rubric: str | Rubric = "integer"
    """A built-in rubric's name, a `.json` or `.toml` file, or a `Rubric`."""
    api_key: Secret | None = None
    """The key; text is taken as well. It stays in memory: it is not printed, logged, cached or pickled."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """The environment variable that is read for the key where none is given. None, or none there: none is sent."""
    concurrency: int | str = "auto"
    """`auto` finds the judge's own limit; an integer is an upper bound for that; `fixed:N` holds N."""
    concurrency_start: int = START
    """Calls in flight at first, where nothing is known of the judge yet. The limit adapts from there."""
    temperature: float | None = 0.0
    """None leaves it out of the request."""
    max_tokens: int | None = None
    """Longest reply. None leaves it out of the request. A reply that was cut off is not read as a score."""
    sampling: dict[str, Any] = {}
    """Further fields of the request's body, as the endpoint takes them (`top_p`, `reasoning_effort`, `seed`, …)."""
    placement: Placement = "process"
    """`process`: a child process with an event loop of its own. `thread`: a background thread of this process."""
    attempt_timeout_s: float = 60.0
    """Longest time for one call; three times the 99th percentile of the latencies seen, where that is shorter."""
    request_deadline_s: float = 120.0
    """Longest time from a request's first call to its verdict, waiting between retries included."""
    batch_deadline_s: float | None = 300.0
    """Longest time for a batch; what is missing then is `Failed("deadline")`. None: no limit. See also `submit`."""
    max_attempts: int = 8
    """Calls that may fail (5xx, broken connection, time-out) before a request is given up. 429s do not count."""
    reasks: int = 1
    """How often a reply that does not parse is asked for again."""
    requests_per_minute: float | None = None
    """A budget for each endpoint that names none of its own."""
    tokens_per_minute: float | None = None
    """Likewise, prompt and completion tokens together."""
    prices: dict[str, Price] = {}
    """Model name → price. A model without one is counted in tokens alone."""
    max_cost: float | None = None
    """Spend ceiling. Calls that would pass it are not made: `Failed("budget")`."""
    cache: bool = True
    """Keep replies. Off: only identical requests of one batch share a call."""
    cache_dir: str | None = None
    """Where the cache file lies. None: `$FREEWHEEL_CACHE_DIR`, `$XDG_CACHE_HOME/freewheel` or `~/.cache/freewheel`."""
    cache_max_bytes: int = 1 << 30
    """Bound of the cache file's content; the least recently used go first."""
    cache_ttl_s: float | None = None
    """Age at which a cached reply is asked for again. None: never."""
    memory_cache_bytes: int = 32 << 20
    """Bound of the replies kept in memory."""
    ca_file: str | None = None
    """A CA bundle to trust instead of the system's."""

    def __post_init__(self) -> None:
        _set(self, "endpoint", _endpoints(self.endpoint))
        check_text("model", self.model, "give the model's name as the endpoint knows it")
        _set(self, "rubric", load_rubric(self.rubric))
        _set(self, "api_key", _secret("api_key", self.api_key))
        check_text("api_key_env", self.api_key_env, "give an environment variable's name", optional=True)
        parse_concurrency(self.concurrency)
        if self.placement not in ("process", "thread"):
            raise ConfigError("placement", self.placement, "choose 'process' or 'thread'")
        check_number("temperature", self.temperature, low=0, optional=True)
        check_integer("max_tokens", self.max_tokens, low=1, optional=True)
        for key in ("attempt_timeout_s", "request_deadline_s"):
            check_number(key, getattr(self, key), above=0)
        for key in ("batch_deadline_s", "requests_per_minute", "tokens_per_minute", "max_cost", "cache_ttl_s"):
            check_number(key, getattr(self, key), above=0, optional=True)
        check_integer("max_attempts", self.max_attempts, low=1)
        check_integer("concurrency_start", self.concurrency_start, low=1)
        check_integer("reasks", self.reasks, low=0)
        check_integer("cache_max_bytes", self.cache_max_bytes, low=1 << 20)
        check_integer("memory_cache_bytes", self.memory_cache_bytes, low=0)
        if not isinstance(self.cache, bool):
            raise ConfigError("cache", self.cache, "give true or false")
        check_text("cache_dir", self.cache_dir, "give a folder's path", optional=True)
        check_text("ca_file", self.ca_file, "give the path of a CA bundle", optional=True)
        self._check_sampling()
        self._check_prices()

    def _check_sampling(self) -> None:
        if not isinstance(self.sampling, Mapping):
            raise ConfigError("sampling", self.sampling, "give a mapping of field names to values")
        for key in ("messages", "model", "stream", "n", "temperature", "max_tokens"):
            if key in self.sampling:
                raise ConfigError(f"sampling.{key}", self.sampling[key], f"leave {key} out; freewheel sets it itself")
        try:
            text = msgspec.json.encode(self.sampling)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError("sampling", self.sampling, f"it must be plain JSON: {error}") from None
        if _has_nonfinite(self.sampling):
            raise ConfigError("sampling", text.decode(), "a number in it is NaN or infinite; JSON cannot carry that")

    def _check_prices(self) -> None:
        if not isinstance(self.prices, Mapping):
            raise ConfigError("prices", self.prices, "give {model: {input: …, output: …}}")
        _set(self, "prices", {model: _price(model, price) for model, price in self.prices.items()})
        if self.max_cost is not None:
            missing = sorted({e.model or self.model for e in self.endpoints} - set(self.prices))
            if missing:
                raise ConfigError("max_cost", self.max_cost, f"add prices for {', '.join(missing)}, or drop max_cost")

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return self.endpoint  # type: ignore[return-value]  # __post_init__ made it a tuple

    @property
    def loaded_rubric(self) -> Rubric:
        return self.rubric  # type: ignore[return-value]  # __post_init__ loaded it

    def key_for(self, endpoint: Endpoint) -> Secret | None:
        """The endpoint's own key, else the judge's; given in the config before the environment."""
        return endpoint.api_key or _env_secret(endpoint.api_key_env) or self.api_key or _env_secret(self.api_key_env)

    def to_dict(self) -> dict[str, Any]:
        """The whole config as plain values, for logs and dumps. A key shows as where it came from."""
        plain: dict[str, Any] = msgspec.to_builtins(self, enc_hook=repr)
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> JudgeConfig:
        """From plain values (YAML, TOML, JSON). Unknown keys are errors."""
        unknown = sorted(set(values) - set(cls.__struct_fields__))
        if unknown:
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(
                unknown[0], shown_value(unknown[0], values[unknown[0]]), f"unknown key; known are {known}"
            )
        missing = [key for key in ("endpoint", "model") if key not in values]
        if missing:
            raise ConfigError(missing[0], None, "it is missing, and there is no default for it")
        return cls(**values)


def parse_concurrency(value: int | str) -> tuple[int | None, int | None]:
    """(upper bound, fixed value); both None for `auto`."""
    remedy = "use 'auto', a whole number of at least 1 (an upper bound), or 'fixed:N'"
    if isinstance(value, str):
        if value == "auto":
            return None, None
        number = value.removeprefix("fixed:")
        if not number.isascii() or not number.isdigit() or int(number) < 1:
            raise ConfigError("concurrency", value, remedy)
        return (None, int(number)) if value.startswith("fixed:") else (int(number), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("concurrency", value, remedy)
    return value, None


def _endpoints(value: Any) -> tuple[Endpoint, ...]:
    several = value if isinstance(value, list | tuple) else (value,)
    endpoints = []
    for one in several:
        if isinstance(one, Mapping):
            one = _endpoint(one)
        endpoints.append(Endpoint(url=one) if isinstance(one, str) else one)
    if not endpoints or not all(isinstance(one, Endpoint) for one in endpoints):
        raise ConfigError("endpoint", value, "give a URL such as http://127.0.0.1:8000/v1, or Endpoints")
    if len({one.url for one in endpoints}) < len(endpoints):
        raise ConfigError("endpoint", [one.url for one in endpoints], "a URL stands there twice; give each once")
    if all(one.weight == 0 for one in endpoints):
        raise ConfigError("endpoint.weight", 0, "at least one endpoint needs a weight above 0")
    return tuple(endpoints)


def _endpoint(values: Mapping[str, Any]) -> Endpoint:
    unknown = sorted(str(key) for key in values if key not in Endpoint.__struct_fields__)
    if unknown:
        known = ", ".join(Endpoint.__struct_fields__)
        raise ConfigError(f"endpoint.{unknown[0]}", "…", f"unknown key; known are {known}")
    if "url" not in values:
        raise ConfigError("endpoint.url", None, "it is missing, and there is no default for it")
    return Endpoint(**values)


def _normal_url(key: str, url: Any) -> str:
    if not isinstance(url, str):
        raise ConfigError(key, url, "give a URL as text")
    try:
        parts = urlsplit(url.strip())
        host = parts.hostname
        _ = parts.port
    except ValueError as error:
        raise ConfigError(key, url, f"not a URL ({error}); use http://HOST[:PORT]/v1 or https://…") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError(key, url, "the scheme must be http or https, as in https://HOST/v1/chat/completions")
    if not host:
        raise ConfigError(key, url, "it names no host, as in http://127.0.0.1:8000/v1")
    if any(char.isspace() for char in parts.netloc):
        raise ConfigError(key, url, "not a URL (its host holds a blank); use http://HOST[:PORT]/v1 or https://…")
    if parts.username or parts.password:
        shown = f"{parts.scheme}://[credentials]@{host}"
        raise ConfigError(key, shown, "leave user and password out of the URL; use api_key or api_key_env")
    path = parts.path.rstrip("/") or "/v1"
    if not path.endswith(COMPLETIONS_PATH):
        path += COMPLETIONS_PATH
    return urlunsplit((parts.scheme, parts.netloc.lower(), path, parts.query, ""))


def _secret(key: str, value: Any) -> Secret | None:
    if value is None or isinstance(value, Secret):
        return value
    if not isinstance(value, str):
        raise ConfigError(key, f"<{type(value).__name__}>", "give the key as text, or name its variable in api_key_env")
    text = value.strip()
    _check_key(key, text)
    if text.startswith("<key from "):
        raise ConfigError(key, text, "this is a dump's placeholder and not a key; give the key, or name api_key_env")
    return Secret(text) if text else None


def _env_secret(name: str | None) -> Secret | None:
    found = Secret.from_env(name) if name else None
    if found:
        _check_key(f"environment variable {name}", found.reveal())
    return found


def _check_key(where: str, text: str) -> None:
    if not text.isascii() or not text.isprintable():
        raise ConfigError(where, "<hidden>", "it holds characters that no HTTP header can carry; was it pasted whole?")


def _price(model: str, value: Any) -> Price:
    if isinstance(value, Price):
        return value
    try:
        return msgspec.convert(value, Price)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"prices.{model}", value, f"give {{input: …, output: …}} per million tokens ({error})"
        ) from None


def _has_nonfinite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(_has_nonfinite, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_nonfinite, value))


def _set(struct: msgspec.Struct, key: str, value: object) -> None:
    msgspec.structs.force_setattr(struct, key, value)
