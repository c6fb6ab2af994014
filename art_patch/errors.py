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

The number is the exit code of the command line. 0 is success, "nothing to do" included, and 130 is Ctrl-C.
None of these is ever raised inside a patched call: there our own faults are swallowed and counted. Every message says
what to do next.
"""

from __future__ import annotations


class ArtPatchError(Exception):
    """Root of the tree; catch this to catch everything we raise on purpose."""

    exit_code: int = 1


class ConfigError(ArtPatchError):
    """An argument, an ``ART_PATCH_*`` variable or a file has an impossible value."""

    exit_code = 2


class WrongProject(ConfigError):
    """The store belongs to another project; the message names it."""

    exit_code = 18


class GateRejected(ArtPatchError):
    """The candidate did not win against the champion, which goes on serving. This is a result and not a fault."""

    exit_code = 4


class Busy(ArtPatchError):
    """Another cycle is running on this store."""

    exit_code = 5


class EngineError(ArtPatchError):
    """The serving engine is missing, failed or refused a request."""

    exit_code = 6


class ModelNotFound(EngineError):
    """The base model cannot be found or loaded."""

    exit_code = 9


class PortInUse(EngineError):
    """Another process listens on the address."""

    exit_code = 10


class AdapterRejected(EngineError):
    """An adapter is unsafe or does not fit the base model; it was not loaded.

    Attributes:
        final: whether a later try would fail in the same way. False where files are missing or cannot be read, or the
            engine serves another base: the operator can correct that, and the adapter may be sound.
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
    """A policy may not move to that state from where it is."""

    exit_code = 14


class MalformedFile(ArtPatchError):
    """A file to import cannot be read. The message names the line; nothing of the file was imported."""

    exit_code = 15


class HubError(ArtPatchError):
    """The model hub cannot be reached, or refused."""

    exit_code = 16


class TrackerError(ArtPatchError):
    """A tracker cannot be reached, or refused. Data that it accepted before is noted and not sent again."""

    exit_code = 17


class CommandNotFound(ArtPatchError):
    """The program for `art-patch run` does not exist, or may not be executed."""

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
