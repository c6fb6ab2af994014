"""The Enron mails as an inbox, for who has them: `python enron.py maildir/lay-k --out lay.db`. Nothing is downloaded.

In: a directory of raw mails (the maildir of the archive, or one person's part of it), the CSV with a column `message`
of raw mails, or a Parquet file with columns `from`, `subject`, `date`, `body` (needs pyarrow).
Out: an inbox, oldest mail first. A mail that lies in several folders is taken once; one without a date that can be
read counts as oldest.
"""

from __future__ import annotations

import argparse
import csv
import email.policy
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from email.message import EmailMessage
from email.parser import BytesParser
from email.utils import parseaddr, parsedate_to_datetime
from pathlib import Path
from typing import Any

from inbox import Email, Inbox

_LONGEST_BODY = 8_000
"""Characters of a mail that are kept: several mails must fit into a prompt."""


def load(path: Path) -> list[Email]:
    """Read mails, oldest first, each once.

    Raises:
        ValueError: the path is neither a directory nor a CSV or Parquet file.
    """
    if path.is_dir():
        found = (_parsed(file.read_bytes()) for file in sorted(path.rglob("*")) if file.is_file())
    elif path.suffix == ".csv":
        found = _from_csv(path)
    elif path.suffix == ".parquet":
        found = _from_parquet(path)
    else:
        raise ValueError(f"{path}: give a directory of mails, a .csv or a .parquet file")
    return sorted(dict.fromkeys(found), key=lambda mail: mail.sent)


def _from_csv(path: Path) -> Iterator[Email]:
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file):
            yield _parsed(row["message"].encode())


def _from_parquet(path: Path) -> Iterator[Email]:
    import pyarrow.parquet as parquet

    for batch in parquet.ParquetFile(path).iter_batches(columns=["from", "subject", "date", "body"]):
        for row in batch.to_pylist():
            yield _email(row["date"], row["from"], row["subject"], row["body"])


def _parsed(raw: bytes) -> Email:
    # The older policy: the newer one raises at headers that are no headers, and Enron has those.
    message: Any = BytesParser(_class=EmailMessage, policy=email.policy.compat32).parsebytes(raw)
    part = next((part for part in message.walk() if part.get_content_type() == "text/plain"), None)
    body = b"" if part is None else part.get_payload(decode=True) or b""
    return _email(message["date"], message["from"], message["subject"], body.decode("utf-8", "replace"))


def _email(sent: Any, sender: Any, subject: Any, body: Any) -> Email:
    address = parseaddr(str(sender or ""))[1] or str(sender or "")
    return Email(_iso(sent), address, " ".join(str(subject or "").split()), str(body or "").strip()[:_LONGEST_BODY])


def _iso(sent: Any) -> str:
    """Date and time in UTC, to the minute; empty if unknown."""
    try:
        time = sent if isinstance(sent, datetime) else parsedate_to_datetime(str(sent))
    except ValueError:
        return ""
    return (time if time.tzinfo is None else time.astimezone(UTC)).strftime("%Y-%m-%d %H:%M")


def write(emails: Iterable[Email], path: Path) -> int:
    """Write an inbox; return how many mails it has."""
    inbox = Inbox(path)
    inbox.add(emails)
    count = len(inbox)
    inbox.close()
    return count


def main() -> None:
    """Read mails, write an inbox."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mails", type=Path, help="directory, .csv or .parquet")
    parser.add_argument("--out", type=Path, default=Path("enron.db"), help="file that must not be there (%(default)s)")
    asked = parser.parse_args()
    if asked.out.exists():
        parser.error(f"{asked.out} is there already; name another file")
    print(f"{write(load(asked.mails), asked.out)} mails in {asked.out}")


if __name__ == "__main__":
    main()
