"""The judge's settings and their defaults, and the key. `docs/configuration.md` is generated from here.

A setting that cannot work is refused when the config is made. The error names the key, the value and the remedy.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit, urlunsplit

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.limiter import START
from freewheel.judge.rubric import Rubric, load_rubric
from freewheel.utils.checks import check_integer, check_number, check_text, shown_value

KEYLESS = "EMPTY"
"""The usual key for servers that need none."""


class Secret:
    """An API key and the name of its source. `reveal()` is the only way to the text.

    It does not print and does not pickle: a pickle may be written to a disk, so it carries the source instead. If the
    source is an environment variable, the other process reads it there. A key given as text must be given there again,
    except `KEYLESS`, which is no secret.
    """

    __slots__ = ("_text", "source")

    def __init__(self, text: str | None, *, source: str = "the api_key argument") -> None:
        self._text = text
        self.source = source

    @classmethod
    def from_env(cls, name: str) -> Secret | None:
        """Return the key in environment variable `name`, or None if it is unset or empty."""
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
        """Return `text` without the key. Servers echo it in their errors."""
        return text.replace(self._text, "[key]") if self._text else text

    def __bool__(self) -> bool:
        """False where pickling left the key out."""
        return self._text is not None

    def __repr__(self) -> str:
        return f"<key from {self.source}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[object, ...]:
        return (Secret, (KEYLESS,)) if self._text == KEYLESS else (_restore, (self.source,))

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


_LEAST = {"max_attempts": 1, "concurrency_start": 1, "reasks": 0, "cache_max_bytes": 1 << 20, "memory_cache_bytes": 0}


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
    """One of the servers of a judge."""

    url: str
    """A base URL as for the OpenAI clients, or a chat-completions URL. A missing `/chat/completions` is appended to the
    path; a URL without a path gets `/v1` first."""
    weight: float = 1.0
    """Share of the requests while all endpoints have room. 0: a standby, used while no other endpoint works."""
    model: str | None = None
    """The model's name at this endpoint, if it differs from the judge's `model`."""
    api_key: Secret | None = None
    """The key for this endpoint. Default: the judge's."""
    api_key_env: str | None = None
    """The environment variable with this endpoint's key."""
    api_key_header: str = "Authorization"
    """The header for the key: `Authorization` sends `Bearer KEY`, any other the bare key (`api-key` on Azure)."""
    requests_per_minute: float | None = None
    """A budget to stay under. The endpoint's `x-ratelimit-*` headers are respected without it."""
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
    """All settings of a `Judge`."""

    endpoint: str | Endpoint | tuple[Endpoint, ...]
    """The judge's URL, or several `Endpoint`s with weights. The first one identifies the judge in the cache."""
    model: str
    """The model's name at the endpoint."""
    rubric: str | Rubric = "integer"
    """A built-in rubric's name, a `.json` or `.toml` file, or a `Rubric`."""
    api_key: Secret | None = None
    """The key, also as text. It stays in memory: it is not printed, logged, cached or pickled."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """The environment variable with the key, if `api_key` is not given. None, or an unset variable: no key is sent."""
    concurrency: int | str = "auto"
    """`auto` finds the judge's own limit; an integer is an upper bound for it; `fixed:N` always keeps N."""
    concurrency_start: int = START
    """First limit for calls in flight to a judge that is not known yet. It adapts from there."""
    temperature: float | None = 0.0
    """None leaves it out of the request."""
    max_tokens: int | None = None
    """Longest reply in tokens. None leaves it out of the request. A reply that is cut off is not read as a score."""
    sampling: dict[str, Any] = {}
    """More fields of the request's body that the endpoint accepts (`top_p`, `reasoning_effort`, `seed`, …)."""
    placement: Placement = "process"
    """`process`: the engine runs in a child process. `thread`: in a background thread of this process."""
    attempt_timeout_s: float = 60.0
    """Longest time for one call, or three times the 99th percentile of the latencies if that is shorter."""
    request_deadline_s: float = 120.0
    """Longest time from a request's first call to its verdict, including the waits between retries."""
    batch_deadline_s: float | None = 300.0
    """Longest time for a batch. Requests without a verdict then are `Failed("deadline")`. None: no limit."""
    max_attempts: int = 8
    """A request is given up after this many failed calls (5xx, broken connection, time-out). 429s do not count."""
    reasks: int = 1
    """How often a request is repeated when its reply does not parse."""
    requests_per_minute: float | None = None
    """A request budget for each endpoint that has none of its own."""
    tokens_per_minute: float | None = None
    """The same for tokens, prompt and completion together."""
    prices: dict[str, Price] = {}
    """Model name → price. A model without a price is counted in tokens only."""
    max_cost: float | None = None
    """Spend ceiling. A request whose call would exceed it is not sent: `Failed("budget")`."""
    cache: bool = True
    """Cache replies. Off: only identical requests of one batch share a call."""
    cache_dir: str | None = None
    """Folder of the cache file. None: `$FREEWHEEL_CACHE_DIR`, `$XDG_CACHE_HOME/freewheel` or `~/.cache/freewheel`."""
    cache_max_bytes: int = 1 << 30
    """Size limit of the cache file's content. The least recently used replies are removed first."""
    cache_ttl_s: float | None = None
    """Age after which a cached reply is not used any more. None: never."""
    memory_cache_bytes: int = 32 << 20
    """Size limit of the replies kept in memory."""
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
        for key, low in _LEAST.items():
            check_integer(key, getattr(self, key), low=low)
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
        """The endpoint's own key, else the judge's. A key in the config comes before the environment."""
        return endpoint.api_key or _env_secret(endpoint.api_key_env) or self.api_key or _env_secret(self.api_key_env)

    def to_dict(self) -> dict[str, Any]:
        """The whole config as plain values, for logs and dumps. A key is shown as its source."""
        plain: dict[str, Any] = msgspec.to_builtins(self, enc_hook=repr)
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> JudgeConfig:
        """From plain values (YAML, TOML, JSON). Unknown keys are errors."""
        _check_keys(cls, values, required=("endpoint", "model"))
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
            _check_keys(Endpoint, one, required=("url",), prefix="endpoint.")
            one = Endpoint(**one)
        endpoints.append(Endpoint(url=one) if isinstance(one, str) else one)
    if not endpoints or not all(isinstance(one, Endpoint) for one in endpoints):
        raise ConfigError("endpoint", value, "give a URL such as http://127.0.0.1:8000/v1, or Endpoints")
    if len({one.url for one in endpoints}) < len(endpoints):
        raise ConfigError("endpoint", [one.url for one in endpoints], "a URL is in the list twice; give each once")
    if all(one.weight == 0 for one in endpoints):
        raise ConfigError("endpoint.weight", 0, "at least one endpoint needs a weight above 0")
    return tuple(endpoints)


