"""Says numbers in words that people read: durations, shares and counts."""

from collections.abc import Sequence


def ago(seconds: float) -> str:
    """Return a duration in the largest unit that fits: `42 s`, `3 min`, `5 h`, `2 d`."""
    for limit, unit, size in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def seconds(value: float) -> str:
    """Return a duration in words: `40 ms`, `1.3 s`, `2 min`."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def size(count: int) -> str:
    """Return a size in units of 1024, as file systems have it: `12.3 MiB`."""
    for unit, limit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count} B"


def share(value: float | None) -> str:
    """Return a share of 0 to 1 as a percentage, or `-` if it is `None`."""
    return "-" if value is None else f"{value:.1%}"


def usd(value: float | None) -> str:
    """Return an amount in US dollars, `unknown` if it is `None`: `$1,234.50`, `-$0.30`."""
    if value is None:
        return "unknown"
    # -0.004 is shown as $0.00, without a sign.
    return f"-${-value:,.2f}" if round(value, 2) < 0 else f"${abs(value):,.2f}"


def counted(number: int, one: str, many: str) -> str:
    """Return the number with the right noun, singular or plural: `1 call`, `2 calls`."""
    return f"{number} {one if number == 1 else many}"


def listed(parts: Sequence[str], otherwise: str) -> str:
    """Return the parts joined with commas, or the text `otherwise` if there are no parts."""
    return ", ".join(parts) or otherwise
