"""The options that several commands share, as dataclasses whose methods return what the options ask for."""

from __future__ import annotations

import getpass
import math
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

from art_patch import grouping, insights, pipeline, rewards, store
from art_patch._lib.lazy import uncollected
from art_patch._lib.option import Option
from art_patch.cli.output import answer, one_line
from art_patch.cli.typed_options import setting
from art_patch.errors import ConfigError, NotFound, StoreError, WrongProject
from art_patch.recording import spool_directory, take_over
from art_patch.settings import Settings, load_settings


@contextmanager
def extra(what: str, name: str) -> Generator[None]:
    """Raise `ConfigError` with the extra to install if an import inside the block fails; `what` needs the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("art_patch"):  # a mistake of ours, which no installation mends
            raise
        raise ConfigError(f'{what} needs {error.name}; run: pip install "art-patch[{name}]"') from None


@dataclass(frozen=True, slots=True)
class Output:
    """The option that every command has: `--json`."""

    as_json: Annotated[bool, Option("Print one JSON object instead of text.", name="json")] = False

    def answered(self, facts: dict[str, Any]) -> bool:
        """Print the command's result if it is wanted as JSON, and return whether it is."""
        if self.as_json:
            answer(facts)
        return self.as_json


@dataclass(frozen=True, slots=True)
class ProjectPlace(Output):
    """The options of commands that need the name and directory of a project, but not its store."""

    project: Annotated[str | None, setting("project")] = None
    home: Annotated[Path | None, setting("home")] = None

    def settings(self, **more: Any) -> Settings:
        """Return the project's settings. These options and `more` have priority over the environment variables."""
        # Only the subclasses have a `store`.
        given = {name: getattr(self, name, None) for name in ("project", "home", "store")}
        return load_settings(**given | more)


@dataclass(frozen=True, slots=True)
class Project(ProjectPlace):
    """The options of commands that read or write a project's store."""

    store: Annotated[str | None, setting("store")] = None

    @contextmanager
    def opened(self, **more: Any) -> Generator[tuple[Settings, store.Store]]:
        """Open the project's store while the block runs. The store must exist. `more` are further settings."""
        # Garbage collection during these imports costs a command forty milliseconds, and they leave no garbage.
        with uncollected():
            chosen = self.settings(**more)
            found = open_existing(chosen)
        with closing(found):
            yield chosen, found


@dataclass(frozen=True, slots=True)
class ActingProject(Project):
    """The options of commands that change something; the ledger or audit log then notes the user's name."""

    who: Annotated[str | None, Option("Your name, as the ledger notes it. Default: your user name.")] = None

    def actor(self, words: str) -> str:
        """Return the user and the command as the ledger notes them: `USER (art-patch COMMAND)`."""
        try:
            user = self.who or getpass.getuser()
        except (KeyError, OSError):  # a container without an entry in /etc/passwd
            user = "unknown"
        return f"{user} (art-patch {words})"


def open_existing(chosen: Settings) -> store.Store:
    """Open a project's store after writing its spool to it. A missing store is an error: its name may be mistyped."""
    if spool_directory(chosen).is_dir():
        _take_over(chosen)
    require_project(chosen)
    return store.open_store(chosen.store_url, create=False, project=chosen.project)


def _take_over(chosen: Settings) -> None:
    with ExitStack() as stack:
        sink = cache(lambda: stack.enter_context(closing(store.open_store(chosen.store_url, project=chosen.project))))
        try:
            take_over(chosen, sink)
        except (StoreError, OSError) as error:
            line = f"recorded calls wait in {spool_directory(chosen)}, because the store does not take them: {error}"
            sys.stderr.write(f"art-patch: {one_line(line)}\n")


def require_project(chosen: Settings) -> None:
    """Raise `WrongProject`, which names the projects that exist, if this one has no store and others have one."""
    home, name = chosen.directory.parent, chosen.directory.name
    if chosen.store is not None or _holds_store(chosen.directory):
        return
    if others := sorted(path.parent.name for path in home.glob(f"*/{store.DEFAULT_NAME}") if _holds_store(path.parent)):
        raise WrongProject(
            f"there is no store of a project {name!r} in {home}, but of: {', '.join(others)}; name one of these "
            "with --project, or run your agent with art_patch.patch() first"
        )


def _holds_store(directory: Path) -> bool:
    # An empty file is no store: SQLite makes one when a database is opened and nothing is written.
    try:
        return (directory / store.DEFAULT_NAME).stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # opening it says why
        return True


@dataclass(frozen=True, slots=True)
class AppSettings:
    """The settings of `art_patch.patch()` that are options of `art-patch run` and `art-patch proxy`."""

    mode: Annotated[str | None, setting("mode")] = None
    match: Annotated[str | None, setting("match")] = None
    sample_rate: Annotated[float | None, setting("sample_rate")] = None
    redact: Annotated[str | None, setting("redact")] = None


SINCE = Option("Runs with a call at or after this time: 2026-11-21, 2026-11-21T14:00, or an age: 7d, 12h.")


