"""How many requests may be in flight at a judge: learned from its refusals and from its throughput.

The best concurrency is unknown, differs by a factor of a hundred between judges, and changes over time. Two signals
show it: the judge refuses (429), or more requests in flight no longer give more replies. The limiter grows until it
meets one of them, steps back a little, stays there, and tries again from time to time, as CUBIC does for a network
path. The engine calls it when a request is sent and when it ends. It is pure: the caller passes the time.

    sent ──▶ Ticket ──▶ succeeded   grows the limit; every 32 successes give the throughput at this level
                   ├──▶ throttled   the level is too high: one cut per epoch, to the accepted level
                   ├──▶ faulted     counts only if it is not an isolated fault
                   └──▶ released    frees the slot and says nothing about the level

All times are measured in round trips (the mean latency), never in seconds. A judge that answers in 0.2 s is therefore
handled ten times as fast as one that takes 2 s.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

START = 32
"""First limit for an unknown judge. Few judges refuse it, and 32 replies already show something."""
MOST = 4096
"""The limit never exceeds this: one process runs out of sockets before the judge runs out of capacity."""
_IN_USE = 0.85
"""The limit grows only while at least this share of it is in use. Otherwise growth would be an untested guess."""
_SLOW_START_GAIN = 2.5
"""Growth per success while no bound is known: it more than triples the limit each round trip. A refusal comes at once
and a plateau shows within a segment, so the overshoot is small. The limit reaches 400 in three round trips."""
_PROBE_GAIN = 0.5
"""Growth per success long after the last bound was met: half as much again each round trip."""
CUT = 0.97
"""A refusal is exact, because the accepted level is known, so the step back is small."""
_CUBIC_SCALE = 0.03
"""With `CUT`: the cubic starts at 0.97 of the bound and reaches 1.03 of it after twice the return time."""
_RETURN_RTT = 1.0
"""Round trips until the cubic is back at a bound set by a refusal. It is short: another refusal costs no throughput,
and the limiter follows a judge whose capacity moved within a few round trips."""
_PLATEAU_RETURN_RTT = 3.0
"""The same for a bound set by a plateau. Exceeding it gains nothing, and costs at a judge past its peak."""
_QUIET_RETURNS = 2.0
"""After this many return times without a cut the bound is outdated, and growth is by `_PROBE_GAIN`."""
_EPOCH_RTT = 0.5
"""Least time between two cuts. A reply to a request sent before a cut says nothing about it."""
_RTT_WEIGHT = 1.0 / 32.0
"""Weight of one latency in the mean: about one segment of memory."""

_SEGMENT = 32
"""Successes per throughput segment. Its rate is then known to about 10% at a latency spread of 0.5."""
_FIRST_SEGMENT = 24
"""The same in slow start, where the level grows by half in a segment and delay costs more than noise."""
_SEGMENT_SHARE = 0.5
"""A segment has at least this share of the limit, half a round trip. A shorter one misses the long replies."""
_COUNT_SHARE_RISING = 0.5
"""While the level rises in slow start: exponent of the counted throughput in the combined estimate; the rest is level /
latency."""
_WAVES_SPREAD = 0.25
"""Below this latency spread, replies come in waves and counted throughput loses weight in proportion."""
_BINS_PER_OCTAVE = 4
"""Levels of the throughput table are 2^¼ apart: 19%, the least that one segment can distinguish."""
_LEAST_REFERENCE = 12.0
"""Weight (decayed replies) that a reference needs: half of a slow-start segment."""
_NEAREST_REFERENCE = 2
"""A level is compared with levels at least this many bins below (n/1.4). Nearer ones differ by less than the noise."""
_FARTHEST_REFERENCE = 4
"""It is compared down to this many bins below (n/2)."""
_MEMORY_PER_SEGMENT = 0.93
"""Decay of the table per segment: it forgets half in ten, so it follows a judge that changes."""
_MOST_WEIGHT = 8.0 * _SEGMENT
"""Cap of a level's weight, so that a long stay does not make its figure immovable."""
_FLAT_ELASTICITY = 0.2
"""Below this gain (relative throughput per relative concurrency) more requests only wait in the judge's queue."""
_FLAT_MARGIN_SE = 0.5
"""Standard errors added to the gain before it is compared, so that noise alone rarely looks like a plateau."""
_FALLING_SE = 2.0
"""A throughput this many standard errors below that of a lower level means that the judge is past its peak."""
_PLATEAU_PEAK = 1.1
"""After a plateau the bound is this multiple of the reference level."""
_PLATEAU_CUT = 0.9
"""After a plateau the limit is this share of the bound."""
_LATENCY_SPREAD = 0.5
"""Assumed relative spread of latencies until it is measured."""
_SPREAD_WEIGHT = 0.25
"""Weight of one segment in the measured spread: it takes four segments, a hundred replies or more."""
_LEAST_SPREAD = 0.2
"""Least assumed noise of throughput per reply."""

