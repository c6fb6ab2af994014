"""Synthetic traffic with a known truth, for `grouping.py`: what a dozen kinds of agents are asked.

A scenario is a kind of task and the values of its slots (item, number, city, problem, ...). Its runs differ in volatile
slots (dates, ids, names, addresses) and, where people write, in how they write it. The truth is what a person would
say: the same slots under the same system prompt are the same task, whatever else the text holds.

- Five of twelve families are prompts that an app fills in (review, extraction, queries, translation, classification):
  volatile slots, no typos. The others are people's own words (refunds, prices, accounts, parcels, bookings, faults).
- Of the people's texts 30 % have courtesies (one in twenty of a kind that art_patch has never heard of), 5 % a typo
  at a random letter of a random word, 15 % other case or punctuation, 5 % their halves the other way round, 1 % put it
  in entirely other words.
- Half of the scenarios are hard negatives of another one: one slot is changed, to a number one off or to another value;
  among the values are opposites and words one letter apart ("contract", "contact").
- The runs of a scenario number 5 on average, few have many and many have one.

What it cannot show: recall on real traffic. Courtesies unheard of and entirely other words are not found, so recall is
what their shares leave (with one courtesy in ten unheard of it is 0.944); a figure above the target says that nothing
else is lost. Nor whether real wordings differ in these ways and shares; languages other than English; masks that
real ids escape, because ids here are made in the dozen spellings that came to mind; tasks whose difference stands in
what is masked (two meetings on different days are one task here by definition); meaning that is the same in other words
beyond the 1 %.
"""

# ruff: noqa: SIM905 - long lists of words read better as text

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

from art_patch.types import Call, Choice, Trajectory, TrajectoryInfo

FIRST = (
    "Anna Bob Carla Dmitri Elena Farid Grace Hiroshi Ines Jamal Katrin Liam Mei Nadia Oscar Priya Quentin Rosa".split()
)
LAST = "Smith Garcia Okafor Tanaka Novak Rossi Müller Haddad O'Brien Kowalska Singh Jensen Dubois Costa Larsen".split()
MONTHS = "January February March April May June July August September October November December".split()

VALUES: dict[str, tuple[str, ...]] = {
    "item": tuple(
        """headphones kettle backpack lamp keyboard blender jacket sneakers tent monitor speaker mattress charger
        toaster bicycle helmet sofa carpet drill printer camera router scarf wallet umbrella suitcase notebook pillow
        curtain statue statute trail trial dessert desert plum plumb""".split()
    ),
    "colour": tuple("red blue green black white yellow purple orange grey pink brown silver".split()),
    "city": tuple("Berlin Paris London Madrid Rome Vienna Oslo Lisbon Dublin Prague Warsaw Austin Boston".split()),
    "n": tuple(str(n) for n in range(2, 40)),
    "problem": (
        "it arrived broken", "it never arrived", "the wrong size came", "the wrong colour came", "a part is missing",
        "it stopped working after a week", "it was delivered to my neighbour", "I paid twice", "it smells strange",
    ),
    "ask": ("I want a refund", "I want a replacement", "I want to return it", "I want store credit", "what can I do"),
    "action": ("change", "cancel", "delete", "enable", "disable", "verify", "export", "import", "transfer", "renew"),
    "thing": (
        "subscription", "password", "contract", "contact", "newsletter", "billing address", "country", "county",
        "payment method", "two-factor login", "family plan", "gift card", "loyalty points", "profile picture",
    ),
    "when": ("before the trial ends", "after the trial ends", "without losing my data", "on my phone", "for my team"),
    "device": ("laptop", "router", "printer", "tablet", "phone", "television", "thermostat", "doorbell"),
    "code": tuple(str(n) for n in (*range(400, 420), *range(500, 512), 17, 42, 43, 1001, 1002, 8080)),
    "doing": ("log in", "print a page", "open the app", "connect to the network", "update the firmware", "play music"),
    "room": ("single room", "double room", "suite", "room with a view", "room without a view", "family room"),
    "extra": ("with breakfast", "without breakfast", "with parking", "near the station", "and a late checkout"),
    "language": tuple("German French Spanish Italian Dutch Polish Turkish Japanese Korean Greek Danish".split()),
    "phrase": (
        "Thank you very much", "Please", "Where is the station?", "I would like to pay", "The meeting is cancelled",
        "The meeting is confirmed", "Two coffees, please", "Three coffees, please", "How are you?", "My name is Max",
    ),
    "repo": tuple("payments-api web-shop ledger auth-service mobile-app search-index pipeline infra-tools".split()),
    "file": tuple("client.py retry.py views.py models.py cache.py routes.py tasks.py limits.py session.py".split()),
    "setting": tuple("timeout_s max_retries pool_size batch_size ttl_minutes page_size workers".split()),
    "vendor": tuple("Acme Globex Initech Umbrella Stark Wayne Hooli Vandelay Wonka Cyberdyne Soylent".split()),
    "metric": ("revenue", "profit", "returns", "page views", "signups", "churn"),
    "table": ("customers", "products", "stores", "campaigns", "employees", "suppliers"),
    "region": ("Europe", "Asia", "Africa", "North America", "South America", "Oceania"),
    "labels": ("billing, bug, other", "urgent, normal, low", "positive, negative, neutral", "spam, ham"),
}  # fmt: skip


