"""Disturbs a run of `mtpctl train` at random, and starts the command again after it ended: for the tests of `test_chaos`.

The run is the whole main job at toy size, with a log-prob server. Each event has a progress at which it is due, in updates of both stages,
and a moment to wait for then: any, a sync, or a save. Seed and recipe give the events, which are recorded with what became of them. Another
kind of event is a case of `Disturbed.happen` and a name among the kinds.

A separate mount namespace gives the run a small disk and a small shared memory, so that both can be filled. Where the machine does not
allow that, those events are left out.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from mtpctl.errors import UserError
from mtpctl.telemetry.metrics_file import read_rows
from tests.environment import with_tree
from tests.fakes.chaos_damage import Damage, damage_checkpoint, damage_model, damage_pointer, damage_record, unnoticed, whole_in
from tests.fakes.processes import runs

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_mtp.yaml"
SFT_STEPS = 20
JUDGE = """\
def score(response, problem, sample):
    return sum(sample.response_ids.tolist()) % 2
"""
"""A reward that is 1 for every other response: most groups have signal, and one in eight is dropped."""
SETTINGS = (
    f"train.sft.steps={SFT_STEPS}",
    "train.sft.until_loss=0",
    "train.sft.batch_size=16",
    "train.rl.prompts_per_step=4",
    "train.rl.group_size=4",
    "train.rl.dynamic_sampling=true",
    "train.rl.entropy_coef=0.001",
    "train.rl.optimizer.lr=1e-5",
    "train.eval_every=0",
    "train.checkpoint_every=2",
    "train.keep_checkpoints=2",
    "train.max_restarts=1000",
    "rollout.max_restarts=1000",
    "logprob.max_restarts=1000",
    "rollout.max_tokens=40",
    "rollout.deadline_s=20",
    "sync.deadline_s=20",
    "sync.verify=always",
    "cluster.step_deadline_s=180",
    "telemetry.samples=1000",
    "data.task={name: addition, max_digits: 2, train_size: 5000, eval_size: 8}",
)
SERVER = ("logprob.standalone=true",)
REPLICAS = (1, 3)
"""The least and the most rollout replicas of a run whose replicas come and go."""
ELASTIC = f"rollout.replicas={{min: {REPLICAS[0]}, max: {REPLICAS[1]}}}"
ONE_HOST = (f"cluster.num_cpus={2 + REPLICAS[1]}",)
TRAINER, ROLLOUT, LOGPROB = "TrainerRank", "RolloutActor", "ScoreRank"
KINDS = (
    *(f"{what} {whom}" for whom in (TRAINER, ROLLOUT, LOGPROB) for what in ("kill", "kill", "pause", "stop")),
    *("command killed", "command killed", "command ended", "gcs killed"),
    *("group SIGTERM", "group SIGINT", "group SIGHUP"),
    *("damage checkpoint", "damage checkpoint", "damage checkpoint", "damage checkpoint of the trainer", "damage pointer"),
    *("damage model", "damage record", "join without trainer"),
)
IN_SFT = 0.1
"""The share of events in the supervised stage."""
FILLS = ("fill memory", "fill disk")
"""Events that need a mount namespace."""
SCALES = ("scale rollout",) * 3
"""Events that need replicas that come and go: another number of them is asked for than before."""
HOST_KINDS = (*("host gone" for _ in range(4)), *(f"kill {whom}" for whom in (TRAINER, ROLLOUT, LOGPROB)), "command killed")
"""Events of a run over several hosts."""
ENDS = {
    "command killed": {-signal.SIGKILL},
    "command ended": {143, -signal.SIGTERM},
    "group SIGTERM": {143, -signal.SIGTERM},
    "group SIGINT": {130, -signal.SIGINT},
    "group SIGHUP": {129, -signal.SIGHUP},
    "gcs killed": {5},
    # The run ends if groups that it needs again were forgotten with the damaged checkpoint.
    "damage checkpoint of the trainer": {5},
    **{f"damage {what}": {-signal.SIGKILL, 143, -signal.SIGTERM} for what in ("checkpoint", "pointer", "model", "record")},
    "fill disk": {5},
    "fill memory": {3, 5},
}
"""The exit codes with which the command may end after an event, to be started again. It goes on by itself after all others."""
LONG_S = {TRAINER: 190.0, ROLLOUT: 120.0, LOGPROB: 120.0}
"""Longer than the deadlines of calls to these actors in the settings above."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
"""Ray starts actors at nice 15, where whatever else the machine does would stop them for longer than any event here."""
DISK, MEMORY = "512m", "256m"
END_S = 300.0
"""In which a run that nothing disturbs any more has to go on."""
MARK = "MTPCTL_CHAOS_RUN"
"""A variable in the environment of all processes of a run, with a unique value."""
LEFT_S = 60.0
"""In which all processes of a command have to end after it, and its shared memory has to be freed."""


