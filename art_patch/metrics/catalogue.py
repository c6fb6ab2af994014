"""Every metric by name, with its type, its help and its labels: the only list of them.

A counter never falls while its process lives, and those of the store never fall at all: what erasures and retention
deleted stays counted. Shares are 0 to 1, not percentages; times are seconds. No metric holds a text of an app's user.
Each metric has the label `project`, too.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from art_patch._lib.words import visible

PREFIX = "art_patch_"
_LONGEST = 200  # characters of a label's value
_LARGEST = 2**63  # of a value; larger ones are a mistake, or an attack


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name without the prefix, and for a counter without `_total`, which Prometheus' client adds."""

    name: str
    help: str
    labels: tuple[str, ...]
    kind: Literal["gauge", "counter", "histogram"]

    @property
    def full(self) -> str:
        """The name with the prefix."""
        return f"{PREFIX}{self.name}"

    @property
    def exposed(self) -> tuple[str, ...]:
        """The names of its samples."""
        ends = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}[self.kind]
        return tuple(f"{self.full}{end}" for end in ends)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, help, labels, "gauge")


def _histogram(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, help, labels, "histogram")


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, help, labels, "counter")


_METRICS = (
    # read from the store
    _gauge("info", "Version of art_patch that read the store.", "version"),
    _gauge("mode", "1 for the mode that the project is in.", "mode"),
    _gauge("policies", "Policies by state.", "state"),
    _gauge("champion_step", "Step of the policy that serves; missing while upstream answers.", "policy"),
    _gauge("challenger_share", "Share of the sessions that the policy under test answers.", "policy", "state"),
    _gauge(
        "challenger_since_timestamp_seconds", "Since when the policy under test is in this state.", "policy", "state"
    ),
    _gauge("engine_up", "1 if the engine that apps are sent to answers."),
    _counter("calls", "Calls that apps made, copies not counted."),
    _counter("calls_by_policy", "Calls that one of our policies answered."),
    _counter("calls_fell_back", "Calls that were meant for a policy and went upstream."),
    _counter("calls_engine_full", "Calls that fell back because the engine had no room."),
    _counter("calls_not_ok", "Calls that failed, were cancelled or abandoned."),
    _counter("calls_trainable", "Calls that can be trained on."),
    _counter("calls_shadow", "Runs with a call that was asked in the background."),
    _counter("calls_resampled", "Runs with a turn that was answered again."),
    _counter("trajectories", "Runs of the agent."),
    _counter("scores", "Judgements of users, code and judges."),
    _gauge("calls_untrainable", "Calls in the store that cannot be trained on.", "reason"),
    _gauge("scenarios", "Tasks in the store that were grouped."),
    _gauge("groups", "Groups of siblings in the store by state.", "state"),
    _gauge("last_call_timestamp_seconds", "When the newest call began."),
    _counter("judge_calls", "Requests to the judge."),
    _counter("judge_prompt_tokens", "Prompt tokens of the judge."),
    _counter("judge_completion_tokens", "Completion tokens of the judge."),
    _counter("judge_cost_usd", "What the judge took, as far as prices are known, in US dollars."),
    _counter("judge_unpriced", "Requests to the judge of unknown price."),
    _gauge("recent_calls", "Calls of the last 24 hours by who answered.", "policy"),
    _gauge("recent_calls_not_ok", "Calls of the last 24 hours that failed, were cancelled or abandoned.", "policy"),
    _gauge("recent_latency_mean_seconds", "Mean duration of the calls of the last 24 hours that succeeded.", "policy"),
    _gauge("recent_runs", "Runs of the last 24 hours by who answered all their calls.", "policy"),
    _gauge(
        "recent_success_share",
        "Share of success of the runs of the last 24 hours that failed or have a reward.",
        "policy",
    ),
    _gauge("recent_rewarded_runs", "Runs of the last 24 hours that have a reward.", "policy"),
    _gauge("recent_reward_mean", "Mean reward of the runs of the last 24 hours.", "policy"),
    _gauge("gate_score", "Mean score in the newest gate: candidate and champion.", "policy", "side"),
    _gauge("gate_lower_bound", "Candidate minus champion is above this, by the newest gate's confidence.", "policy"),
    _gauge("gate_scenarios", "Held-out scenarios that the newest gate compared.", "policy"),
    _gauge("control_share", "Share of the sessions that stay with upstream, the control group."),
    _gauge("control_difference", "Champion minus control group, by signal.", "signal"),
    _gauge("control_difference_error", "Standard error of champion minus control group.", "signal"),
    _gauge("control_sessions", "Sessions in the newest comparison of champion and control group.", "side"),
    _gauge("control_look_timestamp_seconds", "When champion and control group were last compared."),
    _gauge("last_cycle_timestamp_seconds", "When the last `art-patch retrain` ended, by the project's directory."),
    _gauge("last_cycle_exit_code", "Exit code of the last `art-patch retrain`."),
    _gauge("last_cycle_duration_seconds", "How long the last `art-patch retrain` took."),
    _gauge("last_cycle_outcome", "1 for the outcome of the last `art-patch retrain`, or its error.", "outcome"),
    _counter("app_recorded", "Calls that the app process recorded.", "process"),
    _counter("app_dropped", "Runs and calls that the app process could not record.", "process"),
    _counter("app_fallbacks", "Calls of the app process that were meant for a policy and went upstream.", "process"),
    _counter("app_engine_full", "Calls of the app process that the engine had no room for.", "process"),
    _counter("app_shadowed", "Calls of the app process that were asked in the background, too.", "process"),
    _counter("app_bypassed", "Calls of the app process that went past the patch.", "process", "bypass"),
    _gauge("app_queued", "Records of the app process that wait to be written.", "process"),
    _gauge("app_breaker_open", "1 if a circuit breaker of the app process sends calls upstream.", "process", "breaker"),
    _gauge("app_last_seen_timestamp_seconds", "When the app process last reported.", "process"),
    _gauge("store_bytes", "Size of the database with its log."),
    _gauge("store_read_timestamp_seconds", "When the store was read for these metrics."),
    # of a server or proxy itself
    _gauge("store_up", "1 if this process can read the store."),
    _gauge("store_age_seconds", "Age of what is known of the store; if it is down, for how long."),
    _gauge("store_read_seconds", "How long it took to read the store."),
    _gauge("server_ready", "1 if `/readyz` says that this server can answer."),
    _gauge("server_policy_loaded", "1 for each policy that this server has loaded.", "policy"),
    _gauge("server_running", "Requests that are being answered; in the embedded engine, rows."),
    _gauge("server_waiting", "Requests that wait for their turn; embedded engine only."),
    _gauge("server_replicas", "vLLM processes by state: ready, starting.", "state"),
    _counter("server_replica_restarts", "How often a vLLM process was started again."),
    _counter(
        "server_requests", "Chat completions of the server by HTTP status; 499 if the caller left.", "policy", "code"
    ),
    _histogram(
        "server_request_duration_seconds", "From a chat completion's request to the end of its answer.", "policy"
    ),
    _counter("proxy_requests", "Requests of the proxy by HTTP status; 499 if the caller left.", "path", "code"),
    _histogram("proxy_request_duration_seconds", "From a request of the proxy to the end of its answer.", "path"),
)

