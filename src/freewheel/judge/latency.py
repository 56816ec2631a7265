"""Latency percentiles in constant memory: logarithmic bins, old samples fading."""

from __future__ import annotations

import math


class LatencyHistogram:
    """Quantiles of recent latencies, to within one bin (5%)."""

    SMALLEST_S = 1e-4
    """Everything quicker than a loopback round trip is one bin."""
    RATIO = 1.05
    """Width of a bin: what a percentile may be off by."""
    BINS = 320
    """Up to 10 minutes, the longest that any deadline allows by default."""
    FADE_EVERY = 2048
    """Samples after which all counts are halved, so that the last few thousand decide."""

    _SCALE = 1 / math.log(RATIO)

    def __init__(self) -> None:
        self._counts = [0.0] * self.BINS
        self._total = 0.0
        self._since_fade = 0

    def add(self, latency_s: float) -> None:
        place = int(math.log(max(latency_s, self.SMALLEST_S) / self.SMALLEST_S) * self._SCALE)
        self._counts[min(place, self.BINS - 1)] += 1.0
        self._total += 1.0
        self._since_fade += 1
        if self._since_fade >= self.FADE_EVERY:
            self._since_fade = 0
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    def quantile(self, share: float) -> float:
        """The latency that `share` of the samples stay under; 0.0 while there are none."""
        left = share * self._total
        if self._total == 0:
            return 0.0
        for place, count in enumerate(self._counts):
            left -= count
            if left <= 0 and count:
                return float(self.SMALLEST_S * self.RATIO ** (place + 0.5))
        return float(self.SMALLEST_S * self.RATIO**self.BINS)