@dataclass(frozen=True, slots=True)
class RunFilter:
    """The options that choose trajectories, in every command that reads many of them."""

    PANEL: ClassVar[str] = "Which trajectories"

    user: Annotated[str | None, Option("Trajectories of this user.")] = None
    session: Annotated[str | None, Option("Trajectories of this session.")] = None
    scenario: Annotated[str | None, Option("Trajectories of this task, by its key.")] = None
    tag: Annotated[str | None, Option("Trajectories with this tag.")] = None
    name: Annotated[str | None, Option("Trajectories of this name.")] = None
    policy: Annotated[str | None, Option("Trajectories answered by NAME@STEP, or by upstream.")] = None
    since: Annotated[str | None, SINCE] = None
    until: Annotated[str | None, Option("Runs whose newest call is before this time; see --since.")] = None

    def chosen(self, *, shadows: bool = False, now: float | None = None) -> store.Filter:
        """Return the filter for the store. `shadows` includes shadow calls; `now` is in seconds since the epoch."""
        # Read once, so that --since 7d and --until 1d count from the same moment.
        at = time.time() if now is None else now
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return insights.run_filter(given, shadows=shadows, now=at)


@dataclass(frozen=True, slots=True)
class TrajectoryFilter(RunFilter):
    """The options that choose trajectories in `export` and `trajectories list`."""

    group: Annotated[str | None, Option("Trajectories in this group: its id, or the key given to group().")] = None
    origin: Annotated[
        str | None, Option("How the trajectory was identified: explicit, otel, stitched, single, imported, shadow.")
    ] = None
    min_reward: Annotated[float | None, Option("Trajectories with a reward of at least this much.")] = None
    max_reward: Annotated[float | None, Option("Trajectories with a reward of at most this much.")] = None
    model: Annotated[str | None, Option("Trajectories with a call for this model, or answered by it.")] = None
    error: Annotated[str | None, Option("Trajectories whose error, or that of a call, holds this text.")] = None
    slower_than: Annotated[str | None, Option("Trajectories with a call that took as long: 2s, 500ms.")] = None
    status: Annotated[str | None, Option("ok: no error. error: the block or one of its calls failed.")] = None
    trainable: Annotated[
        bool | None, Option("Trajectories with, or without, a call that can be trained on.", off="--not-trainable")
    ] = None
    untrainable: Annotated[
        str | None, Option("Trajectories with a call that cannot be trained on, for a reason that holds this text.")
    ] = None


FROM_ENV_FILE = set[str]()
"""Names of the variables that `--env-file` set in this process."""


def require_policy(opened: store.Store, name: str | None) -> None:
    """Raise `NotFound` if a filter names a policy that neither the ledger nor a recorded call knows."""
    if name in (None, "upstream") or insights.policy_is_known(opened, name):
        return
    raise NotFound(f"there is no policy {name!r}; `art-patch policies` lists them")


def conditions(chosen: store.Filter) -> dict[str, Any]:
    """Return the conditions of a filter by name; for each export the audit log notes the names, not the values."""
    return {name: value for name, value in asdict(chosen).items() if value is not None and name != "shadows"}


@dataclass(frozen=True, slots=True)
class Prices:
    """The options that say what upstream and the engine cost, for `report` and `web`."""

    PANEL: ClassVar[str] = "What it costs"

    upstream_price: Annotated[
        tuple[float, float] | None,
        Option(
            "US dollars that upstream charges for a million prompt tokens and completion tokens.",
            metavar="IN OUT",
            env=True,
        ),
    ] = None
    litellm_prices: Annotated[bool, Option("Use litellm's list of prices by model in place of --upstream-price.")] = (
        False
    )
    gpu_usd_per_hour: Annotated[
        float | None, Option("Cost of the engine's GPUs in US dollars an hour.", least=0.0, env=True)
    ] = None

    def by_model(self) -> insights.Prices:
        """Return a function from a model to its prices; without any source it knows none."""
        given = self.upstream_price
        if given is not None and self.litellm_prices:
            raise ConfigError("--upstream-price and --litellm-prices are two sources; choose one")
        if given is not None and not all(math.isfinite(price) and price >= 0 for price in given):
            raise ConfigError(f"{given[0]:g} {given[1]:g} are no prices; give dollars a million tokens, such as 0.25 2")
        return _from_litellm if self.litellm_prices else lambda _: given


def _from_litellm(model: str) -> tuple[float, float] | None:
    # Asked for a thousand tokens, not a million: some providers charge more a token for very long prompts.
    prompt, completion = rewards.price_usd(model, 1_000, 0), rewards.price_usd(model, 0, 1_000)
    return None if prompt is None or completion is None else (prompt * 1_000, completion * 1_000)


@dataclass(frozen=True, slots=True)
class JudgeModel:
    """The options that name the judge's model, its address and its rubric."""

    judge: Annotated[str | None, setting("judge")] = None
    judge_base_url: Annotated[str | None, setting("judge_base_url")] = None
    rubric: Annotated[str | None, setting("rubric")] = None

    def as_settings(self) -> dict[str, Any]:
        """Return these options as arguments of `load_settings`."""
        return {"judge": self.judge, "judge_base_url": self.judge_base_url, "rubric": self.rubric}