CATALOGUE = {metric.name: metric for metric in _METRICS}
"""Name without prefix -> metric."""


class Page(Collector):
    """Samples of gauges and counters, in the order of the catalogue."""

    def __init__(self, project: str) -> None:
        """Begin without a sample; each one gets the label `project`."""
        self._project = project
        self._samples: defaultdict[str, list[tuple[list[str], float]]] = defaultdict(list)

    def add(self, name: str, value: object, **labels: object) -> None:
        """Add a sample of a metric of the catalogue; a value of `None` is not known, and left out.

        So is what is no number: app processes of any release write some of these values, and one of them must not cost
        the others their metrics.
        """
        if isinstance(value, int | float) and not abs(value) > _LARGEST:
            # A page is also printed on terminals.
            words = (visible(labels[each])[:_LONGEST] for each in CATALOGUE[name].labels)
            self._samples[name].append(([self._project, *words], value))

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


# --- an app process: each one that has reported to the store, and the proxy, which is one ---

_COUNTS = ("recorded", "dropped", "fallbacks", "engine_full", "shadowed")
_BREAKERS = ("engine", "challenger")


def add_app(page: Page, process: str, facts: Mapping[str, Any], *, at: float) -> None:
    """Add what a process said `at` some time; `facts` are the fields of `patching.Status`."""
    for name in _COUNTS:
        page.add(f"app_{name}", facts.get(name, 0), process=process)
    bypasses: Any = facts.get("bypasses")
    for bypass, count in sorted(bypasses.items()) if isinstance(bypasses, Mapping) else ():
        page.add("app_bypassed", count, process=process, bypass=bypass)
    page.add("app_queued", facts.get("queued"), process=process)
    opened: Any = facts.get("open_breakers")
    for breaker in _BREAKERS if isinstance(opened, Sequence) else ():  # an app of an earlier release does not say it
        page.add("app_breaker_open", breaker in opened, process=process, breaker=breaker)
    page.add("app_last_seen_timestamp_seconds", at, process=process)
