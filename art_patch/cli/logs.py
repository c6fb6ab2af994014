"""The log of a server or job, on stderr: a line for each event, with time, level, host and process, as text or JSON.

art_patch's own loggers and those of its libraries write through one handler. Libraries are heard from WARNING on, since
at lower levels some of them log what is sent. Secrets are replaced by `***`. Of an exception, classes and places in the
code are written, and a message only where none of the app's texts can stand in it.
"""

import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Any, cast

from art_patch._lib.events import written
from art_patch._lib.option import Option
from art_patch._lib.words import one_line, one_of
from art_patch.errors import ArtPatchError
from art_patch.recording import hide

LEVELS, FORMATS = ("debug", "info", "warning", "error"), ("text", "json")


@dataclass(frozen=True, slots=True)
class Log:
    """The options of commands that run a server or a job; the log is written while the command runs."""

    log_level: Annotated[
        str, Option("Write log lines of this level and above: debug, info, warning or error.", env=True)
    ] = "info"
    log_format: Annotated[str, Option("Write log lines as text, or as json: one object a line.", env=True)] = "text"
    _undo: ExitStack = field(default_factory=ExitStack, init=False, repr=False, compare=False)

    def __enter__(self) -> None:
        """Begin to write the log."""
        one_of("--log-level", self.log_level, LEVELS)
        one_of("--log-format", self.log_format, FORMATS)
        level, handler = getattr(logging, self.log_level.upper()), _ToStderr()
        handler.setFormatter(_Json() if self.log_format == "json" else _Text())
        for logger, its in (
            (logging.getLogger(), max(level, logging.WARNING)),
            (logging.getLogger("art_patch"), level),
        ):
            self._undo.callback(logger.setLevel, logger.level)
            logger.setLevel(its)
        logging.getLogger().addHandler(handler)
        self._undo.callback(logging.getLogger().removeHandler, handler)
        self._undo.enter_context(written())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End the log; in a log of JSON, the error that ends the command is its last line."""
        if isinstance(error, ArtPatchError) and self.log_format == "json":
            facts = {"event": "failed", "error": type(error).__name__, "exit_code": error.exit_code}
            logging.getLogger("art_patch").error("%s", error, extra={"facts": facts})
            in_log(error, noted=True)
        self._undo.close()


def in_log(error: BaseException, *, noted: bool = False) -> bool:
    """Return whether an error stands in the log already, in JSON, so that it is not printed once more."""
    if noted:
        error.__dict__["art_patch_in_log"] = True
    return "art_patch_in_log" in error.__dict__


class _ToStderr(logging.Handler):
    """Not a `StreamHandler`: a progress bar takes the place of stderr for a time, to print lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    host = socket.gethostname()

    def facts(self, record: logging.LogRecord) -> dict[str, Any]:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return {
            "time": f"{at}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname.lower(),
            "host": self.host,
            "process": os.getpid(),
            "logger": record.name,
            "message": one_line(hide(_words(record))),
        }

    def fault(self, record: logging.LogRecord) -> list[str]:
        """Return where an exception comes from, a line each; empty if the record has none."""
        error = record.exc_info[1] if record.exc_info else None
        return [] if error is None else [one_line(hide(line)) for line in _places(error)]


class _Text(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = self.facts(record)
        head = f"{facts['time']} {record.levelname} {facts['host']} {facts['process']} {facts['logger']}: "
        return "\n    ".join([head + facts["message"], *self.fault(record)])


class _Json(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = self.facts(record)
        own = {key: _hidden(value, key) for key, value in getattr(record, "facts", {}).items() if key not in facts}
        fault = self.fault(record)
        return json.dumps(facts | own | ({"exception": fault} if fault else {}))


def _words(record: logging.LogRecord) -> str:
    """Return a record's message; asyncio's quotes an exception that nobody retrieved, which may have a user's text."""
    words = record.getMessage()
    return words.partition("\n")[0] if record.name == "asyncio" else words


def _hidden(value: Any, key: str = "") -> Any:
    """Return a fact without secrets; `key` is its name, since what is called `password` is one.

    Not in the finished line: there a secret seems to end at another place, and a quotation mark would go with it.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _hidden(each, str(name)) for name, each in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_hidden(each, key) for each in cast("Sequence[object]", value)]
    return hide(f"{key}={value}").removeprefix(f"{key}=")


def _places(error: BaseException) -> list[str]:
    lines, chain = list[str](), [error]
    while (at := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 5:
        chain.append(at)
    for each in chain:
        # Any other message may quote a prompt, as those of parsers and databases do.
        is_ours = isinstance(each, ArtPatchError | OSError | MemoryError) or type(each) is RuntimeError
        lines.append(f"{type(each).__name__}: {each}" if is_ours else type(each).__name__)
        frames = traceback.extract_tb(each.__traceback__)[-10:]
        lines += [f"at {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    return lines
