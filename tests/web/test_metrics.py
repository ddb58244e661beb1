"""`GET /metrics`: what `/stats` says, as Prometheus reads it."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
from mlx_lm_hooks import Request, Served
from prometheus import FOUND, prometheus
from support.models import ENDLESS, document
from support.server import tiered

from mlx_lm_tiered.bench import polling
from mlx_lm_tiered.histogram import Histogram
from mlx_lm_tiered.runtime import Runtime
from mlx_lm_tiered.served import KEPT, NOTE, Requests
from mlx_lm_tiered.serving.metric_table import HISTOGRAMS, METRICS, PREFIX
from mlx_lm_tiered.serving.metrics import Exporter
from mlx_lm_tiered.serving.routes import routes
from mlx_lm_tiered.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
TEXT = document(2500)
TEXT += TEXT[:200]  # so that what follows was there before, and is drafted
ASKED = Request("GET", "/metrics", {}, {}, b"", True)


@pytest.fixture(scope="module")
def server(tiny_llama, tmp_path_factory):
    """One that has missed, found in RAM, restored and drafted."""
    folder = tmp_path_factory.mktemp("metrics")
    with tiered(tiny_llama, folder / "cold", "--speculation", "ngram", log=folder / "log") as server:
        server.complete(TEXT, max_tokens=20)
        server.complete(TEXT, max_tokens=20)
        assert server.request("POST", "/admin/drain")[0] == 200
        server.complete(TEXT, max_tokens=20)
        yield server


def scraped(server, **headers: str) -> dict[tuple[str, tuple], float]:
    """Every sample by its name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    status, body = server.request("GET", "/metrics", headers=headers)
    assert status == 200
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in text_string_to_metric_families(body.decode()) for one in family.samples}


def test_the_figures_are_those_of_the_statistics(server):
    found, stats = scraped(server), server.stats()

    def value(name: str, **labels: str) -> float:
        return found[PREFIX + name, tuple(sorted(labels.items()))]

    for metric in METRICS:
        suffix = "_total" if metric.kind == "counter" else ""
        for label, expected in (metric.read(stats) or {}).items():
            if not metric.name.startswith(("memory_live", "ssd_written", "spill_queue", "cache_bytes")):  # they go on changing
                assert value(metric.name + suffix, **({metric.label: label} if metric.label else {})) == pytest.approx(expected), metric.name
    assert value("prefix_cache_lookups_total", tier="ssd") == value("prefix_cache_lookups_total", tier="ram") == value("prefix_cache_lookups_total", tier="none") == 1
    assert value("request_success_total", finished_reason="length") + value("request_success_total", finished_reason="stop") == 3
    assert value("time_to_first_token_seconds_count") == value("restore_time_seconds_count") + 2 == 3
    assert value("restore_time_seconds_sum") == pytest.approx(stats["ssd"]["restore_seconds_total"])
    assert value("generation_tokens_total") == stats["requests"]["generation_tokens"] == value("request_generation_tokens_sum")
    assert value("spec_decode_num_draft_tokens_total") > 0
    assert ("process_resident_memory_bytes", ()) in found or sys.platform != "linux"


def test_who_accepts_openmetrics_gets_it(server):
    status, body = server.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert status == 200 and body.endswith(b"# EOF\n")


def test_what_looking_costs_is_measured(server):
    """`bench polling`'s pieces, shorter; it makes the server by itself."""
    with polling._Stream(server, ENDLESS) as stream:
        for number in range(2):
            pair = polling._pair(server, stream, number, 0.5, 0.2)
            assert list(pair) == [["looking", "alone"], ["alone", "looking"]][number] and min(pair.values()) > 1
    with polling._Looking(server, 0.1) as looking:
        time.sleep(0.5)
    assert looking.looks >= 2 and looking.bytes > 10_000


