"""Counters of one replica for Prometheus, and the metrics of several replicas as one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from xmcray.serving.event_log import EventCounts
from xmcray.serving.schema import Model

disable_created_metrics()  # the time at which each sample was made, which nothing here uses
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServingMetrics:
    """The metrics of one ingress replica.

    Attributes:
        requests: counts requests by route and status.
        seconds: time from request to answer, by route.
        texts: counts texts that were searched for, by model.
        working: requests in progress.
        version: 1 for the bundle that answers, by model and version.
        number: number of the last label operation in the answers, by model.
        labels: labels that can be answered, by model.
        drift: how far served probabilities are from those of held-out queries, by model.
    """

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter(
            "xmcray_requests",
            "Requests by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "xmcray_request_seconds",
            "Time from request to answer.",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.texts = Counter(
            "xmcray_texts",
            "Texts that were searched for.",
            ["model"],
            registry=registry,
        )
        self.working = Gauge(
            "xmcray_requests_in_flight", "Requests that are being worked on.", registry=registry
        )
        self.version = Gauge(
            "xmcray_bundle",
            "1 for the bundle that answers.",
            ["model", "version"],
            registry=registry,
        )
        self.number = Gauge(
            "xmcray_label_log_number",
            "Last label operation in the answers.",
            ["model"],
            registry=registry,
        )
        self.labels = Gauge(
            "xmcray_labels",
            "Labels that can be answered.",
            ["model"],
            registry=registry,
        )

        self.drift = Gauge(
            "xmcray_probability_drift",
            "Population stability index of the best answers' probabilities.",
            ["model"],
            registry=registry,
        )

    def update(self, models: Sequence[Model], drifts: Mapping[str, float]) -> None:
        """Sets the gauges to what is served now.

        Args:
            models: what is served.
            drifts: see `Service.drifts`.
        """
        # Otherwise the replaced bundle would stay at 1.
        self.version.clear()
        self.drift.clear()
        for name, drift in drifts.items():
            self.drift.labels(name).set(drift)
        for model in models:
            self.version.labels(model.model, model.version).set(1)
            self.number.labels(model.model).set(model.label_log)
            self.labels.labels(model.model).set(model.num_labels)

    def text(self) -> str:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()


def coordinator_metrics(
    num_replicas: int,
    copy_seconds: Mapping[str, float],
    event_counts: Mapping[str, EventCounts],
) -> str:
    """The coordinator's own metrics, in the same format.

    Args:
        num_replicas: number of replicas that follow the coordinator.
        copy_seconds: by model, seconds by which the copy of the label log is behind.
        event_counts: by model, counts of its event log, if events are collected.
    """
    registry = CollectorRegistry()
    replicas = Gauge("xmcray_replicas", "Processes that follow the coordinator.", registry=registry)
    replicas.set(num_replicas)
    seconds = Gauge(
        "xmcray_label_log_copy_seconds",
        "Age of what the copy of the log lacks.",
        ["model"],
        registry=registry,
    )
    for model, value in copy_seconds.items():
        seconds.labels(model).set(value)
    if event_counts:
        _add_event_metrics(registry, event_counts)
    return generate_latest(registry).decode()


def _add_event_metrics(registry: CollectorRegistry, counts: Mapping[str, EventCounts]) -> None:
    labels = ["model"]
    written = Counter("xmcray_events", "Events in the event log.", labels, registry=registry)
    dropped = Counter(
        "xmcray_events_dropped",
        "Searches that the event log lacks.",
        labels,
        registry=registry,
    )
    size = Gauge("xmcray_event_log_bytes", "Bytes of the event log.", labels, registry=registry)
    for model, values in counts.items():
        written.labels(model).inc(values.written)
        dropped.labels(model).inc(values.dropped)
        size.labels(model).set(values.num_bytes)


def combine_metrics(texts: Sequence[tuple[str, str]]) -> str:
    """Merges pairs (replica, text) into one text, in which each sample has the label `replica`."""
    merged: dict[str, Metric] = {}
    for replica, text in texts:
        for family in text_string_to_metric_families(text):
            # The format wants all samples of a family behind its header.
            empty = Metric(family.name, family.documentation, family.type)
            target = merged.setdefault(family.name, empty)
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                target.add_sample(sample.name, labels, sample.value)
    registry = CollectorRegistry()
    registry.register(_Families(merged.values()))
    return generate_latest(registry).decode()


class _Families(Collector):
    """Families that are collected as they are."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
