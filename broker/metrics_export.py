"""Metrics in Prometheus' text format, from a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from broker.metrics import Metrics
from broker.metrics_catalogue import CATALOGUE, Kind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exporter:
    """Renders on request, from any thread. CPU, memory and descriptors of the process come too."""

    def __init__(self, metrics: Metrics) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Bridge(metrics))
        ProcessCollector(namespace="tokenbus", registry=self._registry)

    def render(self) -> bytes:
        """All metrics as one page."""
        return generate_latest(self._registry)


class _Bridge(Collector):
    """From our numbers to the client library's families."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        for metric in CATALOGUE:
            name, about = metric.full_name, metric.help
            if metric.kind is Kind.HISTOGRAM:
                family = HistogramMetricFamily(name, about, labels=metric.labels)
                for labels, histogram in metrics.histograms(metric.name):
                    family.add_metric(labels, histogram.cumulative(), histogram.sum)
                yield family
                continue
            kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            plain = kind(name, about, labels=metric.labels)
            for labels, value in metrics.values(metric.name):
                plain.add_metric(labels, value)
            yield plain
