"""A training run as a real tree of processes, disturbed and inspected from outside.

    Disturbed ── starts ──▶ freewheel train … (a session of its own: driver, Ray, actors)
        │  kill, stop, fill its disk, damage its files                    │
        └──◀── witness.jsonl (written by the trainer), metrics.jsonl, journal, `freewheel inspect` ──┘

Used by `scenarios.py`. It only signals processes of the session that it started, and none of them outlives a scenario.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from freewheel.observe.recorder import read_metrics
from freewheel.queue.journal import Journal

from .account import Kill, Result, Trained, audit_witness, last_reward

HERE = Path(__file__).parent
JOURNAL = "journal.sqlite"
STUCK_S = 120.0
"""Longest wait for anything. Recoveries take seconds, or tens of seconds on a busy machine."""
GONE_S = 20.0
"""Longest time for components to end after their driver was killed; Ray's workers notice within three seconds."""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
LOOK_S = 0.005
"""Time between two looks at a file. Steps take tenths of a second, saves hundredths."""
NAP_S = 0.1
FOREIGN = ("RAY_ADDRESS", "OPENAI_API_KEY", "PYTHONPATH")
"""Variables that would change a run."""
WHOLE = ("tree", "driver", "raylet")
"""Targets that are killed with everything that they started."""

SMALL: dict[str, Any] = {
    "trainer.total_steps": 40,
    "trainer.save_every_steps": 4,
    "trainer.trainer_class": "user_code:WitnessTrainer",
    "reward.function": "user_code:slow_score",
    "eval.prompts": 0,
    "eval.at_start": "false",
    "recovery.max_restarts": 100,
    "recovery.backoff_s": 0.1,
    "async_training.batch_timeout": 10,
}
"""The default run: 40 steps of 32 groups of 8, in which the embedded model learns from 0.33 to 0.9 in ten seconds. It
saves every fourth step and allows more restarts than any plan has kills."""
GROUPS_PER_STEP = 32

Moment = Callable[[], object]
"""Returns at the moment."""


def _at_once() -> None:
    pass


class Stuck(Exception):
    """The awaited event did not happen. The message describes the run."""


class Finished(Exception):
    """The run ended before the awaited event."""


