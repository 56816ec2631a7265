"""Where a simulated length or latency comes from: a number, a shape, or what was measured.

A draw is a fact (frozen, comparable, printable); `stream` turns it into numbers, a block at a time, from a generator
that the caller seeds: the same seed gives the same run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

BLOCK = 4096
"""Numbers drawn at a time: then a draw costs what an iterator does."""
HALVINGS = 60
"""Of an interval, until it is as narrow as a float tells numbers apart."""


class Draw(Protocol):
    @property
    def mean(self) -> float: ...

    def block(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]: ...


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    value: float

    @property
    def mean(self) -> float:
        return self.value

    def block(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.full(count, self.value)


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def block(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return rng.uniform(self.low, self.high, count)


@dataclass(frozen=True)
class Lognormal:
    """Most are short and a few are long, as lengths of responses and latencies of judges are."""

    middle: float
    """The mean before anything is cut off."""
    sigma: float
    """Spread of the logarithm."""
    most: float = math.inf
    """Longer ones are cut off here, as responses are at `max_new_tokens`."""

    @property
    def mean(self) -> float:
        """With the cut: E[min(X, m)] = E[X]·Φ((ln m − μ)/σ − σ) + m·(1 − Φ((ln m − μ)/σ))."""
        if math.isinf(self.most) or self.sigma == 0:
            return min(self.middle, self.most)
        z = (math.log(self.most) - self._mu) / self.sigma
        return self.middle * _phi(z - self.sigma) + self.most * (1 - _phi(z))

    @classmethod
    def of_mean(cls, mean: float, sigma: float, most: float) -> Lognormal:
        """The one that has this mean with the cut, which is not above `most`."""
        low = high = mean
        while cls(high, sigma, most).mean < mean:
            high *= 2
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, sigma, most).mean < mean else (low, middle)
        return cls(high, sigma, most)

    @property
    def _mu(self) -> float:
        return math.log(self.middle) - self.sigma**2 / 2

    def block(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.minimum(rng.lognormal(self._mu, self.sigma, count), self.most)


@dataclass(frozen=True)
class Measured:
    """One of the values that were seen, each as likely as it was frequent."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values = (): give at least one that was measured")

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        return cls(tuple(values))

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    def block(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return rng.choice(np.asarray(self.values, dtype=np.float64), count)


def stream(draw: Draw, rng: np.random.Generator) -> Iterator[float]:
    """Without end."""
    while True:
        yield from draw.block(rng, BLOCK).tolist()


def whole_stream(draw: Draw, rng: np.random.Generator) -> Iterator[int]:
    """The same in whole numbers of at least 1: tokens."""
    while True:
        yield from np.maximum(1, np.rint(draw.block(rng, BLOCK))).astype(np.int64).tolist()


def _phi(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))