_REPLIES_WATCHED = 32
"""Faults are judged over this many last replies."""
_FAULT_SHARE = 0.1
"""From this share of them on, faults mean overload. In a measurement, cutting on isolated faults took 11.5 s instead of
6.8 s."""
_FAULT_CUT = 0.9
"""Brief step back for 5xx at levels at which others succeed. At a judge with random faults, a larger step costs more
than it saves. Throughput shows whether the level is permanently too high."""
_PROVEN_DECAY = 0.99
"""Each fault multiplies the highest level that recently succeeded by this (half after 70 faults). A success at a level
restores it."""
_BREAK_SHARE = 0.5
"""`_FAULT_SHARE` for broken connections and time-outs, which have many causes other than overload."""
_REFUSALS_TOLERATED = 8
"""Refusals in a row that are still a burst. After more, the judge is refusing everything for a while."""
_PROBES = 2
"""With at least this many in flight, the next tries are sent as these end. With fewer, the limiter pauses."""
_RETREAT = 0.9
"""Step back per consecutive refusal: seven halve the limit, so a lockout refuses about a dozen requests, not a
hundred."""
_RESUME = 0.5
"""When a judge that refused everything accepts again, continue at this share of the level it had accepted before."""
_QUIET_FIRST_RTT = 0.1
"""First silence while everything is refused. It doubles with each further refusal."""
_QUIET_MOST_RTT = 0.5
"""Longest silence: a judge that is back is found within half a round trip."""
_PROBE_RTT = 0.05
"""A probe that is not refused within this time is a good sign, because a refusal needs no work."""
_PROBE_PATIENCE = 4.0
"""A probe must also survive this many times the duration of the last refusal."""
_PROBE_GROWTH = 2.0
"""After a good sign this many times as many requests follow, without waiting for the probe's answer."""
_UNKNOWN_RTT_S = 1.0
"""Assumed round trip until the first success: the usual order of a judge's latency."""

_WATCHED_MASK = (1 << _REPLIES_WATCHED) - 1
_FAULTS_TO_CUT = math.ceil(_FAULT_SHARE * _REPLIES_WATCHED)
_BREAKS_TO_CUT = math.ceil(_BREAK_SHARE * _REPLIES_WATCHED)

Ticket = tuple[float, int]
"""State when a request was sent: the time, and how many requests were in flight with it."""