@dataclass
class Event:
    """A disturbance due after `due` updates of both stages, when `phase` begins; `happened` is its result."""

    due: int
    kind: str
    phase: str
    happened: str = ""
    at: float = 0.0


def drawn(seed: int, count: int, steps: int, kinds: Sequence[str]) -> list[Event]:
    """`count` events for a run of `steps` updates of RL, in the order in which they are due; each of `kinds` before one comes again."""
    draw = random.Random(seed)
    rounds = [kind for _ in range(-(-count // len(kinds))) for kind in draw.sample(list(kinds), len(kinds))]
    due = sorted(draw.randrange(1, SFT_STEPS) if draw.random() < IN_SFT else SFT_STEPS + draw.randrange(steps) for _ in range(count))
    return [Event(step, kind, draw.choice(("any", "sync", "save"))) for step, kind in zip(due, rounds, strict=False)]


class Space:
    """A mount namespace with a separate disk and shared memory, held open by a process that sleeps.

    `disk` is the path of the disk in the namespace. `seen` gives a path of the namespace as others see it. `works`: whether the machine
    allows it; the disk is a plain folder otherwise, and where it is not `wanted`.
    """

    def __init__(self, disk: Path, *, wanted: bool = True) -> None:
        disk.mkdir()
        mounts = [f"mount -t tmpfs -o size={size} tmpfs {place}" for size, place in ((MEMORY, "/dev/shm"), (DISK, disk))]
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", " && ".join([*mounts, "echo ready", "exec sleep inf"])]
        self.disk = disk
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        self.works = wanted and self._holder.stdout.readline().strip() == "ready"
        self.enter = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt"] if self.works else []

    def seen(self, path: Path) -> Path:
        return Path(f"/proc/{self._holder.pid}/root{path}") if self.works else path

    def fill(self, folder: str | Path) -> Path:
        """Take all room in the file system of a folder. Returns the file that takes it."""
        file = self.seen(Path(folder)) / "filler"
        with file.open("wb", buffering=0) as opened, suppress(OSError):
            while True:
                opened.write(bytes(1 << 16))
        return file

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


class Hosts:
    """Raylets of this machine that act as hosts: that of the command and `more`, with one CPU each."""

    def __init__(self, more: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(more):
            self.join()
        self.address = self._cluster.address

    def join(self) -> None:
        self._cluster.add_node(num_cpus=1, wait=False)

    def lose(self, draw: random.Random) -> str:
        """Kill the raylet of a host, but not of the command's. Returns its id."""
        nodes = sorted(self._cluster.worker_nodes, key=lambda node: node.node_id)
        alive = [node for node in nodes if node.all_processes.get("raylet") and node.all_processes["raylet"][0].process.poll() is None]
        node = draw.choice(alive)
        node.kill_raylet()
        return str(node.node_id)

    def close(self) -> None:
        self._cluster.shutdown()


@dataclass
class Disturbed:
    """A run in `folder` that is disturbed by `events`, on one host or on `hosts`. `exits`: the exit codes of its commands.

    `replicas`: how many rollout replicas were asked for last, in a run whose replicas come and go.
    """

    folder: Path
    sets: Sequence[str]
    events: Sequence[Event]
    space: Space
    seed: int = 0
    hosts: Hosts | None = None
    exits: list[int] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    replicas: int = REPLICAS[1]
    damages: list[Damage] = field(default_factory=list)
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _released: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.space.disk / "run"

    @property
    def seen(self) -> Path:
        """The run directory as this process sees it."""
        return self.space.seen(self.run_dir)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def rows(self) -> list[dict[str, Any]]:
        file = self.seen / "metrics.jsonl"
        with suppress(UserError):  # A damaged line, which the next start sets aside.
            self._rows = read_rows(file) if file.exists() else []
        return self._rows

    def progress(self) -> int:
        """The updates of both stages that were logged, repeated ones once."""
        last = {row["phase"]: row["step"] for row in self.rows() if "phase" in row}
        return last.get("sft", 0) if "rl" not in last else SFT_STEPS + last["rl"]

    def start(self) -> None:
        (self.folder / "judge.py").write_text(JUDGE)
        own = [f"reward.function={self.folder / 'judge.py'}:score", f"run_dir={self.run_dir}"]
        own += ONE_HOST if self.hosts is None else [f"cluster.address={self.hosts.address}"]
        sets = [part for text in (*SETTINGS, *self.sets, *own) for part in ("--set", text)]
        command = [*self.space.enter, sys.executable, "-m", "mtpctl", "train", str(RECIPE), "--plain", *sets]
        with self.log.open("ab") as log:
            environment = with_tree(**ENVIRONMENT, **{MARK: self._mark})
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=environment, start_new_session=True)

    def actors(self, kind: str) -> list[psutil.Process]:
        """The processes of the run's actors of a kind."""
        result = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if f"ray::{kind}" in " ".join(child.cmdline()):
                    result.append(child)
        return result

    # ------------------------------------------------------------------------------------------------------- events

    def happen(self, event: Event, draw: random.Random) -> str:
        """Inject the event into the run. Returns a description."""
        assert self.process is not None
        action, _, whom = event.kind.partition(" ")
        match action:
            case "kill" | "stop" | "pause":
                if not (actors := self._wait_for_actors(whom)):
                    return "no target was there"
                actor = draw.choice(actors)
                if action == "kill":
                    actor.kill()
                    return f"killed {actor.pid}"
                seconds = LONG_S[whom] if action == "stop" else draw.uniform(2, 8)
                actor.suspend()
                self._later(seconds, lambda: _resume(actor))
                return f"stopped {actor.pid} for {seconds:.0f} s"
            case "fill":
                file = self.space.fill("/dev/shm" if whom == "memory" else self.space.disk)
                seconds = draw.uniform(2, 10)
                self._later(seconds, lambda: file.unlink(missing_ok=True))
                return f"filled for {seconds:.0f} s"
            case "host":
                assert self.hosts is not None
                lost, seconds = self.hosts.lose(draw), draw.uniform(0, 15)
                self._later(seconds, self.hosts.join)
                return f"killed the raylet of {lost[:8]}, another joins after {seconds:.0f} s"
            case "scale":
                return self._scale(draw.choice([count for count in range(REPLICAS[0], REPLICAS[1] + 1) if count != self.replicas]))
            case "damage":
                return self._damage(whom, draw)
            case "join":
                return self._join(draw)
            case "command":
                number = signal.SIGKILL if whom == "killed" else signal.SIGTERM
                self.process.send_signal(number)
                return f"sent {number.name}"
            case "group":
                if self.process.poll() is not None:
                    return "no target was there"
                os.killpg(self.process.pid, signal.Signals[whom])  # Until it is waited for, its id is its own.
                return f"sent {whom} to the group"
            case "gcs":
                if not (servers := [child for child in psutil.Process(self.process.pid).children() if child.name() == "gcs_server"]):
                    return "no target was there"
                servers[0].kill()
                return f"killed {servers[0].pid}"
        raise AssertionError(f"no event is called {event.kind}")

    def _damage(self, what: str, draw: random.Random) -> str:
        """Damage files of the run: of a checkpoint while the trainer is killed, of others while no command runs."""
        assert self.process is not None
        root, log = self.seen / "checkpoints", self.log
        if what == "pointer" and draw.random() < 0.5:
            return damage_pointer(root, draw)
        end = time.monotonic() + LEFT_S
        while what.startswith("checkpoint") and len(whole_in(root)) < 2 and time.monotonic() < end and self.process.poll() is None:
            self._release()
            time.sleep(0.2)
        if what == "checkpoint of the trainer":
            trainers = self._wait_for_actors(TRAINER)
            message, damage = damage_checkpoint(root, draw, log.stat().st_size)
            for trainer in trainers if damage is not None else ():
                with suppress(psutil.Error):
                    trainer.kill()
            message += f", killed {len(trainers)} rank(s)"
        else:
            number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
            self.process.send_signal(number)
            self._wait_for_end()
            logged = log.stat().st_size
            match what:
                case "checkpoint":
                    message, damage = damage_checkpoint(root, draw, logged)
                case "model":
                    message, damage = damage_model(self.seen, draw, logged)
                case "record":
                    message, damage = damage_record(self.seen, draw, logged)
                case "pointer":
                    message, damage = damage_pointer(root, draw), None
                case _:
                    raise AssertionError(what)
            message = f"sent {number.name}, {message}"
        if damage is not None:
            self.damages.append(damage)
        return message

    def _join(self, draw: random.Random) -> str:
        """Kill the trainer, and have a replica join while it is being started again: another one, or one that is killed as well."""
        for actor in (trainers := self._wait_for_actors(TRAINER)):
            with suppress(psutil.Error):
                actor.kill()
        message = f"killed {len(trainers)} trainer rank(s)"
        if ELASTIC in self.sets and self.replicas < REPLICAS[1]:
            return f"{message}, {self._scale(self.replicas + 1)}"
        if not (engines := self.actors(ROLLOUT)):
            return f"{message}, no other target was there"
        engine = draw.choice(engines)
        engine.kill()
        return f"{message}, killed engine {engine.pid}"

    def _scale(self, replicas: int) -> str:
        """Request another number of rollout replicas with `mtpctl scale`, until it answers. Returns the answer."""
        assert self.process is not None
        command = [*self.space.enter, sys.executable, "-m", "mtpctl", "scale", str(self.run_dir), "--replicas", str(replicas)]
        before, code, message, end = self.replicas, 2, "", time.monotonic() + END_S
        while code == 2 and time.monotonic() < end and self.process.poll() is None:  # the run begins, or its disk is full
            asking = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder, env=with_tree()
            )
            while asking.poll() is None:
                self._release()
                time.sleep(0.05)
            code, message = asking.returncode, asking.communicate()[0].strip()
        if code == 0:
            self.replicas = replicas
        return f"asked for {replicas} replica(s) instead of {before}, exit code {code}: {message}"

    def _wait_for_actors(self, kind: str) -> list[psutil.Process]:
        """Wait for actors of a kind, which may be restarting, and return them."""
        assert self.process is not None
        end = time.monotonic() + END_S
        while not (result := self.actors(kind)) and time.monotonic() < end and self.process.poll() is None:
            self._release()
            time.sleep(0.05)
        return result

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._released.append((time.monotonic() + seconds, what))

    def _release(self, *, everything: bool = False) -> None:
        now = time.monotonic()
        for each in [each for each in self._released if everything or each[0] <= now]:
            self._released.remove(each)
            each[1]()

    def _in_phase(self, phase: str) -> bool:
        """Whether weights are being published, or a checkpoint is being written."""
        if phase == "sync":
            roots = [*self.space.seen(Path("/dev/shm")).glob("mtpctl-*"), self.seen / "versions"]
            return any(not (folder / "manifest.json").exists() for root in roots for folder in root.glob("v*"))
        return phase == "any" or any((self.seen / "checkpoints").glob("*.partial"))

    # -------------------------------------------------------------------------------------------------------- the run

    def drive(self, seconds: float) -> None:
        """Run to the end, with all events. Raises AssertionError if the run does not finish by itself."""
        draw, end = random.Random(self.seed), time.monotonic() + seconds
        waiting, may_end, moved, before = list(self.events), set[int](), time.monotonic(), -1
        remedied: list[Damage] = []
        self.start()
        try:
            while True:
                assert self.process is not None
                self._release()
                if (code := self.process.poll()) is not None:
                    self.exits.append(code)
                    self._record()
                    if code == 0:
                        self._check_left()
                        assert not (mistakes := self.unnoticed()), f"{mistakes}\n{self._told()}"
                        return
                    if code == 2 and code not in may_end and (damage := self._remedied()) is not None:
                        assert damage not in remedied, f"the remedy of the error did not help\n{self._told()}"
                        remedied.append(damage)
                        damage.remove()
                    else:
                        assert code in may_end, f"the run ended by itself with {code}\n{self._told()}"
                    if code > 0 or draw.random() < 0.5:  # A killed command is also started again while its processes end.
                        self._check_left()
                    self._release(everything=True)
                    may_end, moved = set(), time.monotonic()
                    self.start()
                now = time.monotonic()
                if (progress := self.progress()) != before:
                    before, moved = progress, now
                assert now < end, f"the time is up, with {len(waiting)} events to go\n{self._told()}"
                assert now - moved < END_S + max(LONG_S.values()), f"no update for {now - moved:.0f} s\n{self._told()}"
                if waiting and progress >= waiting[0].due:
                    event = waiting.pop(0)
                    self._wait_for(event.phase)
                    event.at, event.happened = time.monotonic(), self.happen(event, draw)
                    may_end |= ENDS.get(event.kind, set())
                    self._record()
                time.sleep(0.05)
        finally:
            self._record()
            self._release(everything=True)
            self.kill()

    def _remedied(self) -> Damage | None:
        """The damage that the error of the last command names, with a remedy."""
        log = self.log.read_text(errors="replace")
        return next((damage for damage in reversed(self.damages) if damage.remedy is not None and damage.lines(log)), None)

    def _wait_for(self, phase: str, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        assert self.process is not None
        while not self._in_phase(phase) and time.monotonic() < end and self.process.poll() is None:
            time.sleep(0.002)

    def _wait_for_end(self) -> None:
        """Wait until the command has ended and has left no process and no shared memory. Raises AssertionError after `LEFT_S`."""
        assert self.process is not None
        end = time.monotonic() + END_S
        while self.process.poll() is None and time.monotonic() < end:
            self._release()
            time.sleep(0.05)
        assert self.process.poll() is not None, f"the command does not end\n{self._told()}"
        self._check_left()

    def _check_left(self) -> None:
        """Wait until nothing is left of the command that has ended: no process, and no segment of shared memory."""
        end = time.monotonic() + LEFT_S
        while (left := [*self._processes(), *self._segments()]) and time.monotonic() < end:
            self._release()
            time.sleep(0.2)
        assert not left, f"left after the end of the command: {left}\n{self._told()}"

    def _processes(self) -> list[str]:
        """The processes that commands of the run have started, directly or not."""
        marked = []
        for process in psutil.process_iter() if self.hosts is None else ():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark and runs(process):
                    marked.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        return marked

    def _segments(self) -> list[str]:
        """The files of the run's own shared memory, if it has one."""
        folder = self.space.seen(Path("/dev/shm"))
        return [path.name for path in folder.iterdir() if path.name != "filler"] if self.space.works else []

    def unnoticed(self) -> list[str]:
        """The damage that the log does not mention."""
        return unnoticed(self.damages, self.seen / "checkpoints", self.log.read_text(errors="replace"))

    def _record(self) -> None:
        lines = [json.dumps(asdict(event)) for event in self.events]
        (self.folder / "events.jsonl").write_text("\n".join([*lines, json.dumps({"exits": self.exits})]) + "\n")

    def _told(self) -> str:
        happened = "\n".join(f"{event.due}: {event.kind} ({event.phase}): {event.happened}" for event in self.events)
        return f"{happened}\n{self.log.read_text()[-6000:]}"

    def kill(self) -> None:
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []:
            with suppress(psutil.Error):
                child.kill()
        self.process.kill()
        self.process.wait()


def _resume(actor: psutil.Process) -> None:
    with suppress(psutil.Error):
        actor.resume()


@contextmanager
def space(folder: Path, *, wanted: bool) -> Iterator[Space]:
    """A namespace whose disk is below `folder`."""
    with closing(Space(folder / "disk", wanted=wanted)) as created:
        yield created


@contextmanager
def hosts(more: int) -> Iterator[Hosts]:
    """Hosts for a run, in addition to the command's host."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with closing(Hosts(more)) as created:
            yield created


def events_asked() -> int:
    """How many events a test makes happen."""
    return int(os.environ.get("MTPCTL_CHAOS_EVENTS", "12"))


def seed_asked() -> int:
    return int(os.environ.get("MTPCTL_CHAOS_SEED", "0"))


def kinds_asked(kinds: Sequence[str]) -> Sequence[str]:
    """The kinds of events that a test makes happen."""
    requested = os.environ.get("MTPCTL_CHAOS_KINDS")
    return requested.split(",") if requested else kinds
