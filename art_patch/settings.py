"""Settings of app, job and server. An argument wins over the `ART_PATCH_*` variable, which wins over the default.

Each setting is defined once, as a field of `Settings`. Its environment variable, its command-line option (if it is
marked with `Option`) and its entry in the reference documentation are generated from the field, its type and the text
below it.
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from art_patch._lib.key_files import engine_key
from art_patch._lib.option import Option
from art_patch.errors import ConfigError
from art_patch.types import Mode

PREFIX = "ART_PATCH_"

Match = str | re.Pattern[str] | Callable[[Mapping[str, Any]], bool] | None
Redact = Literal["secrets"] | Callable[[str], str] | None

# A scheme, or a login in front of a host: meant as a URL, whose password would come into the name of a file.
_MEANT_AS_URL = re.compile(r"[A-Za-z][\w+.-]*:|.*//[^/]*@")


class Settings(BaseModel):
    """All settings of a project. `load_settings` reads a field from `ART_PATCH_<FIELD>` unless an argument sets it."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    home: Annotated[Path | None, Option(env=True)] = None
    """Directory of all projects. Default: the user's data directory. Stores and adapters live below it."""

    project: Annotated[str, Option(env=True)] = "default"
    """Name of the project: one agent's traffic and policies. Each project has its own directory and, by default, its
    own store. A process has one project, and others for single clients (`wrap(client, project=...)`)."""

    store: Annotated[str | None, Option(env=True)] = Field(default=None, repr=False)
    """Database of the project: a path, `sqlite:///PATH`, or `postgresql+psycopg://user@host/database` for a store that
    several machines and projects share; `?options=-csearch_path%3DSCHEMA` names another schema than `public`. Default:
    `<home>/<project>/store.db`. The URL may hold a password, so it is never shown."""

    mode: Annotated[Mode, Option(env=True)] = "route"
    """Who answers the app's calls: off, record, shadow, canary or route. `route`: the champion, or upstream if there is
    none. `canary`: the champion answers a share of the sessions, upstream the others. `shadow`: upstream answers, and
    the champion gets copies of the calls in the background. `record`: upstream answers, and the calls are recorded.
    `off`: art_patch does nothing. A mode that `art-patch mode` wrote to the store wins over it in running apps."""

    match: Annotated[Match, Option(env=True)] = None
    """Models whose calls are routed and recorded: a glob such as `gpt-*`, or re:EXPRESSION. In Python it may also be a
    compiled expression, or a function of the request's body. All other calls pass untouched and unrecorded."""

    sample_rate: Annotated[float, Option(env=True)] = Field(default=1.0, ge=0, le=1)
    """Share of trajectories to record, from 0 to 1, each whole or not at all: a hash of its id decides."""

    imitate_models: Annotated[tuple[str, ...], Option(name="imitate-models", env=True)] = ()
    """Models on whose answers `retrain` may train, as the app requests them: names or patterns such as `qwen*`, between
    commas. Default: none, because the terms of many providers forbid it. `none` imitates corrections alone."""

    learn: bool = True
    """Whether the app's runs may be learned from; else they are recorded for operation only."""

    canary_percent: Annotated[float, Option(env=True)] = Field(default=5.0, ge=0, le=100)
    """Share of the sessions, in percent, that a canary answers. It is used by mode `canary` and by `promotion=canary`.
    A hash of the session id assigns a call; without a session it is a hash of the trajectory's id, or else of the
    conversation's first messages. So one conversation is always answered by the same side."""

    promotion: Annotated[Literal["auto", "approve", "canary"], Option(env=True)] = "auto"
    """What happens to a candidate that won the gate: auto, approve or canary. `auto`: it becomes the champion.
    `approve`: it waits until a person runs `art-patch promote`. `canary`: it answers `canary_percent` of the sessions
    and becomes the champion if it does better there."""

    gate_scenarios: int = Field(default=30, ge=1)
    """Held-out scenarios without which the gate cannot decide; until there are as many, nothing is trained. Fewer than
    30 hardly ever show a task that a candidate ruins."""

    gate_judge: Annotated[str | None, Option(env=True)] = None
    """Model that judges in the gate, by its litellm name. Default: `judge`. A policy learns to please the judge that it
    is trained with, so another judge notices more. The gains by both are shown."""

    gate_judge_base_url: Annotated[str | None, Option(env=True)] = None
    """Address of `gate_judge`. Default: the provider's own."""

    gate_judge_api_key: str | None = Field(default=None, repr=False)
    """API key of `gate_judge`. Default: the key that litellm finds in the environment."""

    gate_rubric: Annotated[str | None, Option(env=True)] = None
    """Rubric for the gate: a file, or the text itself. Default: `rubric`."""

    canary_hours: float = Field(default=168.0, gt=0)
    """Hours that a canary test may take; without a verdict by then, it ends without a promotion."""

    canary_rest_s: float = Field(default=60.0, gt=0)
    """Seconds without a call until a session has ended: what it does later does not count in the canary test."""

    canary_silence_s: float = Field(default=3_600.0, gt=0, le=86_400)
    """Seconds after a session's end when a session without reward and feedback is silent. Users who are not content may
    leave without a word, so a canary is promoted only if it is better with silence counted as 0, too."""

    canary_ramp: bool = True
    """Whether a canary's share grows by itself to 20 and 50 percent, and falls back if something speaks against it."""

    canary_sessions: int = Field(default=20, ge=1)
    """Sessions that the canary and the champion each need before the canary may be promoted."""

    canary_margin: float = Field(default=0.0, gt=-1, lt=1)
    """How much better than the champion's a canary's rewards or feedback must be, 0 to 1. Below 0: it may be worse."""

    max_loss: Annotated[float, Option(env=True)] = Field(default=0.05, ge=0, lt=1)
    """How much worse than upstream a policy may be that takes its place, on a scale from 0 to 1."""

    canary_latency_ratio: float = Field(default=1.5, ge=1)
    """A canary that is this many times slower than the champion is rejected."""

    shadow_rate: float = Field(default=1.0, ge=0, le=1)
    """Share of calls repeated in the background: to the champion in mode `shadow`, or to a policy in that state."""

    shadow_per_minute: int = Field(default=60, ge=0)
    """Largest number of background calls a minute. Further calls are not repeated, and are counted as skipped."""

    base_url: Annotated[str | None, Option(env=True)] = None
    """Address of the engine. Default: the address that `art-patch serve` wrote to the store."""

    engine_key_file: Path | None = None
    """File with the engine's key, mode 600, for apps elsewhere. Default: the one that `art-patch serve` writes here."""

    engines: tuple[str, ...] = ()
    """Addresses that may be engines, such as `http://10.0.0.7:8700/v1`, separated by commas in the variable. Default:
    any address that the store names. Set it where programs that you do not trust may write to the store."""

    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that the champion may take for an answer, or between two chunks of a streamed answer."""

    first_token_timeout_s: float = Field(default=2.0, gt=0)
    """Seconds until the first chunk of a stream. If the champion sends none by then, the call goes upstream."""

    connect_timeout_s: float = Field(default=0.25, gt=0)
    """Seconds that connecting to the engine may take. If it takes longer, the call goes upstream."""

    stateless_responses: bool = False
    """Whether calls of the Responses API that leave `store` unset may be routed; with `store=False` they always may. An
    app may refer to such an answer by its id later, which fails if a policy gave it: set it if yours never does."""

    redact: Annotated[Redact, Option(env=True)] = None
    """What is removed from texts before they are written: `secrets` removes keys, tokens and passwords. In Python it
    may also be a function from text to text. A call whose texts changed is kept without token ids."""

    otel: Literal["auto", "off"] = "auto"
    """`auto` emits `gen_ai.*` spans if the app has set an OpenTelemetry tracer provider."""

    carry_threads: bool = True
    """Whether new threads and thread pools inherit the surrounding trajectory."""

    integrations: Literal["auto", "off"] | tuple[str, ...] = "auto"
    """Frameworks whose runs, steps and tools are recorded. `auto`: each whose integration is installed, once the app
    imports it. `off`: none. Or import names such as `langchain_core`, between commas; a missing one is an error."""

    queue_mib: int = Field(default=64, ge=1)
    """Memory for recorded calls that are not in the spool yet, in MiB. Calls beyond it are dropped and counted."""

    spool_mib: int = Field(default=1024, ge=0)
    """Size of a process's spool, in MiB: files beside the store that keep calls until it has them. What one leaves,
    another takes over. 0: none; a killed app then loses those of its first second and the last `flush_interval_s`."""

    flush_interval_s: float = Field(default=0.1, gt=0)
    """Seconds that the writer collects calls before it writes a batch."""

    poll_interval_s: float = Field(default=0.5, gt=0, le=2.0)
    """Seconds between two looks at mode, champion and engine in the store. A look takes about a millisecond."""

    group_across: bool = False
    """Whether prompts with the same words are one task even if system prompts or tools differ. It is off by default."""

    holdout_users: bool = False
    """Whether a fifth of the users, by a hash of the user id, is held out for the gate, and not a fifth of the tasks.
    Runs without a user id go by their task. Set it from the start: earlier runs stay on the side that they have."""

    embeddings: str | None = None
    """Embedding model that finds different wordings of one task, from each run's first user message. Default: words are
    compared, as if it cannot be reached. Then of two wordings one may be held out, and the other learned from."""

    embeddings_base_url: str | None = None
    """OpenAI-compatible address of the embedding model, ending in /v1. No default: users' messages are sent there."""

    embeddings_api_key: str | None = Field(default=None, repr=False)
    """API key of the embedding model."""

    judge: Annotated[str | None, Option(env=True)] = None
    """Model that judges siblings, by its litellm name, such as `openai/gpt-5-mini` or `hosted_vllm/NAME`."""

    judge_base_url: Annotated[str | None, Option(env=True)] = None
    """Address of the judge. Default: the provider's own."""

    judge_api_key: str | None = Field(default=None, repr=False)
    """API key of the judge. Default: the key that litellm finds in the environment."""

    teacher: Annotated[str | None, Option(env=True)] = None
    """Model from which `retrain` learns in place of a judge, by its log-probabilities: a name on `teacher_base_url`."""

    teacher_base_url: Annotated[str | None, Option(env=True)] = None
    """Address of the teacher, such as a vLLM, ending in /v1. It has no default, because tokens of runs go there."""

    teacher_api_key: str | None = Field(default=None, repr=False)
    """API key of the teacher."""

    rubric: Annotated[str | None, Option(env=True)] = None
    """Rubric for the judge: a file, or the text itself. Default: RULER's rubric."""

    reward: str = Field(default="ruler", pattern=r"^(ruler|criteria|[\w.]+:[\w.]+)$")
    """How a trajectory's scores become its reward. `ruler`: a reward that users or code gave, else the judge's score.
    `criteria`: a weighted mean of criteria. `module:function`: your own function of a group (`rewards.combine`)."""

    criteria: str | None = None
    """Weights and rules for `reward=criteria`, such as `accuracy=0.5,efficiency=0,tone=0.2@evals:tone`. Criteria that
    are not named keep their weight. Weight 0 leaves a criterion out. `@module:function` is your own rule."""

    checks: Annotated[tuple[str, ...], Option(name="check")] = ()
    """Function that scores a trajectory, as `module:function`; may be repeated; in the variable, with commas."""

    feedback_secret: str | None = Field(default=None, min_length=16, repr=False)
    """Secret that signs feedback links; app and `art-patch feedback serve` need the same. Default: the project's."""

    feedback_base_url: str | None = None
    """Public address of `art-patch feedback serve`, for links. Default: the one that its server here last used."""

    notify: str | None = Field(default=None, repr=False)
    """Addresses that `serve` and `retrain` tell of promotions and alarms, between spaces: URLs of apprise, such as
    `slack://TOKEN_A/TOKEN_B/TOKEN_C`, `mailto://...` or `jsons://host/path`. They are secrets, and never shown."""

    vllm_python: Path | None = None
    """Python interpreter of the environment that holds vLLM. Default: the one that `art-patch init vllm` built."""

    keep_days: float | None = Field(default=None, ge=0)
    """Days after its last call when `art-patch retrain` deletes a run, trained on or not. Default: none is deleted."""

    keep_trajectories: int | None = Field(default=None, ge=0)
    """Number of trajectories, the newest, that each `art-patch retrain` keeps. Default: no trajectory is deleted."""

    search: Literal["on", "off"] = "on"
    """Whether server and job index the words of calls for `trajectories list --search`. `off`: retrain deletes it."""

    @field_validator("project")
    @classmethod
    def _own_directory(cls, project: str, info: ValidationInfo) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", project):
            raise ValueError(f"{project!r:.70}: take a letter or digit first, then also '.', '_' and '-'; 64 at most")
        there = (path.name for path in (info.data.get("home") or _user_data()).glob("*"))
        alike = [name for name in ("environments", *there) if name.lower() == project.lower()]
        if alike and (alike[0] == "environments" or project not in alike):
            raise ValueError(f"{alike[0]!r} is taken, and some disks take both for one; choose quite another name")
        return project

    @field_validator("match", mode="before")
    @classmethod
    def _is_pattern(cls, value: Any) -> Any:
        if not (value is None or isinstance(value, str | re.Pattern) or callable(value)):
            raise ValueError(f"{value!r} cannot choose calls; give a glob, re:EXPRESSION, a compiled one or a function")
        if isinstance(value, str) and value.startswith("re:"):
            try:
                re.compile(value[3:])
            except re.error as error:
                raise ValueError(f"{value!r} is not a regular expression ({error}); mend it, or write a glob") from None
        return value

    @field_validator("redact", mode="before")
    @classmethod
    def _is_redaction(cls, value: Any) -> Any:
        if value is None or value == "secrets" or callable(value):
            return value
        raise ValueError(f"{value!r} cannot redact; give 'secrets' or a function from text to text")

    @field_validator("integrations", mode="before")
    @classmethod
    def _are_integrations(cls, value: Any) -> Any:
        if value in ("auto", "off"):
            return value
        names: Any = value.split(",") if isinstance(value, str) else value
        return tuple(text for name in names if (text := str(name).strip()))

    @field_validator("engines", "imitate_models", mode="before")
    @classmethod
    def _are_texts(cls, value: Any) -> Any:
        # Any text is taken: a wrong value would be ignored, and then every address would be allowed.
        return tuple(each.strip().rstrip("/") for each in (value.split(",") if isinstance(value, str) else value))

    @field_validator("checks", mode="before")
    @classmethod
    def _are_checks(cls, value: Any) -> Any:
        given: Any = value.split(",") if isinstance(value, str) else value
        for name in (names := tuple(text for each in given if (text := each.strip()))):
            if not re.fullmatch(r"[\w.]+:[\w.]+", name):
                raise ValueError(f"{name!r} names no check; write module:function, several separated by commas")
        return names

    @field_validator(*(f"{of}base_url" for of in ("", "judge_", "gate_judge_", "teacher_", "embeddings_", "feedback_")))
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is not an http(s) address; write it like http://127.0.0.1:8700/v1")
        return value

    @field_validator("store")
    @classmethod
    def _is_known_store(cls, value: str | None) -> str | None:
        if value is None or (value.startswith(("sqlite:///", "postgresql+psycopg://")) and value != "sqlite:///"):
            return value
        if not _MEANT_AS_URL.match(value):
            # Made absolute at once: processes that are started from here may have another working directory.
            return f"sqlite:///{Path(value).expanduser().absolute()}"
        # The error shows the scheme alone: the rest of the URL may hold a password.
        scheme = value.partition(":")[0] if re.match(r"[\w+.-]+:", value) else "this URL"
        if scheme.partition("+")[0] in ("postgres", "postgresql"):
            raise ValueError(f"{scheme}: names no driver that we use; write postgresql+psycopg://user@host/database")
        known = "write a path, sqlite:////absolute/path/store.db or postgresql+psycopg://user@host/database"
        raise ValueError(f"{scheme!r} is not a store this release opens; {known}")

    def engine_key(self, base_url: str | None, key_file: str | None) -> str | None:
        """Return the key for an engine that the store names; a `ConfigError` says why it must not be called."""
        if self.engines and not self.base_url and (base_url or "").rstrip("/") not in self.engines:
            why = f"the store names the engine {base_url!r:.300}; if it is yours, add it to ART_PATCH_ENGINES"
            raise ConfigError(why)
        return engine_key(key_file, self.directory, self.engine_key_file)

    @cached_property
    def directory(self) -> Path:
        """Path of the project's directory. Reading this property does not create the directory."""
        return Path(os.path.abspath(self.home or _user_data())) / self.project

    @property
    def environments(self) -> Path:
        """Directory of the virtual environments that `art-patch init` builds. All projects share it."""
        return _user_data() / "environments"

    @property
    def store_url(self) -> str:
        """URL of the project's database: the setting `store`, or the file `store.db` in the project's directory."""
        return self.store or f"sqlite:///{self.directory / 'store.db'}"

    @property
    def adapters(self) -> Path:
        """Directory of the published adapters, with one subdirectory for each policy."""
        return self.directory / "adapters"


