"""The judge's settings and their defaults, and the key. `docs/configuration.md` is generated from here.

A setting that cannot work is refused when the config is made. The error names the key, the value and the remedy.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit, urlunsplit

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.limiter import START
from freewheel.judge.rubric import Rubric, check_keys, load_rubric
from freewheel.utils.checks import Count, CountOrZero, NotNegative, Positive, Text, check_fields

KEYLESS = "EMPTY"
"""The usual key for servers that need none."""


class Secret:
    """An API key and the name of its source. Only `reveal()` returns the text.

    The key is neither printed nor pickled. A pickle may be written to a disk, so it holds the name of the source
    instead. If the source is an environment variable, the process that unpickles it reads that variable. A key given as
    text must be given again in that process, except `KEYLESS`, which is not secret.
    """

    __slots__ = ("_text", "source")

    def __init__(self, text: str | None, *, source: str = "the api_key argument") -> None:
        self._text = text
        self.source = source

    @classmethod
    def from_env(cls, name: str) -> Secret | None:
        """Return the key in environment variable `name`, or None if it is unset or empty."""
        text = os.environ.get(name, "").strip()
        return cls(text, source=_VARIABLE + name) if text else None

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
        """False if pickling left the key out."""
        return self._text is not None

    def __repr__(self) -> str:
        return f"<key from {self.source}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __reduce__(self) -> tuple[object, ...]:
        return (Secret, (KEYLESS,)) if self._text == KEYLESS else (_restore, (self.source,))

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self


_VARIABLE = "environment variable "


def _restore(source: str) -> Secret:
    """Unpickle a key: read it from its variable, if it came from one."""
    name = source.removeprefix(_VARIABLE)
    return (Secret.from_env(name) if name != source else None) or Secret(None, source=source)


COMPLETIONS_PATH = "/chat/completions"
Placement = Literal["process", "thread"]

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of a model, in your currency per million tokens."""

    input: NotNegative
    """The price per million prompt tokens."""
    output: NotNegative
    """The price per million completion tokens."""

    def __post_init__(self) -> None:
        check_fields(self, "prices.")

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        return (prompt_tokens * self.input + completion_tokens * self.output) / 1e6


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the servers of a judge."""

    url: str
    """A base URL as for the OpenAI clients, or a chat-completions URL. A missing `/chat/completions` is appended to the
    path; a URL without a path gets `/v1` first."""
    weight: NotNegative = 1.0
    """Share of the requests while all endpoints have room. 0: a standby, used while no other endpoint works."""
    model: Text | None = None
    """The model's name at this endpoint, if it differs from the judge's `model`."""
    api_key: Secret | None = None
    """The key for this endpoint. Default: the judge's."""
    api_key_env: Text | None = None
    """The environment variable with this endpoint's key."""
    api_key_header: Text = "Authorization"
    """The header for the key. `Authorization` sends `Bearer KEY`; any other header sends the bare key (`api-key` on
    Azure)."""
    requests_per_minute: Positive | None = None
    """Most requests per minute to this endpoint. Its `x-ratelimit-*` headers are respected in any case."""
    tokens_per_minute: Positive | None = None
    """Most tokens per minute to this endpoint, prompt and completion together."""

    def __post_init__(self) -> None:
        _set(self, "url", _normal_url(self.url))
        _set(self, "api_key", _secret("endpoint.api_key", self.api_key))
        check_fields(self, "endpoint.")
        if not _HEADER_NAME.fullmatch(self.api_key_header):
            raise ConfigError("endpoint.api_key_header", self.api_key_header, "no HTTP header can have this name")


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a `Judge`."""

    endpoint: str | Endpoint | tuple[Endpoint, ...]
    """The judge's URL, or several `Endpoint`s with weights. The first one identifies the judge in the cache."""
    model: Text
    """The model's name at the endpoint."""
    rubric: str | Rubric = "integer"
    """A built-in rubric's name, a `.json` or `.toml` file, or a `Rubric`."""
    api_key: Secret | None = None
    """The key; text is accepted. It stays in memory: it is not printed, logged, cached or pickled."""
    api_key_env: Text | None = "OPENAI_API_KEY"
    """The environment variable with the key, if `api_key` is not given. None, or an unset variable: no key is sent."""
    concurrency: int | str = "auto"
    """Requests in flight at the judge. `auto` (default) finds the limit, from `concurrency_start` upwards. An integer
    bounds it. `fixed:N` keeps N."""
    concurrency_start: Count = START
    """Concurrency limit at the first use of a judge. It adapts from there."""
    temperature: NotNegative | None = 0.0
    """Sampling temperature. None leaves it out of the request."""
    max_tokens: Count | None = None
    """Longest reply in tokens. None leaves it out of the request. A reply that is cut off is not read as a score."""
    sampling: dict[str, Any] = {}
    """More fields of the request's body that the endpoint accepts (`top_p`, `reasoning_effort`, `seed`, …)."""
    placement: Placement = "process"
    """`process`: the engine runs in a child process. `thread`: in a background thread of this process."""
    attempt_timeout_s: Positive = 60.0
    """Longest time for one call, or three times the 99th percentile of the latencies if that is shorter."""
    request_deadline_s: Positive = 120.0
    """Longest time from a request's first call to its verdict, including the waits between retries."""
    batch_deadline_s: Positive | None = 300.0
    """Longest time for a batch. Requests without a verdict then are `Failed("deadline")`. None: no limit."""
    max_attempts: Count = 8
    """A request is given up after this many failed calls (5xx, broken connection, time-out). 429s do not count."""
    reasks: CountOrZero = 1
    """How often a request is repeated when its reply does not parse."""
    requests_per_minute: Positive | None = None
    """Most requests per minute to each endpoint that sets no limit itself."""
    tokens_per_minute: Positive | None = None
    """Most tokens per minute to each endpoint that sets no limit itself, prompt and completion together."""
    prices: dict[str, Price] = {}
    """Model name → price. A model without a price is counted in tokens only."""
    max_cost: Positive | None = None
    """Spend ceiling. A request whose call would exceed it is not sent: `Failed("budget")`."""
    cache: bool = True
    """Cache replies. Off: only identical requests of one batch share a call."""
    cache_dir: Text | None = None
    """Folder of the cache file. None: `$FREEWHEEL_CACHE_DIR`, `$XDG_CACHE_HOME/freewheel` or `~/.cache/freewheel`."""
    cache_max_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 1 << 30
    """Size limit of the cache file's content. The least recently used replies are removed first."""
    cache_ttl_s: Positive | None = None
    """Age after which a cached reply is not used any more. None: never."""
    memory_cache_bytes: CountOrZero = 32 << 20
    """Size limit of the replies kept in memory."""
    ca_file: Text | None = None
    """A CA bundle to trust instead of the system's."""

    def __post_init__(self) -> None:
        _set(self, "endpoint", _endpoints(self.endpoint))
        _set(self, "rubric", load_rubric(self.rubric))
        _set(self, "api_key", _secret("api_key", self.api_key))
        try:
            _set(self, "prices", msgspec.convert(self.prices, dict[str, Price]))
        except msgspec.ValidationError as error:
            remedy = f"give {{model: {{input: …, output: …}}}}, per million tokens ({error})"
            raise ConfigError("prices", self.prices, remedy) from None
        check_fields(self)
        parse_concurrency(self.concurrency)
        for key in ("messages", "model", "stream", "n", "temperature", "max_tokens"):
            if key in self.sampling:
                raise ConfigError(f"sampling.{key}", self.sampling[key], f"leave {key} out; freewheel sets it itself")
        try:
            json.dumps(self.sampling, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError("sampling", self.sampling, f"it must be plain JSON: {error}") from None
        missing = sorted({one.model or self.model for one in self.endpoints} - set(self.prices))
        if self.max_cost is not None and missing:
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
        """Make a config from plain values (YAML, TOML, JSON). Unknown keys are errors."""
        check_keys(cls, values, required=("endpoint", "model"), prefix="")
        return cls(**values)


def parse_concurrency(value: int | str) -> tuple[int | None, int | None]:
    """(upper bound, fixed value); both None for `auto`."""
    if value == "auto":
        return None, None
    number = str(value).removeprefix("fixed:")
    if not number.isascii() or not number.isdigit() or int(number) < 1:
        remedy = "use 'auto', a whole number of at least 1 (an upper bound), or 'fixed:N'"
        raise ConfigError("concurrency", value, remedy)
    return (int(number), None) if number == str(value) else (None, int(number))


def _endpoints(value: Any) -> tuple[Endpoint, ...]:
    several = value if isinstance(value, list | tuple) else (value,)
    endpoints = []
    for one in several:
        if isinstance(one, Mapping):
            check_keys(Endpoint, one, required=("url",), prefix="endpoint.")
            one = Endpoint(**one)
        endpoints.append(Endpoint(url=one) if isinstance(one, str) else one)
    if not endpoints or not all(isinstance(one, Endpoint) for one in endpoints):
        raise ConfigError("endpoint", value, "give a URL such as http://127.0.0.1:8000/v1, or Endpoints")
    if len({one.url for one in endpoints}) < len(endpoints):
        raise ConfigError("endpoint", [one.url for one in endpoints], "a URL is in the list twice; give each once")
    if all(one.weight == 0 for one in endpoints):
        raise ConfigError("endpoint.weight", 0, "at least one endpoint needs a weight above 0")
    return tuple(endpoints)


def _normal_url(url: Any) -> str:
    remedy = "give a URL such as http://127.0.0.1:8000/v1 or https://HOST/v1/chat/completions"
    try:
        parts: SplitResult = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except (AttributeError, ValueError) as error:
        raise ConfigError("endpoint", url, f"not a URL ({error}); {remedy}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError("endpoint", url, f"the scheme must be http or https; {remedy}")
    if not host or any(char.isspace() for char in parts.netloc):
        raise ConfigError("endpoint", url, f"it names no host; {remedy}")
    if parts.username or parts.password:
        shown = f"{parts.scheme}://[credentials]@{host}"
        raise ConfigError("endpoint", shown, "leave user and password out of the URL; use api_key or api_key_env")
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
        raise ConfigError(key, text, "this is the placeholder of a dump; give the key, or name api_key_env")
    return Secret(text) if text else None


def _env_secret(name: str | None) -> Secret | None:
    found = Secret.from_env(name) if name else None
    if found:
        _check_key(found.source, found.reveal())
    return found


def _check_key(where: str, text: str) -> None:
    if not text.isascii() or not text.isprintable():
        remedy = "it has characters that no HTTP header can carry; was it copied completely?"
        raise ConfigError(where, "<hidden>", remedy)


def _set(struct: msgspec.Struct, key: str, value: object) -> None:
    msgspec.structs.force_setattr(struct, key, value)