class Family(NamedTuple):
    """A kind of task.

    Attributes:
        text: slots in braces; those in capitals are volatile. `|` parts what people may say the other way round.
        other: the same in entirely other words; empty where an app writes.
        setting: the system prompt.
    """

    text: str
    other: str
    setting: str


SHOP = "You answer customers of a shop. Today is {DATE}. Be brief."
FAMILIES = (
    Family("I ordered {n} {colour} {item} on {DATE} (order {ORDER}) and {problem}, {ask}.",
           "Regarding {ORDER} from {DATE}: those {n} {item}, {colour}. Trouble: {problem}. Hence: {ask}.", SHOP),
    Family("What is the price of {n} {colour} {item} shipped to {city}?",
           "How much would {n} {item} in {colour} cost me if sent over to {city}?", SHOP),
    Family("My account is {EMAIL}.| How do I {action} my {thing} {when}?",
           "{EMAIL} here, looking for a way to {action} the {thing} {when}.", SHOP),
    Family("Where is my parcel with the {colour} {item} from {city} to {city2}?| The tracking number is {TRACKING}.",
           "Parcel {TRACKING}, {city} towards {city2}, {colour} {item} inside: any news?", SHOP),
    Family("Book a {room} in {city} for {n} nights from {DATE} {extra}.| You can reach me at {PHONE}.",
           "Need somewhere to sleep in {city}, arriving {DATE}, {n} nights, {room} {extra}. Phone {PHONE}.",
           "You are a travel assistant."),
    Family("My {colour} {device} shows error {code} when I {doing}.| Its address is {IP}.",
           "Got {code} on the {device} ({colour}) at {IP}; happens as I {doing}.", "You are the IT help desk."),
    Family("Can I pay {n} {item} in {city} with a gift card| and have them sent as a present?",
           "Gift card for a present of {n} {item}, {city}, possible?", SHOP),
    Family("Review this pull request: {URL}\nRepository: {repo}\nFile: src/{file}\nCommit: {SHA}\n\n```diff\n"
           "-{setting} = {n}\n+{setting} = {n2}\n```", "", "You review code. Point out bugs only."),
    Family("Extract vendor, item and total as JSON from this invoice.\n\n{vendor} Ltd.\nInvoice {INVOICE}\n"
           "Date: {DATE}\n{n} x {item}, {colour}, at {n2}.50 each\nContact: {EMAIL}", "", "You extract data."),
    Family("Request {UUID} at {STAMP}. Write SQL for the top {n} {table} by {metric} in {region} over {n2} weeks.", "",
           "You write SQL for PostgreSQL."),
    Family('Translate from {language} to {language2}, reading age {n}: "{phrase}"', "", "You translate."),
    Family("Classify ticket {ORDER} as one of: {labels}.\nReceived: {DATE} from {EMAIL}\n\nMy {device} has a problem: "
           "error {code} when I {doing}", "", "You classify tickets."),
)  # fmt: skip

