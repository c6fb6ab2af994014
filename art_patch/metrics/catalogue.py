"""Every metric by name, with its type, its help and its labels: the only list of them.

A counter never falls while its process lives, and those of the store never fall at all: what erasures and retention
deleted stays counted. Shares are 0 to 1, not percentages; times are seconds. No metric holds a text of an app's user.
Each metric has the label `project`, too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

PREFIX = "art_patch_"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name without the prefix, and for a counter without `_total`, which Prometheus' client adds."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter", "histogram"] = "gauge"

    @property
    def full(self) -> str:
        """The name with the prefix."""
        return f"{PREFIX}{self.name}"

    @property
    def exposed(self) -> tuple[str, ...]:
        """The names of its samples."""
        ends = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}[self.kind]
        return tuple(f"{self.full}{end}" for end in ends)


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, help, labels, "counter")


_OF_STORE = (
    Metric("info", "Version of art_patch that read the store.", ("version",)),
    Metric("mode", "1 for the mode that the project is in.", ("mode",)),
    Metric("policies", "Policies by state.", ("state",)),
    Metric("champion_step", "Step of the policy that serves; missing while upstream answers.", ("policy",)),
    Metric("challenger_share", "Share of the sessions that the policy under test answers.", ("policy", "state")),
    Metric("challenger_since_timestamp_seconds", "Since when it is under test.", ("policy", "state")),
    Metric("engine_up", "1 if the engine that apps are sent to answers."),
    _counter("calls", "Calls that apps made, copies not counted."),
    _counter("calls_by_policy", "Calls that one of our policies answered."),
    _counter("calls_fell_back", "Calls that were meant for a policy and went upstream."),
    _counter("calls_engine_full", "Those of them that the engine had no room for."),
    _counter("calls_not_ok", "Calls that failed, were cancelled or abandoned."),
    _counter("calls_trainable", "Calls that can be trained on."),
    _counter("calls_shadow", "Runs with a call that was asked in the background."),
    _counter("calls_resampled", "Runs with a turn that was answered again."),
    _counter("trajectories", "Runs of the agent."),
    _counter("scores", "Judgements of users, code and judges."),
    Metric("calls_untrainable", "Calls in the store that cannot be trained on.", ("reason",)),
    Metric("scenarios", "Tasks in the store that were grouped."),
    Metric("groups", "Groups of siblings in the store by state.", ("state",)),
    Metric("last_call_timestamp_seconds", "When the newest call began."),
    _counter("judge_calls", "Requests to the judge."),
    _counter("judge_prompt_tokens", "Prompt tokens of the judge."),
    _counter("judge_completion_tokens", "Completion tokens of the judge."),
    _counter("judge_cost_usd", "What the judge took, as far as prices are known, in US dollars."),
    _counter("judge_unpriced", "Requests to the judge of unknown price."),
    Metric("recent_calls", "Calls of the last 24 hours by who answered.", ("policy",)),
    Metric("recent_calls_not_ok", "Those of them that failed, were cancelled or abandoned.", ("policy",)),
    Metric("recent_latency_mean_seconds", "Mean duration of those of them that succeeded.", ("policy",)),
    Metric("recent_runs", "Runs of the last 24 hours by who answered all their calls.", ("policy",)),
    Metric("recent_success_share", "Share of success of those that failed or have a reward.", ("policy",)),
    Metric("recent_rewarded_runs", "Those of them that have a reward.", ("policy",)),
    Metric("recent_reward_mean", "Mean reward of those.", ("policy",)),
    Metric("gate_score", "Mean score in the newest gate: candidate and champion.", ("policy", "side")),
    Metric("gate_lower_bound", "The difference of both is above this, by that gate's confidence.", ("policy",)),
    Metric("gate_scenarios", "Held-out scenarios that were compared.", ("policy",)),
    Metric("control_share", "Share of the sessions that stay with upstream, the control group."),
    Metric("control_difference", "Champion minus control group, by signal.", ("signal",)),
    Metric("control_difference_error", "Standard error of that difference.", ("signal",)),
    Metric("control_sessions", "Sessions that were compared.", ("side",)),
    Metric("control_look_timestamp_seconds", "When both were last compared."),
    Metric("last_cycle_timestamp_seconds", "When the last `art-patch retrain` ended on this disk."),
    Metric("last_cycle_exit_code", "Its exit code."),
    Metric("last_cycle_duration_seconds", "How long it took."),
    Metric("last_cycle_outcome", "1 for its outcome.", ("outcome",)),
    _counter("app_recorded", "Calls that the app process recorded.", "process"),
    _counter("app_dropped", "Runs and calls that it could not record.", "process"),
    _counter("app_fallbacks", "Its calls that went upstream although they were meant for a policy.", "process"),
    _counter("app_engine_full", "Those fallbacks that the engine had no room for.", "process"),
    _counter("app_shadowed", "Its calls that were asked in the background, too.", "process"),
    _counter("app_bypassed", "Its calls that went past the patch.", "process", "bypass"),
    Metric("app_queued", "Its records that wait to be written.", ("process",)),
    Metric("app_breaker_open", "1 if its circuit breaker keeps calls from the engine.", ("process", "breaker")),
    Metric("app_last_seen_timestamp_seconds", "When it last reported.", ("process",)),
    Metric("store_bytes", "Size of the database with its log."),
    Metric("store_read_timestamp_seconds", "When these numbers were read from the store."),
)

_OF_PROCESS = (
    Metric("store_up", "1 if this process can read the store."),
    Metric("store_age_seconds", "Age of what this page says of the store; how long it cannot be read, if it is down."),
    Metric("store_read_seconds", "How long it took to read these numbers."),
    Metric("server_ready", "1 if `/readyz` says that this server can answer."),
    Metric("server_policy_loaded", "1 for each policy that this server has loaded.", ("policy",)),
    Metric("server_running", "Requests, or rows of the embedded engine, that are being answered."),
    Metric("server_waiting", "Requests that wait for their turn in the embedded engine."),
    Metric("server_replicas", "vLLM processes by state: ready, starting.", ("state",)),
    _counter("server_replica_restarts", "How often a vLLM process was started again."),
    _counter("server_requests", "Chat completions by policy and HTTP status.", "policy", "code"),
    Metric("server_request_duration_seconds", "From the request to the end of its answer.", ("policy",), "histogram"),
    _counter("proxy_requests", "Requests by address and HTTP status.", "path", "code"),
    Metric("proxy_request_duration_seconds", "From the request to the end of its answer.", ("path",), "histogram"),
)

CATALOGUE = {metric.name: metric for metric in (*_OF_STORE, *_OF_PROCESS)}
"""Name without prefix -> metric."""


class Page(Collector):
    """Samples of gauges and counters, in the order of the catalogue."""

    def __init__(self, project: str) -> None:
        """Begin without a sample; each one gets the label `project`."""
        self._project = project
        self._samples: defaultdict[str, list[tuple[list[str], float]]] = defaultdict(list)

    def add(self, name: str, value: float | None, **labels: str) -> None:
        """Add a sample of a metric of the catalogue; a value of `None` is not known, and left out."""
        metric = CATALOGUE[name]
        if value is not None:
            self._samples[name].append(([self._project, *(labels[each] for each in metric.labels)], value))

    def collect(self) -> Iterator[Family]:
        """Yield the samples for Prometheus' client."""
        for name, metric in CATALOGUE.items():
            if name in self._samples:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(metric.full, metric.help, labels=["project", *metric.labels])
                for labels, value in self._samples[name]:
                    family.add_metric(labels, value)
                yield family

    def text(self) -> bytes:
        """Return the samples in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)


class Pages(Collector):
    """Makes a page anew for each scrape, from what the process knows then."""

    def __init__(self, make: Callable[[], Page]) -> None:
        self._make = make

    def collect(self) -> Iterator[Family]:
        """Yield the samples of a new page."""
        return self._make().collect()