@pytest.mark.skipif(FOUND is None, reason="there is no prometheus here (Debian's package is called that)")
def test_a_prometheus_answers_what_the_hit_rate_and_the_restore_time_are(server, tmp_path):
    with prometheus(tmp_path / "prometheus", server.port) as found:
        found.until("count_over_time(mlx_lm_cache_puts_total[1m]) >= 2")
        server.complete(TEXT, max_tokens=4)
        server.request("POST", "/admin/drain")
        answer = server.complete(TEXT, max_tokens=4)
        stats = server.stats()
        found.until(f"sum (mlx_lm_prefix_cache_lookups_total) >= {stats['lookups']}")
        rate = found.value("sum (mlx_lm_prefix_cache_hit_tokens_total) / sum (mlx_lm_prefix_cache_queried_tokens_total)")
        assert rate == pytest.approx(stats["tokens_saved"] / stats["prompt_tokens"])
        lately = found.value("sum (increase(mlx_lm_prefix_cache_hit_tokens_total[1m])) / sum (increase(mlx_lm_prefix_cache_queried_tokens_total[1m]))")
        assert lately == pytest.approx((answer.prompt_tokens - 1) / answer.prompt_tokens, rel=0.01)  # of the last two, all but a token
        mean = found.value("mlx_lm_restore_time_seconds_sum / mlx_lm_restore_time_seconds_count")
        assert mean == pytest.approx(stats["ssd"]["restore_seconds_total"] / stats["ssd"]["restores"])
        assert 0 < found.value("histogram_quantile(0.9, mlx_lm_restore_time_seconds_bucket)") < 60
        for expression in expressions():
            found.query(expression.replace("$__rate_interval", "1m").replace("$instance", ".*"))
        answered = [e for e in expressions() if found.query(e.replace("$__rate_interval", "1m").replace("$instance", ".*"))]
        assert len(answered) > 0.8 * len(list(expressions())), "most of the dashboard shows something"


def expressions() -> list[str]:
    """The queries of the Grafana dashboard."""
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def exported() -> set[str]:
    """The names as Prometheus has them, without the parts of histograms."""
    return {PREFIX + m.name + ("_total" if m.kind == "counter" else "") for m in METRICS} | {PREFIX + name for name in HISTOGRAMS} | {PREFIX + "build_info"}


def test_the_dashboard_asks_for_what_there_is():
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for e in expressions() for name in re.findall(r"mlx_lm_\w+", e)}
    assert asked <= exported()


def test_every_metric_is_documented_and_none_that_there_is_not():
    page = (DOCS / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(mlx_lm_\w+)", page, re.MULTILINE)) == exported()


def test_names_have_units():
    plain = re.compile(r"num_|cache_(lookups|entries|evictions|puts|demotions|faults)|request_success|requests_refused|restores_|ssd_errors|checkpoints_|paged_blocks|spill_queue_jobs")
    for name in [*(m.name for m in METRICS), *HISTOGRAMS]:
        assert plain.search(name) or name.endswith(("_seconds", "_bytes", "_tokens", "_ratio", "_entries", "_requests", "_per_pos")), name


def test_without_the_package_the_route_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    reply = Exporter(Runtime(Settings())).handle(ASKED)
    assert reply.status == 501 and b"pip install 'mlx-lm-tiered[metrics]'" in reply.body and reply.body.count(b"\n") == 1


def test_who_may_read_it():
    def access(**settings: str) -> dict[str, str]:
        return {route.path: route.access for route in routes(Runtime(Settings(**settings)))}

    assert access()["/metrics"] == "local"
    assert access(admin_routes="all")["/metrics"] == "all"
    assert (access(metrics="all")["/metrics"], access(metrics="all")["/stats"]) == ("all", "local")
    assert "/metrics" not in access(metrics="off") and "/stats" in access(metrics="off")
    assert access(admin_routes="off") == {} and list(access(admin_routes="off", metrics="local")) == ["/metrics"]


def test_a_histogram_counts_up_to_its_bounds():
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 7):
        histogram.observe(value)
    assert histogram.read() == ([(1, 2), (2, 3), (float("inf"), 4)], 10.0)


def test_requests_are_counted_when_they_end_and_those_of_warm_never():
    requests = Requests()
    one = Served(arrived=1.0, prompt_tokens=7)
    requests.began(one)
    assert requests.report()["queued"] == 1 and requests.report()["prompt_tokens"] == 7
    one.started, one.first_token, one.last_token, one.ended, one.tokens, one.finish = 2.0, 4.0, 6.0, 6.5, 5, "stop"
    assert requests.report()["running"] == 1 and requests.report()["generation_tokens"] == 5
    requests.ended(one)
    sums = {name: histogram.read()[1] for name, histogram in requests.histograms.items()}
    assert sums == {
        "time_to_first_token_seconds": 3.0, "e2e_request_latency_seconds": 5.5, "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0, "request_decode_time_seconds": 2.0, "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 7, "request_generation_tokens": 5,
    }  # fmt: skip
    ours = Served(notes={NOTE: None}, ended=1.0)
    requests.began(ours)
    assert requests.running() == []
    requests.ended(ours)
    given_up = Served(arrived=0.0, ended=1.0, finish="abort")
    requests.ended(given_up)
    report = requests.report()
    assert report["running"] == report["queued"] == 0 and report["finished"] == {"stop": 1, "length": 0, "abort": 1, "refused": 0, "error": 0}
    for _ in range(2 * KEPT):
        requests.ended(Served(ended=1.0, finish="stop"))
    assert len(requests.last()) == KEPT and one not in requests.last()