COURTESIES = (
    ("Hi, ", ""), ("Hello, ", ""), ("Hi {FIRST}, ", ""), ("Dear support team, ", ""), ("Good morning, ", ""),
    ("", " Thanks!"), ("", " Thank you in advance."), ("", "\n\nBest regards,\n{FIRST} {LAST}"),
    ("", "\nThanks, {FIRST}"), ("Please help. ", ""), ("Hello there, ", " Cheers, {FIRST}"), ("Hey, ", " Many thanks!"),
    ("Hi, quick question. ", ""), ("Hi,\n\n", "\n\nKind regards\n{FIRST} {LAST}"),
)  # fmt: skip
UNHEARD_OF = (
    ("Yo ", ""), ("", " This is driving me nuts."), ("I am in a hurry. ", ""), ("", " Looking forward to your answer."),
    ("Long time customer here. ", ""), ("", " Not happy!!"),
)  # fmt: skip

OTHER_MARKS: tuple[Callable[[str], str], ...] = (
    str.lower,
    lambda text: text.rstrip(".?!"),
    lambda text: text.replace(",", ""),
    lambda text: f"{text}!!",
)


def _date(rng: random.Random) -> str:
    year, month, day = rng.choice((2025, 2026)), rng.randint(1, 12), rng.randint(1, 28)
    name = MONTHS[month - 1]
    return rng.choice(
        (
            f"{year}-{month:02}-{day:02}", f"{day:02}/{month:02}/{year}", f"{day}.{month}.{year}",
            f"{name} {day}, {year}", f"{day} {name} {year}",
            f"{name[:3]} {day}", f"{day} {name[:3]} {year}", f"{year}/{month:02}/{day:02}",
            f"{name} {day}{'st' if day in (1, 21) else 'nd' if day in (2, 22) else 'rd' if day in (3, 23) else 'th'}",
        )
    )  # fmt: skip


def _digits(rng: random.Random, size: int) -> str:
    return "".join(rng.choices(string.digits, k=size))


def _hex(rng: random.Random, size: int) -> str:
    return f"{rng.getrandbits(4 * size):0{size}x}"


def _email(rng: random.Random) -> str:
    name = f"{rng.choice(FIRST)}.{rng.choice(LAST)}".lower().replace("'", "").replace("ü", "ue")
    return f"{name}{rng.choice(('', rng.randint(1, 99)))}@{rng.choice(('mail.com', 'example.org', 'post.example.de'))}"


VOLATILE: dict[str, Callable[[random.Random], str]] = {
    "DATE": _date,
    "STAMP": lambda r: f"2026-{r.randint(1, 12):02}-{r.randint(1, 28):02}T12:{r.randint(0, 59):02}:07Z",
    "ORDER": lambda r: r.choice(
        (f"ORD-{_digits(r, 5)}", f"#{_digits(r, 5)}", _digits(r, 9), f"SO-2026-{_digits(r, 6)}")
    ),
    "INVOICE": lambda r: r.choice((f"INV-2026-{_digits(r, 4)}", f"no. {_digits(r, 8)}", f"R{_digits(r, 7)}")),
    "TRACKING": lambda r: r.choice((f"1Z{_digits(r, 3)}AA{_digits(r, 10)}", f"DE{_digits(r, 14)}", _digits(r, 12))),
    "EMAIL": _email,
    "PHONE": lambda r: r.choice(
        (f"+49 170 {_digits(r, 7)}", f"({_digits(r, 3)}) 555-{_digits(r, 4)}", f"0{_digits(r, 9)}")
    ),
    "IP": lambda r: ".".join(str(r.randint(1, 254)) for _ in range(4)),
    "URL": lambda r: f"https://git.example.com/team/pulls/{r.randint(10_000, 99_999)}?view={_hex(r, 12)}",
    "SHA": lambda r: _hex(r, r.choice((10, 40))),
    "UUID": lambda r: str(uuid.UUID(int=r.getrandbits(128), version=4)),
    "FIRST": lambda r: r.choice(FIRST),
    "LAST": lambda r: r.choice(LAST),
}  # fmt: skip


