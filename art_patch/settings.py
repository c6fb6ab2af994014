"""Settings: explicit argument, then `ART_PATCH_*` variable, then default. One record for app, job and server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from art_patch.errors import ConfigError
from art_patch.types import Mode

PREFIX = "ART_PATCH_"

Match = str | re.Pattern[str] | Callable[[Mapping[str, Any]], bool] | None
Redact = Literal["secrets"] | Callable[[str], str] | None


class Settings(BaseModel):
    """Everything that can be set. `load_settings` reads each field from `ART_PATCH_<FIELD>` unless it is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    project: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Keeps the traffic and policies of different agents apart: each project has its own directory and its own store,
    and a store refuses every other project. A process has one project."""

    home: Path | None = None
    """Directory of all projects; the user's data directory unless set. Store and adapters live below it."""

    store: str | None = Field(default=None, repr=False)
    """Database URL, such as `postgresql+psycopg://user@host/database` where several machines share a project's store;
    `sqlite:///<home>/<project>/store.db` unless set. It may hold a password, so it is not shown. A store belongs to the
    project that made it: another project needs another file or database, or a schema of its own, named by
    `?options=-csearch_path%3DSCHEMA`."""

    mode: Mode = "route"
    """`route`: to the champion if one serves, else upstream. `canary`: the same for a share of the sessions.
    `shadow`: upstream answers, and the champion is asked in the background. `record`: always upstream. `off`: do
    nothing. A mode set in the store (`art-patch mode`) overrules this while the app runs."""

    match: Match = None
    """Which calls are ours, by the model that the app asks for: a glob (`gpt-*`), `re:` and a regular expression, a
    compiled one, or a function of the request's body. All others pass as if `patch()` had never been called."""

    sample_rate: float = Field(default=1.0, ge=0, le=1)
    """Share of trajectories that is recorded, chosen by a hash of their id, so that one is kept whole or not at all."""

    canary_percent: float = Field(default=5.0, ge=0, le=100)
    """Share of sessions that the champion answers in mode `canary`, and that a candidate answers while it is tested
    with `promotion=canary`; chosen by a hash of the session, else of the trajectory, else of the conversation's
    beginning, so that none changes sides midway."""

    promotion: Literal["auto", "approve", "canary"] = "auto"
    """What becomes of a candidate that won its gate. `auto`: it serves. `approve`: it waits for a person and `art-patch
    promote`. `canary`: it answers `canary_percent` of the sessions, and serves if it does better there."""

    canary_hours: float = Field(default=24.0, gt=0)
    """How long a policy is tested beside the champion. Without an answer by then it is rejected."""

    canary_sessions: int = Field(default=20, ge=1)
    """Sessions that the tested policy and the champion each need before the tested one may be promoted."""

    canary_margin: float = Field(default=0.0, gt=-1, lt=1)
    """What rewards or feedback must be better by, on a scale from 0 to 1, for a tested policy to be promoted. Below 0
    it need not be better, only not worse by more than that."""

    canary_latency_ratio: float = Field(default=1.5, ge=1)
    """A tested policy that is this many times slower than the champion is rejected."""

    shadow_rate: float = Field(default=1.0, ge=0, le=1)
    """Share of calls that the champion is asked too in mode `shadow`, or a challenger in state `shadow`."""

    shadow_per_minute: int = Field(default=60, ge=0)
    """Budget of what is asked in the background: beyond it calls are not repeated, and counted as skipped."""

    base_url: str | None = None
    """Address of the engine; taken from the store (where `art-patch serve` writes it) unless set."""

    engine_key_file: Path | None = None
    """File with the engine's key, mode 600, for apps on other machines than the engine's. Unset: `engine.key` in the
    project's directory, where `art-patch serve` keeps a copy of the key that it was given."""

    timeout_s: float = Field(default=30.0, gt=0)
    """How long the champion may take for an answer that is not streamed, and between two chunks of one that is."""

    first_token_timeout_s: float = Field(default=2.0, gt=0)
    """How long the champion may take for the first chunk of a stream before the call goes upstream."""

    connect_timeout_s: float = Field(default=0.25, gt=0)
    """How long connecting to the engine may take before the call goes upstream."""

    stateless_responses: bool = False
    """Whether Responses calls that leave `store` unset may be routed. The provider keeps such answers, and an app may
    refer to one by its id later; only the app's authors know that it never does. `store=False` needs no such word."""

    redact: Redact = None
    """What is taken out of texts before they are written: `None`, `secrets` (what looks like a key, token or
    password), or a function from text to text. A call whose texts changed is kept without token ids."""

    otel: Literal["auto", "off"] = "auto"
    """`auto`: `gen_ai.*` spans are emitted if the app has set an OpenTelemetry tracer provider."""

    carry_threads: bool = True
    """Whether threads and thread pools take the surrounding trajectory along."""

    integrations: Literal["auto", "off"] | tuple[str, ...] = "auto"
    """Which frameworks tell of their runs, steps and tools: `auto`, each whose integration is installed, when the app
    imports it; `off`, none; or import names (`langchain_core`), and then a missing one is an error. As a variable:
    separated by commas. One that was armed stays so until the process ends."""

    queue_mib: int = Field(default=64, ge=1)
    """Bytes of recorded calls that may wait to be written; beyond it calls are dropped and counted."""

    flush_interval_s: float = Field(default=0.1, gt=0)
    """How long the writer collects before it writes a batch. When the app is killed, at most this much is lost,
    and in a process's first second or two, before the store is open, all that was recorded by then."""

    poll_interval_s: float = Field(default=0.5, gt=0, le=2.0)
    """How often the app looks whether mode, champion or engine changed. A look costs about a millisecond."""

    group_across: bool = False
    """Whether the same words are the same task under other system prompts and other tools, too. Unset, a prompt that
    was reworded makes another task of each question."""

    embeddings: str | None = None
    """Name of an embedding model that brings together wordings of one task; words alone decide unless set. It sees the
    first user message of each run. Where it is down the cycle goes on by words alone, and what it would have brought
    together may lie on both sides of the hold-out."""

    embeddings_base_url: str | None = None
    """OpenAI-compatible address of that model, ending in /v1. It has no default: what users ask goes there."""

    embeddings_api_key: str | None = Field(default=None, repr=False)
    """Key for that address where it wants one."""

    judge: str | None = None
    """litellm name of the model that ranks siblings, such as `openai/gpt-5-mini` or `hosted_vllm/NAME`."""

    judge_base_url: str | None = None
    """Address of the judge where it is not the provider's own."""

    judge_api_key: str | None = Field(default=None, repr=False)
    """Key for the judge where litellm does not find one in the environment."""

    rubric: str | None = None
    """File or text that replaces RULER's default rubric."""

    reward: str = Field(default="ruler", pattern=r"^(ruler|criteria|[\w.]+:[\w.]+)$")
    """What a trajectory is learned by, made of its scores: `ruler` (a reward that a user or their code gave, else the
    judge's score), `criteria` (a weighted mean), or a function of a group, `module:function` (`rewards.combine`)."""

    criteria: str | None = None
    """Other weights or rules for `reward=criteria`: `accuracy=0.5,efficiency=0,tone=0.2@evals:tone`. Criteria that are
    not named keep their weight; weight 0 leaves one out; `@module:function` is a rule of your own."""

    checks: tuple[str, ...] = ()
    """Functions of a trajectory that the job runs, `module:function`; what they return stands as scores beside the
    judge's. As a variable: separated by commas."""

    feedback_secret: str | None = Field(default=None, min_length=16, repr=False)
    """What feedback links are signed with, the same for the app and `art-patch feedback serve`. Unset: a key file in
    the project's directory, made when first needed, which serves where both run on one machine."""

    feedback_base_url: str | None = None
    """Public address of `art-patch feedback serve` in links, such as `https://feedback.example.com`. Unset: the one
    that the server on this machine said last."""

    vllm_python: Path | None = None
    """Interpreter of the environment that vLLM is installed in; the one that `art-patch init vllm` built unless set."""

    keep_days: float | None = Field(default=None, ge=0)
    """Trajectories whose last call is longer ago are deleted at the end of each `art-patch retrain`, trained on or
    not. Unset: all are kept."""

    keep_trajectories: int | None = Field(default=None, ge=0)
    """No more than this many trajectories, the newest, outlive an `art-patch retrain`. Unset: all are kept."""

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
        if not (value is None or value == "secrets" or callable(value)):
            raise ValueError(f"{value!r} cannot redact; give 'secrets' or a function from text to text")
        return value

    @field_validator("integrations", mode="before")
    @classmethod
    def _are_integrations(cls, value: Any) -> Any:
        if value in ("auto", "off"):
            return value
        names: Any = value.split(",") if isinstance(value, str) else value
        return tuple(str(name).strip() for name in names if str(name).strip())

    @field_validator("checks", mode="before")
    @classmethod
    def _are_checks(cls, value: Any) -> Any:
        names: Any = value.split(",") if isinstance(value, str) else value
        names = tuple(name.strip() for name in names if name.strip())
        for name in names:
            if not re.fullmatch(r"[\w.]+:[\w.]+", name):
                raise ValueError(f"{name!r} names no check; write module:function, several separated by commas")
        return names

    @field_validator("base_url", "judge_base_url", "embeddings_base_url", "feedback_base_url")
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
        scheme = value.partition(":")[0]  # and no more: the rest may hold a password
        if scheme.partition("+")[0] in ("postgres", "postgresql"):
            raise ValueError(f"{scheme}: names no driver that we use; write postgresql+psycopg://user@host/database")
        raise ValueError(
            f"{scheme!r} is not a store this release opens; "
            "write sqlite:////absolute/path/store.db or postgresql+psycopg://user@host/database"
        )

    @cached_property
    def directory(self) -> Path:
        """The project's directory (not created here)."""
        return Path(os.path.abspath(self.home or _user_data())) / self.project

    @property
    def environments(self) -> Path:
        """Directory of the virtual environments that we build; one for all projects, wherever they live."""
        return _user_data() / "environments"

    @property
    def store_url(self) -> str:
        """Database URL with the default filled in."""
        return self.store or f"sqlite:///{self.directory / 'store.db'}"

    @property
    def adapters(self) -> Path:
        """Directory that holds one immutable adapter directory for each policy."""
        return self.directory / "adapters"


def _user_data() -> Path:
    from platformdirs import user_data_path

    return user_data_path("art-patch")


def load_settings(**given: Any) -> Settings:
    """Return the settings; `given` values that are not `None` win over the environment.

    Raises:
        ConfigError: naming the argument, its variable and what is wrong with it.
    """
    settings, wrong = read_settings(**given)
    if wrong is not None:
        raise ConfigError(wrong)
    return settings


def read_settings(**given: Any) -> tuple[Settings, str | None]:
    """Return the settings as if wrong variables were not set, and what is wrong with them; `None` if nothing is.

    Raises:
        ConfigError: an argument is wrong.
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
    variable, said = f"{PREFIX}{str(place[0]).upper()}", message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, place))}: {said} (or {variable})" if place[0] in given else f"{variable}: {said}"


def variables() -> dict[str, Any]:
    """Return the values that variables give, by field. An empty one gives none: so `${X:-}` leaves it."""
    # By hand and not with pydantic-settings, whose import would double what `patch()` costs the app.
    found = {name: os.environ.get(f"{PREFIX}{name.upper()}", "") for name in Settings.model_fields}
    return {name: value for name, value in found.items() if value.strip()}
