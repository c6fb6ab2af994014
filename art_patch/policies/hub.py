"""Uploads a model's files to a repository on a model hub, with `huggingface_hub`.

Large files are uploaded one by one, and then one commit makes all files visible. A push that fails before the commit
leaves an existing repository unchanged and a new one empty. An existing repository is changed only with `update=True`.
Nothing is sent before `Hub.open_repository` is called. `HF_ENDPOINT` sets the address of the hub. The token comes from
`HF_TOKEN` or from `hf auth login`. Every error of the hub or of the connection is raised as a `HubError`.
"""

import os
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_patch.errors import ConfigError, HubError
from art_patch.policies.copies import is_ours

# The rule of huggingface_hub's `validate_repo_id`, with the owner required. Checked before any file is made.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True, slots=True)
class Repository:
    """The repository on the hub to which a push uploads a model's files."""

    id: str  # OWNER/NAME
    url: str  # of its web page
    private: bool
    is_new: bool  # created for this push


def check_repository(name: str) -> str:
    """Returns `name` if it is a well-formed repository id `OWNER/NAME`, else raises `ConfigError`; asks no hub."""
    if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name:
        raise ConfigError(f"{name!r} is no repository; write OWNER/NAME, as the hub shows it")
    return name


class Hub:
    """A client of the model hub that acts with the user's token."""

    def __init__(self) -> None:
        """Reads the hub's address and the token, without a request; raises `ConfigError` if there is no token."""
        from huggingface_hub import HfApi, get_token

        # The library reads HF_ENDPOINT once, when it is imported. Read it here, so that a later change counts.
        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        token = get_token()
        if token is None:
            raise ConfigError(
                "there is no token for the hub; run `hf auth login`, or set HF_TOKEN to one that may write"
            )
        self._api: Any = HfApi(endpoint=endpoint, token=token, library_name="art-patch")

    def open_repository(self, name: str, *, private: bool, update: bool) -> Repository:
        """Creates the repository `name` (`OWNER/NAME`), `private` or not, or with `update` looks up the existing one.

        Raises `HubError` if it exists without `update`, is missing with `update`, or the hub refuses the request.
        """
        with self._asking(f"{name} was not opened"):
            if not update:
                url = self._api.create_repo(name, private=private)
                return Repository(name, str(url), private, True)
            found = self._api.repo_info(name)
            return Repository(name, f"{self._api.endpoint}/{name}", bool(found.private), False)

    def upload(
        self, repository: Repository, directory: Path, files: Sequence[str], *, message: str,
        sent: Callable[[int, str], None],
    ) -> str:  # fmt: skip
        """Uploads `files` of `directory`, makes them visible with one commit, and returns the commit's id.

        The commit deletes files of an earlier copy that are not in `files`; files that somebody else added stay. `sent`
        is called after each file with the number of files uploaded and the name of the newest one.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # the command shows its own
        left = "it is empty now; push again with --update" if repository.is_new else "it is as it was"
        with self._asking(f"{repository.id} has nothing of it, {left}"):
            # An adapter of an earlier push beside a merged model would be neither, so it goes in the same commit.
            there = [] if repository.is_new else self._api.list_repo_files(repository.id)
            stale = sorted(file for file in there if is_ours(file) and file not in files)
            additions = [CommitOperationAdd(name, str(directory / name)) for name in files]
            # One by one, so that progress is visible. Uploaded files stay invisible until the commit.
            for done, addition in enumerate(additions, 1):
                self._api.preupload_lfs_files(repository.id, additions=[addition])
                sent(done, addition.path_in_repo)
            operations = [*additions, *(CommitOperationDelete(name) for name in stale)]
            return str(self._api.create_commit(repository.id, operations, commit_message=message).oid)

    @contextmanager
    def _asking(self, so: str) -> Generator[None]:
        """Turns whatever the hub raises into a `HubError`; `so` says what that means for the repository."""
        try:
            yield
        except Exception as error:  # no connection, a refusal, a broken answer: the hub raises a dozen types
            raise HubError(f"{_meaning(error, str(self._api.endpoint))}; {so}") from error


def _meaning(error: BaseException, endpoint: str) -> str:
    # The library raises a RuntimeError at the end of a failed upload, and the hub's own answer is its cause.
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = " ".join(str(getattr(error, "server_message", None) or "").split())
    why = f" ({said})" if said else ""
    known = {
        401: f"{endpoint} does not know the token{why}; run `hf auth login` again, or set HF_TOKEN to a valid one",
        403: f"the token may not write there{why}; take one with the right to write, or a repository of your own",
        404: f"{endpoint} has no such repository{why}; leave --update out to make it",
        409: f"the repository is there already{why}; add --update for a new commit in it, or name another",
    }
    if status is not None:
        return known.get(status, f"{endpoint} answered {status}{why}")
    return f"{endpoint} cannot be asked ({type(error).__name__}: {' '.join(str(error).split())})"