class Family:
    """The processes that a harness started and their descendants, found by their session, which outlives a parent. Only
    its members are signalled."""

    def __init__(self) -> None:
        self._sessions: list[int] = []

    def adopt(self, leader: int) -> None:
        """All processes in the session of `leader`, now and later."""
        self._sessions.append(leader)

    def has(self, pid: int) -> bool:
        """Whether `pid` is a live member."""
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            return os.getsid(pid) in self._sessions and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        return False

    def members(self) -> list[int]:
        return [pid for pid in psutil.pids() if self.has(pid)]

    def below(self, pid: int, title: str) -> list[int]:
        """Return members below `pid` with `title` in their command line."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = {child.pid for child in psutil.Process(pid).children(recursive=True)}
            return [child for child in children if title in _title(child) and self.has(child)]
        return []

    def titles(self) -> list[str]:
        return [f"{pid} {_title(pid)[:60]}" for pid in self.members()]

    def end(self) -> None:
        for _ in range(3):  # one that was starting another meanwhile is found the next time
            members = self.members()
            signal_all(members, signal.SIGKILL)
            if not members:
                return
            time.sleep(NAP_S)


def signal_all(pids: list[int], *numbers: signal.Signals) -> None:
    for number in numbers:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _title(pid: int) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return " ".join(psutil.Process(pid).cmdline()).strip()
    return ""


class Disturbed:
    """A run that is started, disturbed, resumed and audited."""

    def __init__(
        self, folder: Path, *, scenario: str, seed: int, settings: Mapping[str, Any], prompts: int | None = None
    ) -> None:
        """`settings`: changes to `SMALL`. `prompts`: their number, if they run out before the last step. `run_dir`,
        `settings` and `env` may be changed until the start."""
        self.run_dir = folder / "run"
        self.output = folder / "output"
        self.scenario, self.seed = scenario, seed
        self.kills: list[Kill] = []
        self.problems: list[str] = []
        self.settings = SMALL | dict(settings)
        self.wanted_kills = 0
        self.judge: Any = None
        self.total = prompts or int(self.settings["trainer.total_steps"]) * GROUPS_PER_STEP
        self._witness = folder / "witness.jsonl"
        self._ray = tempfile.mkdtemp(prefix="fwc-", dir="/tmp")  # short: sockets in it may have 107 characters
        self.env = {name: value for name, value in os.environ.items() if name not in FOREIGN} | {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "RAY_TMPDIR": self._ray,
            "FREEWHEEL_CACHE_DIR": str(folder / "cache"),
            "FREEWHEEL_CHAOS_WITNESS": str(self._witness),
        }
        self.family = Family()
        self._struck: set[int] = set()
        self._program: subprocess.Popen[bytes] | None = None
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end_all()
        shutil.rmtree(self._ray, ignore_errors=True)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the run, or resume it if it exists."""
        resumes = (self.run_dir / "config.yaml").is_file()
        told = [f"{key}={value}" for key, value in self.settings.items()]
        where = [f"resume={self.run_dir}"] if resumes else [f"run_dir={self.run_dir}", *told]
        with self.output.open("a") as output:
            self._program = subprocess.Popen(
                [sys.executable, "-m", "freewheel", "train", "--plain", *where],
                cwd=HERE.parent / "user_code",
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.family.adopt(self._program.pid)
        return self

    @property
    def program(self) -> subprocess.Popen[bytes]:
        assert self._program is not None, "start it first"
        return self._program

    @property
    def running(self) -> bool:
        return self._program is not None and self._program.poll() is None

    def finish(self, *, expect: Collection[int] = (0,)) -> int:
        """Wait for the end, and check that no process is left."""
        seen, since = -1, time.monotonic()
        while self.running:
            if (now := len(self.witnessed())) != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > STUCK_S:
                raise self._stuck("the end of the run")
            time.sleep(NAP_S)
        code = self.program.wait()
        if code not in expect:
            self.problems.append(f"ended with exit code {code}: {self._last_words()}")
        self.wait_gone()
        return code

    def to_the_end(self) -> None:
        """Resume a run that ended before its last step. That is a problem unless the whole run was killed."""
        code = self.finish()
        for _ in range(3):
            if code == 0:
                return
            code = self.start().finish()

    def wait_gone(self) -> None:
        """Check that no component is left. Ray's own agents hold nothing of the run and take a minute to notice a dead
        raylet; they are killed here."""
        deadline = time.monotonic() + GONE_S
        while left := [title for title in self.family.titles() if not title.endswith(AGENTS)]:
            if time.monotonic() > deadline:
                self.problems.append(f"left behind: {', '.join(left)}")
                break
            time.sleep(NAP_S)
        self._end_all()

    def _end_all(self) -> None:
        self.family.end()
        if self._program is not None:
            self._program.wait()

    # -- looking ------------------------------------------------------------------------------------------------------

    def witnessed(self) -> list[Trained]:
        """Return all steps that any trainer of this run trained, in order, including undone ones."""
        if not self._witness.exists():
            return []
        return [Trained.read(line) for line in self._witness.read_bytes().splitlines()]

    @property
    def step(self) -> int:
        return max((one.step for one in self.witnessed()), default=0)

    def times_trained(self, step: int) -> int:
        return sum(one.step == step for one in self.witnessed())

    def processes(self) -> dict[str, int]:
        """Return the newest process of each role, as the run reported it."""
        return {row["role"]: row["process"] for row in read_metrics(self.run_dir, "event") if "role" in row}

    def commits(self) -> list[float]:
        """Return the wall-clock times at which steps were committed, in order."""
        try:
            journal = Journal(self.run_dir / JOURNAL, readonly=True)
        except Exception:  # noqa: BLE001  # it is being moved or made just now; there is another look
            return []
        with contextlib.closing(journal):
            return [step.wall_s for step in journal.steps(after=0) if step.version is not None]

    def checkpoints(self) -> set[str]:
        return {path.name for path in (self.run_dir / "checkpoints").glob("step_*")}

    def saving(self) -> bool:
        folder = self.run_dir / "checkpoints"
        return folder.is_dir() and any(folder.glob(".tmp-*"))

    def log(self) -> str:
        path = self.run_dir / "fully_async_training.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, what: str, holds: Callable[[], Any], *, nap_s: float = LOOK_S) -> Any:
        """Wait for a true value of `holds` and return it. `Finished`: the run finished first. `Stuck`: it ended
        otherwise, or took too long."""
        deadline = time.monotonic() + STUCK_S
        while True:
            if found := holds():
                return found
            if not self.running and self.program.returncode == 0:
                raise Finished(what)
            if not self.running or time.monotonic() > deadline:
                raise self._stuck(what)
            time.sleep(nap_s)

    def wait_step(self, step: int) -> None:
        self.wait(f"step {step}", lambda: self.step >= step)

    def _stuck(self, what: str) -> Stuck:
        state = "runs" if self.running else f"ended with {self.program.returncode}"
        return Stuck(f"waited for {what}; the program {state} at step {self.step}: {self._last_words()}")

    def _last_words(self) -> str:
        said = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        bad = [line for line in self.log().splitlines() if " ERROR " in line]
        return " | ".join([*said[-4:], *bad[-2:]])[-1500:]

    # -- striking -----------------------------------------------------------------------------------------------------

    def find(self, role: str) -> int:
        """Return the live process of `role` (`rollouter`: the first one). Waits while it is being started."""

        def live() -> int | None:
            for name, pid in sorted(self.processes().items()):
                fresh = pid not in self._struck  # one that was struck may take a moment to go
                if name.split("-")[0] == role and fresh and self.family.has(pid):
                    return pid
            return None

        return int(self.wait(f"a live {role}", live, nap_s=NAP_S))

    def strike(
        self, *roles: str, number: signal.Signals = signal.SIGKILL, during: str = "", at: Moment = _at_once
    ) -> None:
        """Signal the processes of `roles` when `at` returns. Looks them up before: that takes longer than some
        moments."""
        victims = [(role, self.find(role)) for role in roles]
        at()
        self._send(victims, number, during)

    def strike_pid(self, role: str, pid: int) -> None:
        self._send([(role, pid)], signal.SIGKILL, "")

    def children_of(self, role: str, title: str) -> list[int]:
        return self.family.below(self.find(role), title)

    def strike_tree(self, during: str = "", at: Moment = _at_once) -> None:
        """Kill everything at once, as when a machine goes down: no process sees another die."""
        members = self.family.members()
        at()
        signal_all(members, signal.SIGSTOP, signal.SIGKILL)
        self._note("tree", "SIGKILL", during)
        self._end_all()

    def strike_driver(self) -> None:
        self._note("driver", "SIGKILL", "")
        self.program.kill()
        self.program.wait()

    def interrupt(self) -> None:
        """Send Ctrl-C as a terminal does, to the whole foreground group."""
        os.killpg(self.program.pid, signal.SIGINT)

    def _send(self, victims: list[tuple[str, int]], number: signal.Signals, during: str) -> None:
        for role, pid in victims:
            with contextlib.suppress(ProcessLookupError):
                if self.family.has(pid):
                    os.kill(pid, number)
                    self._struck.add(pid)
                    self._note(role, number.name, during)

    def _note(self, role: str, how: str, during: str) -> None:
        self.kills.append(Kill(role=role, how=how, during=during, step=self.step, at_s=time.time()))

    # -- the account --------------------------------------------------------------------------------------------------

    def inspect(self) -> dict[str, Any]:
        """Return the output of `freewheel inspect RUN --json`, with its `exit_code`."""
        done = subprocess.run(
            [sys.executable, "-m", "freewheel", "inspect", str(self.run_dir), "--json"],
            capture_output=True, text=True, timeout=STUCK_S, check=False,
        )  # fmt: skip
        try:
            return {**json.loads(done.stdout), "exit_code": done.returncode}
        except ValueError:
            return {"exit_code": done.returncode, "error": (done.stderr or done.stdout).strip()[-500:]}

    def result(self) -> Result:
        """Compare the run's audit with the witness's: every number of violations must be 0."""
        total = None if self.settings.get("algorithm.zero_variance") == "drop" else self.total
        told, seen = self.inspect(), audit_witness(self.witnessed(), total=total, max_lag=self._max_lag)
        problems = list(self.problems)
        if "error" in told:
            problems.append(f"freewheel inspect: {told['error']}")
        elif told["exit_code"] != 0 or told["steps"] != -(-self.total // GROUPS_PER_STEP):
            problems.append(f"freewheel inspect: exit code {told['exit_code']}, {told['steps']} steps")
        if not (self.run_dir / "final" / "model.safetensors").is_file():
            problems.append("there are no final weights")
        for name in ("lost", "repeated", "stale_trained"):
            if told.get(name, 0) != getattr(seen, name):
                problems.append(f"{name}: the run says {told.get(name)}, the witness {getattr(seen, name)}")
        return Result(
            scenario=self.scenario,
            seed=self.seed,
            kills=self._recoveries(),
            lost=max(seen.lost, told.get("lost", 0)),
            repeated=max(seen.repeated, told.get("repeated", 0)),
            stale_trained=max(seen.stale_trained, told.get("stale_trained", 0)),
            violations=tuple(map(str, told.get("violations", ()))),
            problems=tuple(problems + seen.problems),
            reward=last_reward(self.witnessed()),
            seconds=time.monotonic() - self._began_s,
        )

    @property
    def _max_lag(self) -> int:
        """Return `async_training.max_staleness_allowed`; the synchronous modes have a lower bound."""
        return {"sync": 0, "one_step_off": 1}.get(str(self.settings.get("mode")), 5)

    def _recoveries(self) -> list[Kill]:
        """Add to each kill the seconds until the run committed a step with the replacement. After a kill of the driver
        that is a run with a new queue, because the old queue lives on for a moment."""
        starts = [
            (row["role"].split("-")[0], row["time"]) for row in read_metrics(self.run_dir, "event") if "role" in row
        ]
        commits = self.commits()
        found = []
        for kill in self.kills:
            role = "queue" if kill.role in WHOLE else kill.role
            known = any(name == role for name, _ in starts)
            back_s = next((at for name, at in starts if name == role and at > kill.at_s), None) if known else kill.at_s
            found.append(kill.recovered(back_s and next((at for at in commits if at > back_s), None)))
        return found
