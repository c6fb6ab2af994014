"""Runs the demo: an unchanged agent improves from its own recorded calls, on a laptop.

The demo makes the tiny model, serves it, and then alternates between traffic, which is questions that the agent answers
through the engine, and cycles, during which a thinner traffic goes on. Success is measured before the first cycle and
after each, on questions that never occur in traffic. All parts are real, except the judge: a rule unless one is set.

A measurement asks the champion through the same agent without its two lines of art-patch.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from art_patch import gate, grouping, pipeline, rewards, serving, store
from art_patch._lib.atomic_files import write_whole
from art_patch._lib.process import peak_memory_mib
from art_patch._lib.words import sentences
from art_patch.demo.judge import STAND_IN_MODEL, ShuffledJudge, serve_stand_in_judge, shop_rule
from art_patch.demo.processes import NO_UPSTREAM, Agent, Engine, Program, agent_source, unpatched
from art_patch.demo.shop import TOOLS, Task, is_success, make_tasks
from art_patch.demo.shop_model import as_written, build_model
from art_patch.errors import ArtPatchError
from art_patch.settings import Settings
from art_patch.training import TrainConfig
from art_patch.types import Group

WHO = "demo"

SCENARIOS = 120  # questions in a cycle, of which about a fifth is held out for the gate
ROLLOUTS = 8  # times that the agent is asked each question in a cycle
QUESTIONS = 120  # questions in a cycle with `single_shot`
EVALUATION_TASKS = 155  # questions in a measurement; none of them occurs in traffic
EVALUATION_SAMPLES = 4  # sampled answers to each question in the first and the last measurement
CURVE_SAMPLES = 2  # the same in the measurements between them, which may be less precise
CYCLES = 4  # the demo's default number of cycles

CYCLE = pipeline.CycleConfig(
    settle_s=1.0,
    min_group_size=4,
    max_group_size=16,
    holdout_share=0.25,
    min_groups=8,
    train=TrainConfig(
        learning_rate=1e-3,
        epochs=3,
        minibatches=16,
        warmup_steps=5,
        lora_rank=8,
        lora_alpha=16,
        # Its answers have two or three tokens, one of which has to become likely: 0.3 nats a token are good learning.
        max_kl_nats=0.6,
    ),
    gate=gate.GateConfig(min_scenarios=8, max_scenarios=64, turns_per_scenario=6, samples=24),
)

SINGLE_SHOT = replace(
    CYCLE,
    min_group_size=1_000_000,  # questions that are asked twice by chance make no group: every sibling is re-sampled
    # No wait for siblings: some questions are asked twice, and groups of whole runs are never formed here.
    resample=grouping.ResampleConfig(samples=7, turns=2, max_turns=400, concurrency=8, wait_cycles=0),
)
"""Cycle settings for `single_shot`: every question is asked once, and the job re-samples the siblings."""


class Teller(Protocol):
    """Shows the demo's progress to its user; the command line implements it."""

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` steps of a stage are finished, with a note beside the number."""
        ...

    def say(self, sentence: str) -> None:
        """Print a sentence that stays on the screen when the progress display changes."""
        ...

    def measured(self, row: Mapping[str, Any]) -> None:
        """Show a new measurement: one row of the learning curve, as `Curve` stores it."""
        ...


@dataclass(slots=True)
class Curve:
    """The learning curve: all measurements of the demo, kept in a file so that a later run continues it."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @classmethod
    def load(cls, path: Path) -> "Curve":
        """Read the learning curve from its file; without a file it is empty."""
        return cls(path, json.loads(path.read_text()) if path.exists() else [])

    def add(self, row: dict[str, Any]) -> None:
        """Append a measurement to the learning curve and write the file."""
        self.rows.append(row)
        write_whole(self.path, json.dumps(self.rows, indent=1))


def run_demo(
    settings: Settings,
    *,
    seed: int,
    cycles: int,
    control: bool,
    tell: Teller,
    engine: str = "embedded",
    single_shot: bool = False,
    program: Program | None = None,
) -> dict[str, Any]:
    """Run the demo for some cycles and return its metrics; a project with earlier cycles is continued.

    Args:
        settings: settings of a project that only the demo uses; if they name a judge, it is used in place of the rule.
        control: true shuffles the judge's scores and lets every candidate pass the gate. If success does not rise then,
            the normal run learns from its rewards.
        single_shot: true asks every question only once, so that all siblings are re-samples made by the job.
    """
    program = program or Program(agent_source())
    started = time.monotonic()
    directory = settings.directory
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    base = build_model(
        directory.parent / "models" / f"shop-{seed}{_tools_suffix(program)}",
        seed=seed,
        tools=program.tools,
        progress=lambda done, total, loss: tell.progress("warm-up", done, total, f"loss {loss:.3f}"),
    )
    with ExitStack() as stack:
        judge = _judge(settings, stack, seed, control)
        world = _World(stack, settings, program, base, seed, engine, single_shot)
        tell.say(f"{world.engine.champion} serves at {world.engine.base_url}")
        curve = Curve.load(directory / "demo-curve.json")
        resumed = bool(curve.rows)
        if not resumed:
            curve.add(world.measure(0, tell, times=EVALUATION_SAMPLES))
        tell.measured(curve.rows[-1])
        last = len(curve.rows) + cycles - 1
        for number in range(len(curve.rows), last + 1):
            world.traffic(number, tell.progress)
            report = world.cycle(judge, number, control, tell)
            tell.say("\n  ".join(sentences(f"{report.outcome}: {report.reason}")))
            row = world.measure(number, tell, times=EVALUATION_SAMPLES if number == last else CURVE_SAMPLES)
            curve.add(row | {"outcome": report.outcome})
            tell.measured(row)
        metrics = world.metrics(curve) | {"resumed": resumed, "engine": world.engine.kind}
    return metrics | {
        "seed": seed,
        "control": control,
        "single_shot": single_shot,
        "judge": STAND_IN_MODEL if control or not settings.judge else settings.judge,
        "store": store.without_password(settings.store_url),
        "wall_s": round(time.monotonic() - started, 1),
    }


class _World:
    """The running parts of the demo: engine, patched agent, unpatched agent, store. They end with `stack`."""

    def __init__(
        self,
        stack: ExitStack,
        settings: Settings,
        program: Program,
        base: Path,
        seed: int,
        engine: str,
        single_shot: bool,
    ) -> None:
        self._settings, self._seed, self._program, self._single_shot = settings, seed, program, single_shot
        self._errors = self._asked = 0
        directory, home, project = settings.directory, settings.directory.parent, settings.project
        self.engine = stack.enter_context(Engine(base, home, project, directory / "engine.log", engine))
        self.store: store.Store = store.open_store(settings.store_url, project=project)
        stack.callback(self.store.close)
        self.client = stack.enter_context(serving.EngineClient.of_project(settings, self.engine.base_url, None))
        self._before = self.store.read.counts()
        ours = {"OPENAI_BASE_URL": NO_UPSTREAM, "ART_PATCH_HOME": str(home), "ART_PATCH_PROJECT": project}
        self.agent = stack.enter_context(Agent(program, directory / "agent.py", ours, directory / "agent.log"))

    def measure(self, number: int, tell: Teller, *, times: int) -> dict[str, Any]:
        """Ask each question of the evaluation once greedily and `times` times sampled; return a point of the curve."""
        tasks = make_tasks("evaluation", EVALUATION_TASKS, seed=self._seed)
        champion = self.store.ledger.champion()
        assert champion is not None
        directory = self._settings.directory
        theirs = {"OPENAI_BASE_URL": self.engine.base_url, "SHOP_MODEL": champion.name}
        log = directory / "agent.log"
        with Agent(unpatched(self._program), directory / "agent-unpatched.py", theirs, log) as agent:
            # Each task equally often. Greedy needs one try, because it answers a question always alike.
            sampled = tasks * times
            right = _successes(sampled, agent.ask(
                map(_as_asked, sampled), done=lambda n: tell.progress("measure", n, len(sampled), "sampled")
            ))  # fmt: skip
            greedy = _successes(tasks, agent.ask({**_as_asked(task), "temperature": 0} for task in tasks))
            peak_mib = peak_memory_mib(agent.pid)
        return {
            "cycle": number,
            "policy": champion.name,
            "sampled": round(right / len(sampled), 4),
            "greedy": round(greedy / len(tasks), 4),
            "unpatched_peak_mib": round(peak_mib, 1),
        }

    def traffic(self, number: int, progress: Callable[[str, int, int, str], None]) -> None:
        """Let the agent answer the questions of this cycle, each several times (once if `single_shot`)."""
        size, times = (QUESTIONS, 1) if self._single_shot else (SCENARIOS, ROLLOUTS)
        # A seed for each cycle, and another one for its trickle below, so that their questions differ.
        tasks = make_tasks("traffic", size, seed=self._seed * 1_000 + number)
        rollouts = [task for task in tasks for _ in range(times)]
        self._ask(map(_as_asked, rollouts), lambda n: progress("traffic", n, len(rollouts), "conversations"))
        self._wait_until_recorded()  # the cycle reads the store, and the recorder writes it from another process

    def cycle(self, judge: rewards.OrderedJudge, number: int, control: bool, tell: Teller) -> pipeline.CycleReport:
        """Run one cycle while a thinner traffic goes on."""
        stop = threading.Event()
        trickle = threading.Thread(target=self._trickle, args=(number, stop), name="demo-traffic")
        trickle.start()
        config = SINGLE_SHOT if self._single_shot else CYCLE
        config, adapters = _ungated(config) if control else config, self._settings.adapters
        try:
            return pipeline.retrain(self.store, self.client, judge, adapters, config, who=WHO, progress=tell.progress)
        finally:
            stop.set()
            trickle.join()

    def _trickle(self, number: int, stop: threading.Event) -> None:
        tasks = iter(make_tasks("traffic", 10_000, seed=self._seed * 1_000 + 500 + number))
        # Slow enough to leave the CPU to training, and quick enough that calls are in flight during the promotion.
        while not stop.wait(0.25):
            self._ask(map(_as_asked, islice(tasks, 2)))

    def _ask(self, asked: Iterable[dict[str, Any]], done: Callable[[int], None] | None = None) -> None:
        """Have the agent work on tasks, and count its calls and the conversations that ended in an error."""
        results = self.agent.ask(asked, done=done)
        self._errors += sum("error" in result for result in results)
        messages = [message for result in results for message in result.get("messages", ())]
        self._asked += sum(message["role"] == "assistant" for message in messages)

    def _wait_until_recorded(self) -> None:
        """Wait for the recorder's last batch, and until the last conversation has settled."""
        deadline = time.monotonic() + 60.0
        while self._since("calls") < self._asked:
            if time.monotonic() > deadline:
                raise ArtPatchError(
                    f"{self._asked - self._since('calls')} calls were not recorded; see {self.agent.log}"
                )
            time.sleep(0.05)
        time.sleep(CYCLE.settle_s)

    def _since(self, name: str) -> int:
        """Return the number of calls, or of another kind of rows, recorded since the demo started."""
        return self.store.read.counts()[name] - self._before[name]

    def metrics(self, curve: Curve) -> dict[str, Any]:
        """Return what the curve and the store tell about the demo so far."""
        first, last = curve.rows[0], curve.rows[-1]
        trained = self.store.read.groups(state="trained", limit=100_000)
        return {
            "success_before": first["sampled"],
            "success_after": last["sampled"],
            "greedy_before": first["greedy"],
            "greedy_after": last["greedy"],
            "policy": last["policy"],
            "curve": [row["sampled"] for row in curve.rows],
            "greedy_curve": [row["greedy"] for row in curve.rows],
            "calls": self._since("calls"),
            # Conversations that ended in an error count where they are more than the calls that failed or fell back.
            "failed_calls": max(self._since("calls_fell_back") + self._since("calls_not_ok"), self._errors),
            "cycles": len(curve.rows) - 1,
            "promotions": sum(row.get("outcome") == "promoted" for row in curve.rows),
            "app_rss_added_mib": round(
                peak_memory_mib(self.agent.pid) - max(row["unpatched_peak_mib"] for row in curve.rows), 1
            ),
            "groups_by_way": dict(Counter(group.how for group in trained)),
            "tools_run_by_job": self._tools_run_by_job(trained),
        }

    def _tools_run_by_job(self, trained: Sequence[Group]) -> int:
        """Count re-sampled turns whose prompt has messages, such as tool results, that the agent itself never got."""
        sources = self.store.read.groups(state="resampled", limit=100_000)
        got = {call.id: call.messages for group in sources for run in group.trajectories for call in run.calls}
        copies = [run for group in trained if group.how == "resampled" for run in group.trajectories]
        return sum(call.messages != got.get(str(call.shadow_of)) for run in copies for call in run.calls)


def _judge(settings: Settings, stack: ExitStack, seed: int, control: bool) -> rewards.OrderedJudge:
    rubric = rewards.load_rubric(settings.rubric)
    if settings.judge and not control:
        return rewards.Judge(
            settings.judge, base_url=settings.judge_base_url, api_key=settings.judge_api_key, rubric=rubric
        )
    url = stack.enter_context(serve_stand_in_judge(shop_rule))
    judge = rewards.Judge(STAND_IN_MODEL, base_url=url, api_key="none", rubric=rubric, max_siblings=64)
    return ShuffledJudge(judge, seed) if control else judge


def _ungated(config: pipeline.CycleConfig) -> pipeline.CycleConfig:
    """Return the settings of the control: the gate passes every scored candidate, and the judge is never checked."""
    passes_all = replace(config.gate, margin=-1.0, collapse=None)
    # With the defences on, a judge that deals scores out at random would be detected and quarantined.
    return replace(config, gate=passes_all, defence=rewards.DefenceConfig(double_share=0, planted_share=0))


def _tools_suffix(program: Program) -> str:
    """Return a part of the model's name: agents write the tools differently, and a model is made for one writing."""
    written = as_written(program.tools)
    return "" if written == as_written(TOOLS) else f"-{hashlib.sha256(written.encode()).hexdigest()[:8]}"


def _as_asked(task: Task) -> dict[str, Any]:
    return {"question": task.question, "prices": dict(task.prices)}


def _successes(tasks: Sequence[Task], results: Sequence[Mapping[str, Any]]) -> int:
    return sum(is_success(task, result.get("messages", ())) for task, result in zip(tasks, results, strict=True))