def _check_keys(
    kind: type[msgspec.Struct], values: Mapping[str, Any], *, required: Sequence[str], prefix: str = ""
) -> None:
    unknown = sorted(str(key) for key in values if key not in kind.__struct_fields__)
    if unknown:
        known = ", ".join(kind.__struct_fields__)
        value = "…" if prefix else shown_value(unknown[0], values[unknown[0]])
        raise ConfigError(prefix + unknown[0], value, f"unknown key; known are {known}")
    for key in required:
        if key not in values:
            raise ConfigError(prefix + key, None, "it is missing, and there is no default for it")


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
        raise ConfigError(key, url, "it names no host; give a URL such as http://127.0.0.1:8000/v1")
    if any(char.isspace() for char in parts.netloc):
        raise ConfigError(key, url, "not a URL (its host contains a space); use http://HOST[:PORT]/v1 or https://…")
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
        raise ConfigError(
            key, text, "this is the placeholder of a dump and not a key; give the key, or name api_key_env"
        )
    return Secret(text) if text else None


def _env_secret(name: str | None) -> Secret | None:
    found = Secret.from_env(name) if name else None
    if found:
        _check_key(f"environment variable {name}", found.reveal())
    return found


def _check_key(where: str, text: str) -> None:
    if not text.isascii() or not text.isprintable():
        raise ConfigError(
            where, "<hidden>", "it has characters that no HTTP header can carry; was it copied completely?"
        )


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
