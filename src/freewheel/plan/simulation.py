"""Simulates a run under a virtual clock, with the classes that decide in a real run.

    ask ─▶ policy.room, deal ─▶ SimulatedEngine ─▶ scores ─▶ outbox ─▶ policy.finish ─▶ policy.select ────▶ train
     ▲                                                                                                        │
     └── room ◀── policy.publish ◀── engines paused, loaded ◀── (drain: policy.settled) ◀── policy.commit ◀── pack

Each arrow is an event: a time, an action, an object. As in a run, the next batch is requested while a step trains, a
waiting version is superseded by the next one, and groups that finish together share a message. Failures, evaluations
and checkpoints are left out. Equal scenes and seeds give equal outcomes, bit for bit.

`SimulatedEngine` decodes: slots, steps, and when each response ends. Sequences enter between two steps and have whole
lengths, so many end at once and one event serves them all.

    add ─▶ waiting ─ free slots ─▶ running: ends at step now + its length ─▶ finish: all that end at this step

`deal` gives tickets to many rollouters with a heap. Its order is that of `pick_least_loaded` in
`freewheel.queue.message_queue` (a test compares them), which searches linearly and is too slow for thousands of
replicas.

`JudgeQueue` answers scoring requests in order, within the limits of a judge. In a run `freewheel.judge.limiter` finds
these limits, so requests wait here and none is refused.

`simulate_slice` simulates a large run by a proportional slice: engines are alike, so a tenth of the engines and a tenth
of the groups and of the judge's rate behaves like the whole, as long as there are enough of each to average over. Times
of a step, a version and a message do not shrink. A test compares slices with wholes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np

from freewheel.data.group import Ticket
from freewheel.plan.scene import Generation, Outcome, Scene, Scores, stream, whole_stream
from freewheel.queue.message_queue import TicketRequest
from freewheel.queue.staleness import StalenessPolicy
from freewheel.rollout.rollouter import Lookahead


class Timer:
    """An expected event. Expecting another one cancels it."""

    __slots__ = ("order",)

    def __init__(self) -> None:
        self.order = -1

    def cancel(self) -> None:
        self.order = -1


Event = tuple[float, int, Callable[[Any], None], Any, Timer | None]


class Mark(NamedTuple):
    """The sums at the end of a step."""

    at_s: float
    sums: defaultdict[str, float]
    """Seconds by span, and counts."""
    lags: Counter[int]
    """Groups trained on, by lag."""


class Simulation:
    """Trains every admitted group once and keeps the staleness bound; it asserts both."""

    def __init__(self, scene: Scene, *, seed: int = 0) -> None:
        self.scene = scene
        self.policy = StalenessPolicy(scene.bounds)
        self.now = 0.0
        lengths, latencies, _, varies = (np.random.default_rng([seed, part]) for part in range(4))
        self._lengths = whole_stream(scene.lengths, lengths)
        self._latencies = stream(scene.scores.latency_s, latencies)
        self._varies = stream(scene.training.varies, varies)
        self._judge = JudgeQueue(scene.scores)
        self._answer_at = self._judge.answer_at if scene.scores.per_s is not None else None  # no call without limits
        self._events: list[Event] = []
        self._order = count()
        self._replicas = [
            SimulatedReplica(
                place, SimulatedEngine(scene.generation, self._lengths), slots=scene.generation.slots, n=scene.n
            )
            for place in range(scene.generation.replicas)
        ]
        self._asking: list[TicketRequest] = []
        self._stored: dict[int, Group] = {}  # by sequence, until taken
        self._engines_busy = 0
        # trainer
        self._version = 0
        self._steps_in_version = 0
        self._begun = 0  # steps
        self._batch: list[Group] | None = None  # taken for the next step
        self._asks_for = 1  # the requested step
        self._training = False
        self._idle_since: float | None = 0.0
        self._groups: list[Group] = []  # groups in training
        self._began_at = self._work_at = self._work_s = 0.0
        self._pace = 1.0
        self._train_timer = Timer()
        self._steps_done = 0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._lags: Counter[int] = Counter()
        self._marks: dict[int, Mark] = {}
        # synchronizer
        self._pending: int | None = None
        self._loading = False
        self._paused_at = math.inf

    def run(self) -> Outcome:
        for replica in self._replicas:
            self._ask(replica)
        self._mark(0)
        events = self._events
        while events:
            self.now, order, what, whom, timer = heapq.heappop(events)
            if timer is None or timer.order == order:
                what(whom)
        assert self._steps_done == self.scene.steps, f"the simulation stalled after step {self._steps_done}"
        assert self.policy.trained == self.scene.bounds.total_groups and not self._stored
        return self._outcome()

    def _at(self, time: float, what: Callable[[Any], None], whom: Any = None, timer: Timer | None = None) -> None:
        order = next(self._order)
        if timer is not None:
            timer.order = order
        heapq.heappush(self._events, (time, order, what, whom, timer))

    # -- admission ----------------------------------------------------------------------------------------------------

    def _ask(self, replica: SimulatedReplica) -> None:
        want = replica.lookahead.want
        replica.resting = not want
        if want:
            self._asking.append(TicketRequest(str(replica.place), want, replica.lookahead.load))
            self._serve()

    def _serve(self) -> None:
        room = self.policy.room
        if not self._asking or not room:
            return
        deal(self._asking, room, self._issue)
        waiting = []
        for asking in self._asking:
            if asking.tickets:
                self._at(self.now + self.scene.hand_over.message_s, self._admitted, asking)
            else:
                waiting.append(asking)
        self._asking = waiting

    def _issue(self) -> Ticket:
        sequence = self.policy.admit()
        return Ticket(sequence, sequence)  # nothing fails: an ordinal is admitted once

    def _admitted(self, asking: TicketRequest) -> None:
        replica = self._replicas[int(asking.replica)]
        engine, n = replica.engine, self.scene.n
        engine.advance(self.now)
        for ticket in asking.tickets:
            engine.add(Group(ticket.sequence, n, replica.place))
        replica.lookahead.admit(len(asking.tickets))
        replica.generating += len(asking.tickets)
        replica.making += len(asking.tickets)
        replica.note(self.now)
        self._enter(replica)
        if replica.lookahead.has_room or not self.scene.hand_over.interval_s:
            self._ask(replica)
            return
        replica.resting = True
        self._at(self.now + self.scene.hand_over.interval_s, self._rested, replica, replica.rest)

    def _rested(self, replica: SimulatedReplica) -> None:
        if replica.resting:
            self._ask(replica)

    # -- generation ---------------------------------------------------------------------------------------------------

    def _enter(self, replica: SimulatedReplica) -> None:
        """Fill free slots. `advance` has been called."""
        was = replica.engine.running
        replica.engine.enter()
        if not was and replica.engine.running:
            self._busy(1)
        self._expect(replica)

    def _expect(self, replica: SimulatedReplica) -> None:
        """Schedule the next end of a response; earlier expectations become void."""
        replica.decode.cancel()
        at = replica.engine.due_at()
        if at < math.inf:
            self._at(at, self._decoded, replica, replica.decode)

    def _decoded(self, replica: SimulatedReplica) -> None:
        ended = replica.engine.finish(self.now)
        if not replica.engine.running:
            self._busy(-1)
        self._expect(replica)
        replica.lookahead.release(len(ended))
        now, latencies, answer_at = self.now, self._latencies, self._answer_at
        for group in ended:
            latency_s = next(latencies)
            scored_at = answer_at(now, latency_s) if answer_at else now + latency_s
            if scored_at > group.scored_at:
                group.scored_at = scored_at
            group.unmade -= 1
            if not group.unmade:
                replica.generating -= 1
                if not replica.generating:
                    replica.note(self.now)
                self._at(group.scored_at, self._scored_whole, group)
        if replica.resting and replica.lookahead.has_room:
            self._ask(replica)

    def _scored_whole(self, group: Group) -> None:
        """Send a completely scored group to the queue, with others that finish at the same time."""
        replica = self._replicas[group.replica]
        self._sums["scored"] += self.scene.n
        replica.making -= 1
        replica.mail.append(group)
        if not replica.making:
            replica.note(self.now)
            replica.post.cancel()
            self._post(replica)
        elif len(replica.mail) == 1:
            self._at(self.now + self.scene.hand_over.linger_s, self._post, replica, replica.post)

    def _post(self, replica: SimulatedReplica) -> None:
        mail, replica.mail = replica.mail, []
        self._at(self.now + self.scene.hand_over.message_s, self._are_stored, mail)

    def _are_stored(self, groups: list[Group]) -> None:
        for group in groups:
            self.policy.finish(group.sequence)
            self._stored[group.sequence] = group
        self._take()
        self._bring()

    # -- training -----------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Take the groups of the next step as soon as there are enough."""
        if self._asks_for != self._begun + 1 or self._asks_for > self.scene.steps:
            return
        chosen = self.policy.select(self.scene.bounds.groups_per_step)
        if chosen:
            self._asks_for += 1
            groups = [self._stored.pop(sequence) for sequence in chosen]
            self._at(self.now + self.scene.hand_over.message_s, self._took, groups)

    def _took(self, groups: list[Group]) -> None:
        self._batch = groups
        if self._idle_since is not None:
            self._begin()

    def _begin(self) -> None:
        groups, self._batch = self._batch, None
        assert groups is not None
        sums = self._sums
        if self._idle_since is not None:
            sums["wait_batch"] += self.now - self._idle_since
            self._idle_since = None
        self._begun += 1
        version, bounds = self._version, self.scene.bounds
        for group in groups:
            lag = version - group.version
            assert 0 <= lag <= bounds.max_lag, f"lag {lag}, and the bound is {bounds.max_lag}"
            self._lags[lag] += 1
            sums["tokens"] += group.tokens
        sums["groups"] += len(groups)
        self._training, self._groups = True, groups
        self._work_s = self.scene.training.step_s(self._tokens_of(groups)) * next(self._varies)
        self._began_at = self._work_at = self.now
        self._pace = self.scene.slowdown.training if self._engines_busy else 1.0
        self._expect_trained()
        self._slow_engines(self.scene.slowdown.generation)
        self._take()

    def _tokens_of(self, groups: list[Group]) -> float:
        prompts = len(groups) * self.scene.n * self.scene.training.prompt_tokens
        return prompts + sum(group.tokens for group in groups)

    def _expect_trained(self) -> None:
        self._at(self.now + self._work_s * self._pace, self._trained, None, self._train_timer)

    def _trained(self, _: None) -> None:
        self._sums["train"] += self.now - self._began_at
        self._training = False
        self._steps_done += 1
        self._mark(self._steps_done)
        self._slow_engines(1.0)
        self._steps_in_version += 1
        pack_s = 0.0
        if self._steps_in_version >= self.scene.bounds.steps_per_version:
            self._steps_in_version, pack_s = 0, self.scene.training.pack_s
            self._version += 1
        self._sums["pack"] += pack_s
        self._at(self.now + pack_s, self._packed, self._groups)

    def _packed(self, groups: list[Group]) -> None:
        self._at(self.now + self.scene.hand_over.message_s, self._committed, groups)
        self._idle_since = self.now
        if self._batch is not None:
            self._begin()

    def _committed(self, groups: list[Group]) -> None:
        if self.policy.commit(group.sequence for group in groups):
            self._pending = self.policy.version
            self._bring()
        self._serve()
        self._take()

    # -- weights ------------------------------------------------------------------------------------------------------

    def _bring(self) -> None:
        if self._loading or self._pending is None or (self.scene.bounds.drain and not self.policy.settled):
            return
        version, self._pending = self._pending, None
        self._loading = True
        self._at(self.now + self.scene.weights.transfer_s, self._pause, version)

    def _pause(self, version: int) -> None:
        pause_s, self._paused_at = self.scene.weights.pause_s, self.now
        if pause_s:
            for replica in self._replicas:
                replica.engine.advance(self.now)
                replica.engine.paused = True
                self._expect(replica)
        self._at(self.now + pause_s, self._loaded, version)

    def _loaded(self, version: int) -> None:
        for replica in self._replicas:
            replica.engine.advance(self.now)
            replica.engine.version = version
            if replica.engine.paused:
                replica.engine.paused = False
                self._expect(replica)
        self._loading, self._paused_at = False, math.inf
        self._sums["load_weights"] += self.scene.weights.pause_s * len(self._replicas)
        self.policy.publish(version)
        self._serve()
        self._bring()

    # -- side by side -------------------------------------------------------------------------------------------------

    def _busy(self, more: int) -> None:
        """Handle an engine that starts or stops decoding; the first slows the trainer, the last releases it."""
        before = self._engines_busy
        self._engines_busy += more
        if self.scene.slowdown.training == 1.0 or not self._training or bool(before) == bool(self._engines_busy):
            return
        self._work_s -= (self.now - self._work_at) / self._pace
        self._work_at = self.now
        self._pace = self.scene.slowdown.training if self._engines_busy else 1.0
        self._expect_trained()

    def _slow_engines(self, factor: float) -> None:
        if self.scene.slowdown.generation == 1.0:
            return
        for replica in self._replicas:
            replica.engine.advance(self.now)
            replica.engine.slow(factor)
            self._expect(replica)

    # -- accounts -----------------------------------------------------------------------------------------------------

    def _mark(self, step: int) -> None:
        """Record the sums at the end of a step that is measured."""
        if step not in (*self.scene.measured, self.scene.steps):
            return
        sums = self._sums.copy()
        sums["load_weights"] += max(0.0, self.now - self._paused_at) * len(self._replicas)
        for replica in self._replicas:
            replica.engine.advance(self.now)
            sums["engine_busy"] += replica.engine.busy_s
            sums["slots_in_use"] += replica.engine.sequence_s / self.scene.generation.slots
            for name, seconds in replica.spans(self.now).items():
                sums[name] += seconds
        self._marks[step] = Mark(self.now, sums, self._lags.copy())

    def _outcome(self) -> Outcome:
        first, last = self.scene.measured
        before, after = self._marks[first], self._marks[last]
        wall_s = after.at_s - before.at_s
        sums = {name: value - before.sums[name] for name, value in after.sums.items()}
        share = {name: value / (wall_s * len(self._replicas)) for name, value in sums.items()}
        lags = [after.lags[lag] - before.lags[lag] for lag in range(max(after.lags) + 1)]
        groups = int(sums["groups"])
        return Outcome(
            steps=last - first,
            wall_s=wall_s,
            groups=groups,
            samples=groups * self.scene.n,
            tokens=int(sums["tokens"]),
            waits={
                "trainer": {name: sums[name] / wall_s for name in ("train", "wait_batch", "pack")},
                "rollouter": {name: share.get(name, 0.0) for name in (*DOING, "load_weights")},
            },
            engine_busy=share["engine_busy"],
            slots_in_use=share["slots_in_use"],
            lag_mean=sum(lag * many for lag, many in enumerate(lags)) / groups,
            lag_max=max((lag for lag, many in enumerate(lags) if many), default=0),
            lag_counts=lags,
            scores_per_s=sums["scored"] / wall_s,
            held_back=self._judge.held_back_s / self.now if self.scene.scores.per_s is not None else None,
            whole_s=self._marks[self.scene.steps].at_s,
            busy_per_token_s=sum(replica.engine.busy_s for replica in self._replicas)
            / sum(replica.engine.tokens for replica in self._replicas),
            lives=self.policy.trained,
        )


