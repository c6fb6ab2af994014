"""Every error that art_patch raises on purpose, as one tree.

::

    ArtPatchError                 1   anything below; nothing was lost
    ├── ConfigError               2   an argument, variable or file has an impossible value
    │   └── WrongProject         18   the store belongs to another project; nothing was read or written
    ├── GateRejected              4   the candidate did not win; the champion goes on serving
    ├── Busy                      5   another cycle holds the lock
    ├── EngineError               6   the serving engine is missing, failed or refused
    │   ├── ModelNotFound         9   the base model cannot be loaded
    │   ├── PortInUse            10   another process listens there
    │   └── AdapterRejected      11   the adapter is unsafe or does not fit; it was not loaded
    ├── JudgeError                7   the judge is missing or gave no valid scores
    ├── StoreError                8   the store cannot be opened, read or written
    │   └── StoreTooNew          12   the store was written by a newer release
    ├── TrainingError            13   the update could not be made; no policy was published
    ├── TransitionError          14   a policy may not move to that state
    ├── MalformedFile            15   a file to import cannot be read; nothing was imported
    ├── HubError                 16   the model hub cannot be reached or refused; the message says what it has
    ├── TrackerError             17   a tracker cannot be reached or refused; accepted data is not sent again
    └── CommandNotFound         127   the program to run does not exist

The number is the exit code of the command line. It exits with 0 on success, which includes "nothing to do", and with
130 on Ctrl-C. A patched call of the app never raises these errors: art_patch's own faults in it are caught and counted.
Every message says what to do next.
"""

from __future__ import annotations


class ArtPatchError(Exception):
    """Base class of all errors that art_patch raises on purpose. An `except` clause with it catches all of them."""

    exit_code: int = 1


class ConfigError(ArtPatchError):
    """An argument, an ``ART_PATCH_*`` variable or a file has an impossible value."""

    exit_code = 2


class WrongProject(ConfigError):
    """The store belongs to another project, which the message names. No recorded data of it was read or changed."""

    exit_code = 18


class GateRejected(ArtPatchError):
    """The gate or a canary test rejected a policy, so the champion goes on serving. This is a result, no fault."""

    exit_code = 4


class Busy(ArtPatchError):
    """Another process runs a cycle on this store, so this one did nothing; or it took over this cycle's lease."""

    exit_code = 5


class EngineError(ArtPatchError):
    """The engine that serves the policies is not running, failed, or refused a request."""

    exit_code = 6


class ModelNotFound(EngineError):
    """The base model cannot be found or loaded."""

    exit_code = 9


class PortInUse(EngineError):
    """The server cannot start, because another process listens on its address and port."""

    exit_code = 10


class AdapterRejected(EngineError):
    """An adapter is unsafe or does not fit the base model; it was not loaded.

    Attributes:
        final: whether loading the same adapter again would fail in the same way. It is `False` if files are missing or
            unreadable, or if the engine serves another base model: the operator can correct these.
    """

    exit_code = 11

    def __init__(self, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


class JudgeError(ArtPatchError):
    """The judge is not configured, cannot be reached, or gave no valid scores."""

    exit_code = 7


class StoreError(ArtPatchError):
    """The store cannot be opened, read or written."""

    exit_code = 8


class StoreTooNew(StoreError):
    """The store was written by a newer release of art_patch."""

    exit_code = 12


class TrainingError(ArtPatchError):
    """The update could not be made; no policy was published."""

    exit_code = 13


class TransitionError(ArtPatchError):
    """The state of a policy may not be changed in this way, for example from `rejected` to `champion`."""

    exit_code = 14


class MalformedFile(ArtPatchError):
    """A file to import cannot be read. The message names the line; nothing of the file was imported."""

    exit_code = 15


class HubError(ArtPatchError):
    """The model hub cannot be reached, or refused a request, such as an upload."""

    exit_code = 16


class TrackerError(ArtPatchError):
    """A tracker cannot be reached, or refused data. The data that it accepted before is not sent again."""

    exit_code = 17


class CommandNotFound(ArtPatchError):
    """The program that `art-patch run` should start does not exist, or may not be executed."""

    exit_code = 127


__all__ = [
    "AdapterRejected",
    "ArtPatchError",
    "Busy",
    "CommandNotFound",
    "ConfigError",
    "EngineError",
    "GateRejected",
    "HubError",
    "JudgeError",
    "MalformedFile",
    "ModelNotFound",
    "PortInUse",
    "StoreError",
    "StoreTooNew",
    "TrackerError",
    "TrainingError",
    "TransitionError",
    "WrongProject",
]