@dataclass(frozen=True, slots=True)
class Judging(JudgeModel):
    """The options of commands that score trajectories: the judge, its budget, and the user's own checks."""

    max_usd: Annotated[
        float | None, Option("Largest cost of the judge in US dollars.", env=True, also=("--budget-usd",))
    ] = None
    max_calls: Annotated[int | None, Option("Largest number of calls to the judge.", env=True)] = None
    check: Annotated[list[str] | None, setting("checks")] = None

    def as_settings(self) -> dict[str, Any]:
        """Return these options as arguments of `load_settings`."""
        # Not `super()`: a class with slots is made twice, and its methods would look for the first one.
        # `None` and not an empty tuple: without the option, ART_PATCH_CHECKS decides.
        return JudgeModel.as_settings(self) | {"checks": tuple(self.check) if self.check else None}

    def limited_judge(self, chosen: Settings, *, max_prompt_tokens: int | None = None) -> rewards.Judge:
        """Return the judge that the settings name, with the budget of these options; `JudgeError` without a price."""
        judge = make_judge(chosen, rewards.Budget(self.max_usd, self.max_calls), max_prompt_tokens)
        self.require_prices(judge.model)
        return judge

    def limited_judges(
        self, chosen: Settings, *, max_tokens: int = 32_768
    ) -> tuple[rewards.OrderedJudge, rewards.Judge | None]:
        """Return the judge, or the teacher in its place, and the gate's own or `None`, that the settings name.

        They share the options' budget. A teacher reads at most `max_tokens` of a row.
        """
        budget = rewards.Budget(self.max_usd, self.max_calls)
        if chosen.teacher is not None:
            # A rubric alone is for a judge, and there may be none.
            own = chosen if chosen.gate_judge is not None else chosen.model_copy(update={"gate_rubric": None})
            return _make_teacher(chosen, budget, max_tokens), _make_gate_judge(own, budget)
        judges = make_judge(chosen, budget), _make_gate_judge(chosen, budget)
        self.require_prices(*(judge.model for judge in judges if judge is not None))
        return judges

    def require_prices(self, *models: str) -> None:
        """Raise `JudgeError` if there is a limit in USD and the price of one of these models is not known."""
        # Here, before anything is grouped, sampled or asked: the first question would say it only after that work.
        for model in models if self.max_usd is not None else ():
            rewards.require_price(model)


def make_judge(
    chosen: Settings, budget: rewards.Budget | None = None, max_prompt_tokens: int | None = None
) -> rewards.Judge:
    """Return the judge that the settings name; without one they raise `JudgeError`."""
    return rewards.Judge(
        chosen.judge,
        base_url=chosen.judge_base_url,
        api_key=chosen.judge_api_key,
        rubric=rewards.load_rubric(chosen.rubric),
        budget=budget,
        max_prompt_tokens=max_prompt_tokens,
    )


def _make_teacher(chosen: Settings, budget: rewards.Budget, max_tokens: int) -> pipeline.TeacherJudge:
    if chosen.teacher is None or chosen.teacher_base_url is None:
        raise ConfigError(
            f"teacher names {chosen.teacher} and no address; give --teacher-base-url (ART_PATCH_TEACHER_BASE_URL), as "
            "http://127.0.0.1:8000/v1: tokens of recorded runs would be sent there, so it is not guessed"
        )
    teacher = rewards.Teacher(chosen.teacher, chosen.teacher_base_url, chosen.teacher_api_key, budget=budget)
    return pipeline.TeacherJudge(teacher, max_tokens=max_tokens)


def _make_gate_judge(chosen: Settings, budget: rewards.Budget) -> rewards.Judge | None:
    address, key = chosen.gate_judge_base_url, chosen.gate_judge_api_key
    own: dict[str, Any] = {"rubric": chosen.gate_rubric or chosen.rubric}
    if chosen.gate_judge is not None:
        own |= {"judge": chosen.gate_judge, "judge_base_url": address, "judge_api_key": key}
    elif address is not None or key is not None:
        raise ConfigError("the gate's judge has an address or key and no name; set ART_PATCH_GATE_JUDGE, too")
    elif chosen.gate_rubric is None:
        return None
    return make_judge(chosen.model_copy(update=own), budget)


def make_embed(chosen: Settings) -> grouping.Embed | None:
    """Return a function that calls the embedding model; `None` if the settings name no model. Nothing is sent here."""
    if chosen.embeddings is None:
        return None
    if chosen.embeddings_base_url is None:
        raise ConfigError(
            f"embeddings names {chosen.embeddings} and no address; set ART_PATCH_EMBEDDINGS_BASE_URL, such as "
            "http://127.0.0.1:8000/v1: what users asked would be sent there, so it is not guessed"
        )
    if find_spec("numpy") is None:
        raise ConfigError('grouping by meaning needs numpy; run: pip install "art-patch[train]"')
    return grouping.embed_with(chosen.embeddings_base_url, chosen.embeddings, api_key=chosen.embeddings_api_key)