def simulate(scene: Scene, *, seed: int = 0) -> Outcome:
    return Simulation(scene, seed=seed).run()


SLACK = 1e-6
"""Tolerance for adding fractions of steps."""


class Group:
    """One group on its way."""

    __slots__ = ("replica", "scored_at", "sequence", "tokens", "unmade", "unstarted", "version")

    def __init__(self, sequence: int, n: int, replica: int) -> None:
        self.sequence = sequence
        self.replica = replica
        self.unstarted = n
        """Responses without a slot so far."""
        self.unmade = n
        """Responses that are not generated yet."""
        self.scored_at = 0.0
        """When the last finished response will be scored."""
        self.tokens = 0
        self.version = -1
        """The engine's version at its first token."""


class SimulatedEngine:
    """Ends every added response once, after as many steps as it has tokens."""

    def __init__(self, model: Generation, lengths: Iterator[int]) -> None:
        self._model = model
        self._lengths = lengths
        self._at = 0.0
        self._steps = 0.0
        self._token_s = model.step_s
        self._stall_s = 0.0  # time for prompts that must be read before the next step
        self._due: dict[int, list[Group]] = {}
        self._keys: list[int] = []  # keys of `_due`, a heap
        self._waiting: deque[Group] = deque()
        self._samples_waiting = 0
        self.running = 0
        self.version = 0
        self.paused = False
        self.slowed = 1.0
        """Factor by which other work slows it."""
        self.busy_s = 0.0
        self.sequence_s = 0.0
        """Busy time weighted with the running sequences."""
        self.tokens = 0
        """Tokens of samples that have or had a slot."""

    def advance(self, now: float) -> None:
        elapsed = now - self._at
        self._at = now
        if not self.running or self.paused:
            return
        self.busy_s += elapsed
        self.sequence_s += elapsed * self.running
        if self._stall_s:
            if self._stall_s >= elapsed:
                self._stall_s -= elapsed
                return
            elapsed -= self._stall_s
            self._stall_s = 0.0
        self._steps += elapsed / self._token_s

    def due_at(self) -> float:
        """Return when the next response ends if nothing changes."""
        if not self.running or self.paused:
            return math.inf
        return self._at + self._stall_s + max(0.0, self._keys[0] - self._steps) * self._token_s

    def add(self, group: Group) -> None:
        """Queue a group's responses. Call after `advance`; `enter` then gives them slots."""
        self._waiting.append(group)
        self._samples_waiting += group.unstarted

    def finish(self, now: float) -> list[Group]:
        """Finish the step at `due_at`: return the group of each ended response. Waiting samples take their slots."""
        self.advance(now)
        step = heapq.heappop(self._keys)
        self._steps = float(step)
        ended = self._due.pop(step)
        self.running -= len(ended)
        self.enter()
        return ended

    def enter(self) -> None:
        """Fill free slots with waiting samples, but not a few at a time."""
        model = self._model
        free = model.slots - self.running
        if self._waiting and free and (not self.running or free >= min(model.refill, self._samples_waiting)):
            start = math.ceil(self._steps - SLACK)
            if not self.running:
                self._steps = float(start)
            due, lengths, keys, waiting = self._due, self._lengths, self._keys, self._waiting
            apart = model.resolution
            while free and waiting:
                group = waiting[0]
                count = min(free, group.unstarted)
                if group.version < 0:
                    group.version = self.version
                    self._stall_s += model.prefill_s * self.slowed
                for _ in range(count):
                    length = next(lengths)
                    group.tokens += length
                    self.tokens += length
                    step = start + length
                    if apart > 1:
                        step = max((step + apart // 2) // apart, start // apart + 1) * apart
                    if step not in due:
                        due[step] = []
                        heapq.heappush(keys, step)
                    due[step].append(group)
                free -= count
                self.running += count
                self._samples_waiting -= count
                group.unstarted -= count
                if not group.unstarted:
                    waiting.popleft()
        self._token_s = model.token_s(self.running) * self.slowed

    def slow(self, factor: float) -> None:
        """Change the slowdown. Call after `advance`."""
        self._stall_s *= factor / self.slowed
        self.slowed = factor
        self._token_s = self._model.token_s(self.running) * factor


DOING = ("generate", "wait_reward", "wait_room")


class SimulatedReplica:
    """State of a simulated rollouter; `Simulation` decides what happens."""

    def __init__(self, place: int, engine: SimulatedEngine, *, slots: int, n: int) -> None:
        self.place = place
        self.engine = engine
        self.lookahead = Lookahead(capacity=max(1, slots // n), n=n)
        self.generating = 0
        self.making = 0
        """Groups in generation or scoring."""
        self.resting = False
        """It asks again when responses leave the engine, or after the interval."""
        self.mail: list[Group] = []
        self.decode, self.rest, self.post = Timer(), Timer(), Timer()
        self._doing = "wait_room"
        self._since = 0.0
        self._spent = dict.fromkeys(DOING, 0.0)

    def note(self, now: float) -> None:
        """Update its activity, by the rule of `Rollouter`."""
        doing = "generate" if self.generating else "wait_reward" if self.making else "wait_room"
        if doing != self._doing:
            self._spent[self._doing] += now - self._since
            self._doing, self._since = doing, now

    def spans(self, now: float) -> dict[str, float]:
        """Return seconds by activity until now."""
        return {**self._spent, self._doing: self._spent[self._doing] + now - self._since}


def deal(asking: Sequence[TicketRequest], room: int, issue: Callable[[], Ticket]) -> None:
    """Give up to `room` tickets to the requests, least loaded first."""
    order = [(one.pressure, place) for place, one in enumerate(asking) if len(one.tickets) < one.want]
    heapq.heapify(order)
    while room and order:
        _, place = order[0]
        one = asking[place]
        one.tickets.append(issue())
        room -= 1
        if len(one.tickets) < one.want:
            heapq.heapreplace(order, (one.pressure, place))
        else:
            heapq.heappop(order)


SAVED_S = 1.0
"""An idle judge saves up the requests of this time, which may then come at once."""


class JudgeQueue:
    """Says when each response will be scored: in the order of requests, at most `knee` at a time and `rate_per_s`."""

    def __init__(self, scores: Scores) -> None:
        self._knee = scores.knee or math.inf
        self._gap_s = 0.0 if scores.rate_per_s is None else 1 / scores.rate_per_s
        self._next_at = 0.0
        self._ends: list[float] = []  # of the last `knee` requests, a heap
        self._waits_until = 0.0
        self.held_back_s = 0.0
        """Seconds in which responses waited to be sent."""

    def answer_at(self, now: float, latency_s: float) -> float:
        starts_at = max(now, self._next_at - SAVED_S)
        if len(self._ends) >= self._knee:
            starts_at = max(starts_at, heapq.heappop(self._ends))
        if self._knee < math.inf:
            heapq.heappush(self._ends, starts_at + latency_s)
        self._next_at = max(starts_at, self._next_at) + self._gap_s
        self.held_back_s += max(0.0, starts_at - max(now, self._waits_until))
        self._waits_until = max(self._waits_until, starts_at)
        return starts_at + latency_s


MOST_GROUPS = 768
"""Most groups per step of a slice: their lengths average to within a percent."""
LEAST_REPLICAS = 8
"""Fewest engines of a slice. One is enough if each has that many groups."""


def simulate_slice(scene: Scene, *, seed: int = 0) -> Outcome:
    """Simulate a scene of any size; small ones are simulated whole."""
    one, parts = slice_of(scene)
    found = simulate(one, seed=seed)
    if parts == 1.0:
        return found
    counts = {name: round(getattr(found, name) * parts) for name in ("groups", "samples", "tokens", "lives")}
    return msgspec.structs.replace(
        found,
        **counts,
        lag_counts=[round(count * parts) for count in found.lag_counts],
        scores_per_s=found.scores_per_s * parts,
    )


def slice_of(scene: Scene) -> tuple[Scene, float]:
    """Return a slice, and how many slices make the whole."""
    bounds, made, scores = scene.bounds, scene.generation, scene.scores
    fewest = LEAST_REPLICAS if bounds.groups_per_step < MOST_GROUPS * made.replicas else 1
    into = min(bounds.groups_per_step // MOST_GROUPS, made.replicas // fewest)
    if into < 2:
        return scene, 1.0
    replicas = round(made.replicas / into)
    groups = round(bounds.groups_per_step * replicas / made.replicas)
    parts = bounds.groups_per_step / groups
    of_slice = replace(
        scene,
        bounds=replace(
            bounds,
            groups_per_step=groups,
            window=round((bounds.window - 1) / parts) + 1,
            max_alive=max(groups * bounds.steps_per_version, round(bounds.max_alive / parts)),
            total_groups=scene.steps * groups,
        ),
        generation=replace(made, replicas=replicas),
        scores=replace(
            scores,
            knee=None if scores.knee is None else max(1, round(scores.knee / parts)),
            rate_per_s=None if scores.rate_per_s is None else scores.rate_per_s / parts,
        ),
        training=replace(scene.training, per_token_s=scene.training.per_token_s * parts),
    )
    return of_slice, parts