Level = Annotated[float, msgspec.Meta(ge=0.0, le=MOST)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
Rate = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
Weight = Annotated[float, msgspec.Meta(ge=0.0, le=_MOST_WEIGHT)]
Bin = Annotated[int, msgspec.Meta(ge=0, le=_BINS_PER_OCTAVE * 12)]


class LimiterMemory(msgspec.Struct, frozen=True):
    """The state that is kept between steps and runs. It may be old; decoding refuses a damaged one."""

    window: Level = 0.0
    bound: Level = 0.0
    """Where the judge last refused or stopped gaining; 0 if that never happened."""
    rtt_s: Seconds = 0.0
    levels: dict[Bin, tuple[Rate, Weight]] = {}
    """Throughput table: bin → (requests per second, weight)."""


class Limiter:
    """Allows as many requests in flight as the judge turns into throughput, and no more than it accepts.

    Promises: `limit` is always at least 1 and never exceeds `ceiling`; `fixed` never moves; there is one cut per epoch;
    after a burst of refusals the limit is at most the accepted level; successes let it grow again from every state.
    """

    def __init__(
        self,
        *,
        start: int = START,
        ceiling: int | None = None,
        fixed: int | None = None,
        memory: LimiterMemory | None = None,
    ) -> None:
        self.in_flight = 0
        self.quiet_until = -math.inf
        """A request sent before this time would be refused, like all recent ones."""
        self._is_fixed = fixed is not None
        self._ceiling = float(fixed if fixed is not None else min(ceiling or MOST, MOST))
        self._window = self._ceiling if fixed is not None else min(float(start), self._ceiling)
        self._bound = 0.0  # 0: none met yet, slow start
        self._target = math.inf  # slow start continues to here
        self._rtt_s = 0.0
        self._spread = _LATENCY_SPREAD
        self._levels: dict[int, tuple[float, float]] = {}
        self._cut_at = -math.inf
        self._return_rtt = _RETURN_RTT
        self._recent = 0
        self._proven = 0.0
        self._refusals = 0
        self._refused_since = math.inf
        self._refusal_s = 0.0
        if memory is not None and not self._is_fixed:
            if memory.window >= 1.0:
                self._window = min(memory.window, self._ceiling)
            if memory.bound >= 1.0:
                self._bound, self._target = memory.bound, self._window
            self._rtt_s = memory.rtt_s
            self._levels = dict(memory.levels)
        self.limit = int(self._window)
        """Number of requests that may be in flight now."""
        self._segment_count = 0
        self._segment_size: float = _FIRST_SEGMENT
        self._segment_start = self._segment_latency_s = self._segment_square = self._segment_level = 0.0

    def memory(self) -> LimiterMemory:
        """The state from which a later limiter for the same judge should start."""
        return LimiterMemory(
            window=max(self._window, self._target) if self._target < math.inf else self._window,
            bound=self._bound,
            rtt_s=self._rtt_s,
            levels=dict(self._levels),
        )

    def has_room(self) -> bool:
        return self.in_flight < self.limit

    def sent(self, now: float) -> Ticket:
        """A request is sent now."""
        if not self.in_flight:  # an idle pause does not count as low throughput
            self._start_segment(now)
            if self._cut_at == -math.inf:
                # The cubic's clock starts with the first request, which may already cause a cut.
                self._cut_at = now - _EPOCH_RTT * self._rtt_s
        self.in_flight = in_flight = self.in_flight + 1
        if self._refusals > _REFUSALS_TOLERATED and in_flight >= self.limit:
            self._probe(now)
        return (now, in_flight)

    def succeeded(self, ticket: Ticket, now: float) -> None:
        """A reply arrived."""
        in_flight = self.in_flight
        self.in_flight = in_flight - 1
        self._recent = self._recent << 1 & _WATCHED_MASK
        sent_at = ticket[0]
        latency_s = now - sent_at
        if ticket[1] > self._proven:
            self._proven = ticket[1]
        rtt_s = self._rtt_s
        self._rtt_s = rtt_s = rtt_s + (latency_s - rtt_s) * _RTT_WEIGHT if rtt_s else latency_s
        if self._refusals and sent_at >= self._refused_since:
            self._accepted_again()
        if self._is_fixed:
            return
        window = self._window
        limit = self.limit
        if in_flight < limit * _IN_USE or in_flight > limit + 1:  # not in use, or still draining after a cut
            self._start_segment(now)
            return
        self._segment_latency_s += latency_s
        self._segment_square += latency_s * latency_s
        self._segment_level += in_flight
        self._segment_count = count = self._segment_count + 1
        if window < self._target:
            window += _SLOW_START_GAIN
        else:
            returns = (now - self._cut_at) / (self._return_rtt * rtt_s) if rtt_s > 0.0 else _QUIET_RETURNS
            if returns < _QUIET_RETURNS:
                phase = returns - 1.0
                window = max(window, self._bound * (1.0 + _CUBIC_SCALE * phase * phase * phase))
            else:
                window += _PROBE_GAIN
        self._set_window(window)
        if count >= self._segment_size:
            self._close_segment(now)

    def throttled(self, ticket: Ticket, now: float) -> None:
        """A 429 that is not about the rate. The judge accepted all others in flight and refused this one."""
        self._end_refused(ticket, now)
        if self._is_fixed:
            return
        accepted = float(max(1, self.in_flight))
        if ticket[0] < self._cut_at:
            # The rest of the burst that caused the cut. It only shows the bound more precisely.
            if accepted < self._window:
                self._bound = self._target = min(self._bound, accepted)
                self._set_window(accepted)
        elif self._bound and (self._refusals > 1 or ticket[0] < self._cut_at + _EPOCH_RTT * self._rtt_s):
            # Refused again below the cut, and nothing sent since then was accepted. The judge's capacity fell, it
            # refuses everything, or it limits the rate. Follow it down, and keep the bound for the return when it
            # accepts again.
            self._retreat()
        else:
            self._cut(min(accepted, self._window), CUT, now)

    def faulted(self, ticket: Ticket, now: float, *, overload: bool) -> None:
        """503, 529 and other 5xx (`overload`), or a broken connection or time-out."""
        self._end_refused(ticket, now)
        self._recent |= 1
        self._proven *= _PROVEN_DECAY
        if self._is_fixed:
            return
        if self._refusals > _REFUSALS_TOLERATED:
            self._retreat()
        elif (
            self._recent.bit_count() >= (_FAULTS_TO_CUT if overload else _BREAKS_TO_CUT)
            and ticket[0] >= self._cut_at + _EPOCH_RTT * self._rtt_s
        ):
            if ticket[1] > self._proven:  # nothing at this level succeeded lately: in effect a refusal
                self._cut(min(float(self.in_flight), self._window), CUT, now)
            else:
                returns_to = max(self._window, self._bound)
                self._cut(self._window * _FAULT_CUT, 1.0, now)
                self._target = self._bound = returns_to

    def released(self, ticket: Ticket, now: float) -> None:
        """Cancelled, refused for its rate, or a 4xx. These are not about concurrency."""
        self.in_flight -= 1

    def _end_refused(self, ticket: Ticket, now: float) -> None:
        self.in_flight -= 1
        self._recent = self._recent << 1 & _WATCHED_MASK
        self._refusals += 1
        if self._refused_since == math.inf:
            self._refused_since = ticket[0]
        self._refusal_s = now - ticket[0]
        excess = self._refusals - _REFUSALS_TOLERATED
        if excess > 0 and self.in_flight < _PROBES:
            silence = min(_QUIET_MOST_RTT, _QUIET_FIRST_RTT * 2.0 ** min(excess - 1, 10))
            self.quiet_until = now + silence * (self._rtt_s or _UNKNOWN_RTT_S)

    def _probe(self, now: float) -> None:
        """Allow twice as many requests if these are not refused in the time that a refusal takes."""
        # A time-out is a slow refusal. It must not make us wait that long.
        patience_s = min(_PROBE_PATIENCE * self._refusal_s, _QUIET_MOST_RTT * (self._rtt_s or _UNKNOWN_RTT_S))
        self.quiet_until = now + max(_PROBE_RTT * self._rtt_s, patience_s)
        if self._target < math.inf:
            self._set_window(max(self._window, min(self._window * _PROBE_GROWTH, self._target * _RESUME)))

    def _retreat(self) -> None:
        if self._target == math.inf:
            self._target = self._bound = self._window
        self._set_window(min(self._window, max(_PROBES, self.in_flight * _RETREAT)))

    def _accepted_again(self) -> None:
        if self._refusals > 1 and self._target < math.inf:
            self._set_window(max(self._window, self._target * _RESUME))
        self._refusals = 0
        self._refused_since = math.inf

    def _cut(self, bound: float, share: float, now: float, return_rtt: float = _RETURN_RTT) -> None:
        self._return_rtt = return_rtt
        self._bound = self._target = max(1.0, bound)
        self._cut_at = now
        self._set_window(self._bound * share)
        self._target = self._window
        self._start_segment(now)

    def _set_window(self, window: float) -> None:
        self._window = window = min(self._ceiling, max(1.0, window))
        self.limit = int(window)

    def _start_segment(self, now: float) -> None:
        self._segment_start = now
        self._segment_size = max(_SEGMENT, _SEGMENT_SHARE * self._window) if self._bound else _FIRST_SEGMENT
        self._segment_count = 0
        self._segment_latency_s = self._segment_square = self._segment_level = 0.0

    def _close_segment(self, now: float) -> None:
        """Record the segment's throughput at its level, and step back if the level no longer gains."""
        count = self._segment_count
        elapsed_s = now - self._segment_start
        level = self._segment_level / count
        latency_s = self._segment_latency_s / count
        square = self._segment_square / count
        self._start_segment(now)
        if elapsed_s <= 0.0 or latency_s <= 0.0:
            return
        spread = math.sqrt(max(0.0, square / (latency_s * latency_s) - 1.0))
        self._spread += _SPREAD_WEIGHT * (max(_LEAST_SPREAD, spread) - self._spread)
        levels = self._levels
        for key, (rate, weight) in levels.items():
            levels[key] = (rate, weight * _MEMORY_PER_SEGMENT)
        here = round(_BINS_PER_OCTAVE * math.log2(level))
        rate, weight = levels.get(here, (0.0, 0.0))
        # There are two estimates of throughput: counted replies, and level / latency (Little's law). At a steady level
        # they agree. While the level rises, the count lags, and the latency is too low because short replies come
        # first; the true value lies between. If latencies hardly differ, replies come in waves and the count is
        # useless.
        counted = (1.0 if self._bound else _COUNT_SHARE_RISING) * min(1.0, spread / _WAVES_SPREAD)
        rate_here = (count / elapsed_s) ** counted * (level / latency_s) ** (1.0 - counted)
        rate = (rate * weight + rate_here * count) / (weight + count)
        weight = min(_MOST_WEIGHT, weight + count)
        levels[here] = (rate, weight)
        self._compare(here, level, now)

    def _compare(self, here: int, level: float, now: float) -> None:
        """Step back if the level gives no more throughput, or less, than the levels well below it."""
        levels = self._levels
        rate, weight = levels[here]
        reference_rate = reference_weight = reference_bin = 0.0
        for below in range(_NEAREST_REFERENCE, _FARTHEST_REFERENCE + 1):
            rate_below, weight_below = levels.get(here - below, (0.0, 0.0))
            reference_rate += rate_below * weight_below
            reference_bin += (here - below) * weight_below
            reference_weight += weight_below
        if reference_weight < _LEAST_REFERENCE:
            return
        reference_rate /= reference_weight
        reference_level = 2.0 ** (reference_bin / reference_weight / _BINS_PER_OCTAVE)
        span = math.log(level / reference_level)
        noise = self._spread * math.sqrt(1.0 / weight + 1.0 / reference_weight)
        gain = math.log(rate / reference_rate)
        if gain + _FLAT_MARGIN_SE * noise < _FLAT_ELASTICITY * span or gain < -_FALLING_SE * noise:
            self._cut(min(self._window, reference_level * _PLATEAU_PEAK), _PLATEAU_CUT, now, _PLATEAU_RETURN_RTT)