def _user_data() -> Path:
    from platformdirs import user_data_path

    return user_data_path("art-patch")


def load_settings(**given: Any) -> Settings:
    """Return the settings from the arguments `given`, the environment variables and the defaults, in this precedence.

    An argument that is `None` is not given. An invalid value raises a `ConfigError`, which says what to write.
    """
    settings, wrong = read_settings(**given)
    if wrong is not None:
        raise ConfigError(wrong)
    return settings


def read_settings(**given: Any) -> tuple[Settings, str | None]:
    """Return the settings as `load_settings` does, but ignore environment variables with invalid values.

    An ignored variable's setting has its default; the second value is an error message about them, `None` if all are
    valid. The value of an argument that is invalid raises a `ConfigError`.
    """
    given = {name: value for name, value in given.items() if value is not None}
    values = variables() | given
    try:
        return Settings(**values), None
    except ValidationError as error:
        fields = {str(e["loc"][0]) for e in error.errors()}
        wrong = "; ".join(_sentence(e["loc"], e["msg"], given) for e in error.errors())
    if fields & given.keys():
        raise ConfigError(wrong)
    return Settings(**{name: value for name, value in values.items() if name not in fields}), wrong


def _sentence(place: tuple[int | str, ...], message: str, given: Mapping[str, Any]) -> str:
    variable, said = variable_of(str(place[0])), message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, place))}: {said} (or {variable})" if place[0] in given else f"{variable}: {said}"


def variable_of(field: str) -> str:
    """Return the name of the environment variable for a field of `Settings`: `ART_PATCH_` and the field in capitals."""
    return f"{PREFIX}{field.upper()}"


def variables() -> dict[str, Any]:
    """Return the values of all `ART_PATCH_*` variables that set a field, by field. Empty variables count as unset."""
    # Not with pydantic-settings: its import would double what `patch()` costs the app.
    # Blank values are left out because `${X:-}` in a Compose file or a CronJob sets a variable to nothing.
    found = {name: os.environ.get(variable_of(name), "") for name in Settings.model_fields}
    return {name: value for name, value in found.items() if value.strip()}