class Scenario(NamedTuple):
    """A family with its slots filled."""

    family: Family
    slots: tuple[tuple[str, str], ...]


def _slots_of(text: str) -> list[str]:
    return sorted({name for _, name, _, _ in string.Formatter().parse(text) if name and name.islower()})


def _any_value(slot: str, rng: random.Random) -> str:
    return rng.choice(VALUES[slot.rstrip("2")])


def scenarios(number: int, rng: random.Random) -> list[Scenario]:
    """So many scenarios, no two alike, half of them one slot away from another."""
    found: dict[Scenario, None] = {}
    made: list[Scenario] = []
    while len(made) < number:
        if made and rng.random() < 0.5:
            family, slots = rng.choice(made)
            changed = dict(slots)
            slot = rng.choice(list(changed))
            value = changed[slot]
            changed[slot] = str(int(value) + 1) if value.isdigit() and rng.random() < 0.7 else _any_value(slot, rng)
        else:
            family = rng.choice(FAMILIES)
            changed = {slot: _any_value(slot, rng) for slot in _slots_of(family.text)}
        scenario = Scenario(family, tuple(changed.items()))
        if scenario not in found:
            found[scenario] = None
            made.append(scenario)
    return made


def _typo(text: str, rng: random.Random) -> str:
    """One slip of the finger in a word: any word, any of its letters."""
    words = text.split(" ")
    places = [place for place, word in enumerate(words) if word.isalpha() and len(word) > 2]
    place = rng.choice(places)
    word = words[place]
    at, letter = rng.randrange(len(word) - 1), rng.choice(string.ascii_lowercase)
    words[place] = rng.choice(
        (
            word[:at] + word[at + 1 :],
            word[:at] + letter + word[at:],
            word[:at] + letter + word[at + 1 :],
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        )
    )
    return " ".join(words)


def asked(scenario: Scenario, rng: random.Random) -> tuple[str, str]:
    """System prompt and first message of one run."""
    family, slots = scenario
    by_people = bool(family.other)
    text = family.text
    before, after = "", ""
    if by_people:
        if rng.random() < 0.01:
            text = family.other
        halves = text.split("|")
        text = " ".join(part.strip() for part in (reversed(halves) if rng.random() < 0.05 else halves))
        if rng.random() < 0.3:
            before, after = rng.choice(COURTESIES if rng.random() < 0.95 else UNHEARD_OF)
    filled = dict(slots) | {name: make(rng) for name, make in VOLATILE.items()}
    text = text.format(**filled)
    if by_people:
        if rng.random() < 0.05:
            text = _typo(text, rng)
        if rng.random() < 0.15:
            text = rng.choice((str.lower, lambda t: t.rstrip(".?!"), lambda t: t.replace(",", ""), lambda t: t + "!!"))(
                text
            )
    return family.setting.format(**filled), f"{before}{text}{after}".format(**filled)


def traffic(runs: int, *, seed: int) -> Iterator[tuple[Trajectory, int]]:
    """So many runs over a fifth as many scenarios, in random order, each with the number of its scenario."""
    rng = random.Random(seed)
    made = scenarios(runs // 5, rng)
    weights = [rng.paretovariate(1.5) for _ in made]
    truth = list(range(len(made))) + rng.choices(range(len(made)), weights, k=runs - len(made))
    rng.shuffle(truth)
    ids = count()
    tools: dict[str, Any] = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
    answer = (Choice(0, {"role": "assistant", "content": "yes"}, "stop", (1, 2), (-0.5, -0.5)),)
    for number in truth:
        key = f"t{next(ids):07}"
        system, text = asked(made[number], rng)
        messages = ({"role": "system", "content": system}, {"role": "user", "content": text})
        call = Call(f"{key}-c", key, 1.0, "agent", messages, answer, (tools,), policy="agent@0", prompt_token_ids=(1,))
        yield Trajectory(TrajectoryInfo(key, 1.0), (call,)), number
