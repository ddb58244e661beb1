"""``GET /metrics``: what `/stats` knows, in Prometheus' text format. What is exported is listed in `metric_table.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlx_lm_hooks import Reply, Request

from ..histogram import Histogram
from ..runtime import Runtime
from .metric_table import HISTOGRAMS, METRICS, PREFIX, Metric, versions

MISSING = "/metrics needs the package prometheus-client; install it with: pip install 'mlx-lm-tiered[metrics]'\n"
TEXT = "text/plain; charset=utf-8"


class Exporter:
    """The route's handler. All is read when it is asked; between two scrapes nothing is computed."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._registry: Any = None

    def handle(self, request: Request) -> Reply:
        """200 in the format that the scraper accepts; 501 without prometheus-client."""
        try:
            from prometheus_client.exposition import choose_encoder
        except ImportError:
            return Reply(501, MISSING.encode(), TEXT)
        if self._registry is None:
            self._registry = _registry(self)
        accept = next((value for name, value in request.headers.items() if name.lower() == "accept"), "")
        encode, content_type = choose_encoder(accept)
        return Reply(200, encode(self._registry), content_type)

    def collect(self) -> Iterator[Any]:
        """For prometheus-client's registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

        report = self._runtime.report()
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        for metric in METRICS:
            if (values := metric.read(report)) is not None:
                yield _family(kinds[metric.kind], metric, values)
        for name, text in HISTOGRAMS.items():
            if (histogram := self._histogram(name)) is not None:
                buckets, total = histogram.read()
                family = HistogramMetricFamily(PREFIX + name, text)
                family.add_metric([], [(_bound(bound), count) for bound, count in buckets], total)
                yield family
        info = InfoMetricFamily(PREFIX + "build", "Versions of what runs.")
        info.add_metric([], versions())
        yield info

    def _histogram(self, name: str) -> Histogram | None:
        if name in self._runtime.requests.histograms:
            return self._runtime.requests.histograms[name]
        return self._runtime.storage.store.restore_times if self._runtime.storage is not None else None


def _registry(exporter: Exporter) -> Any:
    from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporter)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


def _family(kind: Any, metric: Metric, values: dict[str, float]) -> Any:
    family = kind(PREFIX + metric.name, metric.help, labels=[metric.label] if metric.label else [])
    for label, value in values.items():
        family.add_metric([label] if metric.label else [], value)
    return family


def _bound(bound: float) -> str:
    """As prometheus-client writes them."""
    return "+Inf" if bound == float("inf") else repr(float(bound))
