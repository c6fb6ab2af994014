"""Settings: explicit argument, then `ART_PATCH_*` variable, then default. One record for app, job and server."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from art_patch.errors import ConfigError
from art_patch.records import Mode

PREFIX = "ART_PATCH_"


class Settings(BaseSettings):
    """Everything that can be set. Each field is read from `ART_PATCH_<FIELD>` unless given."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    project: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Keeps the traffic and policies of different agents apart: each project has its own directory."""

    home: Path | None = None
    """Directory of all projects; the user's data directory unless set. Store and adapters live below it."""

    store: str | None = None
    """Database URL; `sqlite:///<home>/<project>/store.db` unless set."""

    mode: Mode = "route"
    """`route`: to the champion if one serves, else upstream. `record`: always upstream. `off`: do nothing.
    A mode set in the store (`art-patch mode`) overrules this while the app runs."""

    base_url: str | None = None
    """Address of the engine; taken from the store (where `art-patch serve` writes it) unless set."""

    timeout_s: float = Field(default=30.0, gt=0)
    """How long the champion may keep a caller waiting before the call goes upstream."""

    connect_timeout_s: float = Field(default=0.25, gt=0)
    """How long connecting to the engine may take before the call goes upstream."""

    queue_mib: int = Field(default=64, ge=1)
    """Bytes of recorded calls that may wait to be written; beyond it calls are dropped and counted."""

    flush_interval_s: float = Field(default=0.1, gt=0)
    """How long the writer collects before it writes a batch; at most this much is lost when the app is killed."""

    poll_interval_s: float = Field(default=1.0, gt=0, le=2.0)
    """How often the app looks whether mode, champion or engine changed."""

    judge: str | None = None
    """litellm name of the model that ranks siblings, such as `openai/gpt-5-mini` or `hosted_vllm/NAME`."""

    judge_base_url: str | None = None
    """Address of the judge where it is not the provider's own."""

    judge_api_key: str | None = Field(default=None, repr=False)
    """Key for the judge where litellm does not find one in the environment."""

    rubric: str | None = None
    """File or text that replaces RULER's default rubric."""

    @field_validator("base_url", "judge_base_url")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is not an http(s) address; write it like http://127.0.0.1:8700/v1")
        return value

    @field_validator("store")
    @classmethod
    def _is_known_store(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("sqlite:///"):
            raise ValueError(f"{value!r} is not a store this release opens; write sqlite:////absolute/path/store.db")
        return value

    @cached_property
    def directory(self) -> Path:
        """The project's directory (not created here)."""
        if self.home is not None:
            root = self.home
        else:
            from platformdirs import user_data_path

            root = user_data_path("art-patch")
        return Path(os.path.abspath(root)) / self.project

    @property
    def store_url(self) -> str:
        """Database URL with the default filled in."""
        return self.store or f"sqlite:///{self.directory / 'store.db'}"

    @property
    def adapters(self) -> Path:
        """Directory that holds one immutable adapter directory for each policy."""
        return self.directory / "adapters"


def load_settings(**given: Any) -> Settings:
    """Return the settings; `given` values that are not `None` win over the environment.

    Raises:
        ConfigError: naming the argument, its variable and what is wrong with it.
    """
    try:
        return Settings(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg']} (or {PREFIX}{str(e['loc'][0]).upper()})"
            for e in error.errors()
        ]
        raise ConfigError("; ".join(lines)) from None
