"""Every error that art_patch raises on purpose, as one tree.

::

    ArtPatchError                 1   anything below; nothing was lost
    ├── ConfigError               2   an argument, variable or file has an impossible value
    │   └── WrongProject         18   there is no project of this name, but others; nothing was read or written
    ├── GateRejected              4   the candidate did not win; the champion goes on serving
    ├── Busy                      5   another cycle holds the lock
    ├── EngineError               6   the serving engine is missing, failed or refused
    │   ├── ModelNotFound         9   the base model cannot be loaded
    │   ├── PortInUse            10   another process listens there
    │   └── AdapterRejected      11   the adapter is unsafe or does not fit; it was not loaded
    ├── JudgeError                7   the judge or teacher is missing or gave no valid scores
    ├── StoreError                8   the store cannot be opened, read or written
    │   ├── StoreTooNew          12   the store was written by a newer release
    │   └── NotFound             19   there is no such policy, or no store; nothing was changed
    ├── TrainingError            13   the update could not be made; no policy was published
    ├── TransitionError          14   a policy may not move to that state
    ├── MalformedFile            15   a file to import cannot be read; nothing was imported
    ├── HubError                 16   the model hub cannot be reached or refused; the message says what it has
    ├── TrackerError             17   a tracker, or who is notified, cannot be reached or refused
    ├── NotReproducible          20   an update cannot be made again; the answer says why
    │   └── OtherWeights         21   it was made again, and its weights differ
    └── CommandNotFound         127   the program to run does not exist

The number is the exit code of the command line. It exits with 0 on success, which includes "nothing to do", and with
130 on Ctrl-C. A patched call of the app never raises these errors: art_patch's own faults in it are caught and counted.
Every message says what to do next.
"""

from typing import ClassVar


class ArtPatchError(Exception):
    """Base class of all errors that art_patch raises on purpose. An `except` clause with it catches all of them."""

    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, *, exit_code: int | None = None) -> None:
        """Set the exit code; a subclass without one keeps that of its base."""
        cls.exit_code = exit_code or cls.exit_code


class ConfigError(ArtPatchError, exit_code=2):
    """An argument, an ``ART_PATCH_*`` variable or a file has an impossible value."""


class WrongProject(ConfigError, exit_code=18):
    """There is no project of this name, only those that the message names. Nothing was read or changed."""


class GateRejected(ArtPatchError, exit_code=4):
    """The gate or a canary test rejected a policy, so the champion goes on serving. This is a result, no fault."""


class Busy(ArtPatchError, exit_code=5):
    """Another process runs a cycle on this store, so this one did nothing; or it took over this cycle's lease."""


class EngineError(ArtPatchError, exit_code=6):
    """The engine that serves the policies is not running, failed, or refused a request."""


class ModelNotFound(EngineError, exit_code=9):
    """The base model cannot be found or loaded."""


class PortInUse(EngineError, exit_code=10):
    """The server cannot start, because another process listens on its address and port."""


class AdapterRejected(EngineError, exit_code=11):
    """An adapter is unsafe or does not fit the base model; it was not loaded.

    Attributes:
        final: whether loading the same adapter again would fail in the same way. It is `False` if files are missing or
            unreadable, or if the engine serves another base model: the operator can correct these.
    """

    def __init__(self, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


class JudgeError(ArtPatchError, exit_code=7):
    """The judge, or the teacher in its place, is not configured, cannot be reached, or gave no valid scores."""


class StoreError(ArtPatchError, exit_code=8):
    """The store cannot be opened, read or written.

    Attributes:
        may_pass: whether the same data may be written later: the disk is full, or the store is locked or out of reach.
        host: the host and port of a server that did not do what was asked; `None` for a file.
    """

    may_pass = False
    host: str | None = None


class StoreTooNew(StoreError, exit_code=12):
    """The store was written by a newer release of art_patch."""


class NotFound(StoreError, exit_code=19):
    """There is no policy of this name, none that serves, no earlier champion, or no store. Nothing was changed.

    A volume that is not mounted looks like a store that was never made.
    """


class TrainingError(ArtPatchError, exit_code=13):
    """The update could not be made; no policy was published."""


class TransitionError(ArtPatchError, exit_code=14):
    """The state of a policy may not be changed in this way, for example from `rejected` to `champion`."""


class MalformedFile(ArtPatchError, exit_code=15):
    """A file to import cannot be read. The message names the line; nothing of the file was imported."""


class HubError(ArtPatchError, exit_code=16):
    """The model hub cannot be reached, or refused a request, such as an upload."""


class TrackerError(ArtPatchError, exit_code=17):
    """A tracker, or an address of notifications, cannot be reached, or refused data.

    The data that a tracker accepted before is not sent again.
    """


class NotReproducible(ArtPatchError, exit_code=20):
    """An update cannot be made again: its data, parent or base is not there, or it was made on another machine."""


class OtherWeights(NotReproducible, exit_code=21):
    """An update was made again from the same input, and its weights differ. This is a result, no fault."""


class CommandNotFound(ArtPatchError, exit_code=127):
    """The program that `art-patch run` should start does not exist, or may not be executed."""
