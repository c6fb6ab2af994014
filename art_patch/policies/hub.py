"""Files of a model -> a repository on a model hub, by `huggingface_hub`.

Large files go up one by one, then one commit makes all of them visible: a push that fails on the way leaves the
repository as it was, or new and empty. A repository that is there is not touched unless `update` says so; then what an
earlier push left there and this one does not hold is deleted in the same commit, because a model beside an adapter of
another step is neither. Nothing is sent before `Hub.open_repository`.

The hub is the one of `HF_ENDPOINT`, read when it is asked for; the token is that of `HF_TOKEN` or `hf auth login`. What
the hub says is told in a `HubError`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_patch.errors import ConfigError, HubError
from art_patch.policies.model_files import is_ours

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_EXISTS, _UNAUTHORISED, _FORBIDDEN, _MISSING = 409, 401, 403, 404


@dataclass(frozen=True, slots=True)
class Repository:
    """Where a push goes.

    Attributes:
        id: `OWNER/NAME`.
        url: for people.
        private: whether only its owner sees it.
        is_new: made for this push.
    """

    id: str
    url: str
    private: bool
    is_new: bool


def check_repository(name: str) -> str:
    """Return a well-formed `OWNER/NAME`.

    Raises:
        ConfigError: it is none.
    """
    if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name:
        raise ConfigError(f"{name!r} is no repository; write OWNER/NAME, as the hub shows it")
    return name


class Hub:
    """The user's account on a hub."""

    def __init__(self) -> None:
        """Find the hub and the token; nothing is sent.

        Raises:
            ConfigError: there is no token.
        """
        from huggingface_hub import HfApi, get_token

        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None  # the library read it when it was imported
        token = get_token()
        if token is None:
            raise ConfigError(
                "there is no token for the hub; run `hf auth login`, or set HF_TOKEN to one that may write"
            )
        self._api: Any = HfApi(endpoint=endpoint, token=token, library_name="art-patch")

    def open_repository(self, name: str, *, private: bool, update: bool) -> Repository:
        """Make a repository, or with `update` find the one that is there.

        Args:
            name: `OWNER/NAME`.
            private: of a new one; one that is there stays as visible as it is.
            update: it must be there already.

        Raises:
            HubError: it is there, or is not, or the hub refuses.
        """
        with self._asking(f"{name} was not opened"):
            if not update:
                url = self._api.create_repo(name, private=private)
                return Repository(name, str(url), private, True)
            found = self._api.repo_info(name)
            return Repository(name, f"{self._api.endpoint}/{name}", bool(found.private), False)

    def upload(
        self,
        repository: Repository,
        directory: Path,
        files: Sequence[str],
        *,
        message: str,
        sent: Callable[[int, str], None],
    ) -> str:
        """Commit files; return the commit.

        Args:
            repository: of `open_repository`.
            directory: where they lie.
            files: their names.
            message: of the commit.
            sent: told after each file how many are there, and which was last.

        Raises:
            HubError: the hub refuses; no file is visible there that was not before.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # the command shows its own
        left = "it is empty now; push again with --update" if repository.is_new else "it is as it was"
        with self._asking(f"{repository.id} has nothing of it, {left}"):
            stale = [] if repository.is_new else self._stale(repository.id, files)
            additions = [CommitOperationAdd(name, str(directory / name)) for name in files]
            for done, addition in enumerate(additions, 1):
                self._api.preupload_lfs_files(repository.id, additions=[addition])
                sent(done, addition.path_in_repo)
            operations = [*additions, *(CommitOperationDelete(name) for name in stale)]
            return str(self._api.create_commit(repository.id, operations, commit_message=message).oid)

    def _stale(self, name: str, files: Sequence[str]) -> list[str]:
        return sorted(file for file in self._api.list_repo_files(name) if is_ours(file) and file not in files)

    @contextmanager
    def _asking(self, so: str) -> Generator[None]:
        """Say what the hub says, and what that means for the repository."""
        try:
            yield
        except Exception as error:  # no connection, a refusal, a broken answer: the hub raises a dozen types
            raise HubError(f"{_meaning(error, str(self._api.endpoint))}; {so}") from error


def _meaning(error: BaseException, endpoint: str) -> str:
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # how the library ends an upload
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = " ".join(str(getattr(error, "server_message", None) or "").split())
    why = f" ({said})" if said else ""
    if status == _UNAUTHORISED:
        return f"{endpoint} does not know the token{why}; run `hf auth login` again, or set HF_TOKEN to a valid one"
    if status == _FORBIDDEN:
        return f"the token may not write there{why}; take one with the right to write, or a repository of your own"
    if status == _EXISTS:
        return f"the repository is there already{why}; add --update for a new commit in it, or name another"
    if status == _MISSING:
        return f"{endpoint} has no such repository{why}; leave --update out to make it"
    if status is not None:
        return f"{endpoint} answered {status}{why}"
    return f"{endpoint} cannot be asked ({type(error).__name__}: {' '.join(str(error).split())})"
