"""What operators get: metrics of several replicas as one text, alert rules and a dashboard that fit them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.schema import ServeDeploySchema

from xmcray import config as configs
from xmcray.serving import metrics
from xmcray.serving.event_log import EventCounts
from xmcray.serving.settings import ServeConfig, check_absolute_paths

SERVE = Path(__file__).parents[3] / "serve"


def known() -> set[str]:
    """Names of all samples."""
    one = metrics.ServingMetrics()
    one.requests.labels("/v1/search", "200").inc()
    one.seconds.labels("/v1/search").observe(0.01)
    for gauge in (one.number, one.labels):
        gauge.labels('a"b\\c').set(3)
    one.version.labels("a", "v").set(1)
    one.texts.labels("a").inc(2)
    events = {"a": EventCounts(written=1, dropped=0, num_bytes=10)}
    coordinator_text = metrics.coordinator_metrics(2, {"a": 1.5}, events)
    text = metrics.combine_metrics(
        [("r1", one.text()), ("r2", one.text()), ("c", coordinator_text)]
    )
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), (
        "a family stands at one place"
    )
    samples = [sample for family in families for sample in family.samples]
    assert sum(s.value for s in samples if s.name == "xmcray_requests_total") == 2
    assert {s.labels["replica"] for s in samples} == {"r1", "r2", "c"}
    assert any(s.labels.get("model") == 'a"b\\c' for s in samples)
    return {sample.name for sample in samples}


def test_rules_and_dashboard_ask_for_what_is_counted() -> None:
    names = known()
    rules = yaml.safe_load((SERVE / "alerts.yaml").read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    panels = json.loads((SERVE / "grafana.json").read_text())["panels"]
    expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"\bxmcray_\w+", expression)}
    assert len(expressions) >= 15
    assert asked <= names


def test_the_config_is_one_that_serve_takes() -> None:
    values = yaml.safe_load((SERVE / "config.yaml").read_text())
    parsed = ServeDeploySchema.model_validate(values)
    assert parsed.http_options.host == "127.0.0.1"
    (application,) = parsed.applications
    settings = configs.build(ServeConfig, application.args)
    assert settings.token_file
    assert settings.admin_token_file
    check_absolute_paths(settings)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"bundles": {"a": "bundles/a"}}, "bundle a is 'bundles/a'"),
        ({"state_dir": ServeConfig.state_dir}, "state_dir is 'serve-state'"),
        ({"token_file": "token"}, "token_file is 'token'"),
        ({"bundle_roots": ("/b", "more")}, "bundle_roots is 'more'"),
        ({"upload": "copies"}, "upload is 'copies'"),
        ({"rerank": "./reranker"}, "rerank is './reranker'"),
        ({"rerank": "runs/a/reranker"}, "rerank is 'runs/a/reranker'"),
    ],
)
def test_relative_paths_are_refused_on_a_cluster(changes: dict[str, Any], name: str) -> None:
    """They would count from a folder of Ray's."""
    whole = ServeConfig(bundles={"a": "/b/", "c": "s3://b/c"}, state_dir="/s", upload="s3://u")
    check_absolute_paths(whole)
    for reranker in ("/r", "s3://r", "cross-encoder/ms-marco-MiniLM-L6-v2", "gpt2"):
        check_absolute_paths(dataclasses.replace(whole, rerank=reranker))
    with pytest.raises(configs.ConfigError, match=f"{name}, expected an absolute path or a URL"):
        check_absolute_paths(dataclasses.replace(whole, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "both"}, "mode"),
        ({"bundles": {}}, "no bundle"),
        ({"in_flight": 0}, "in_flight"),
        ({"search_nice": 20}, "search_nice"),
        ({"recall_floor": 2}, "recall_floor"),
        ({"max_k": 5000}, "max_k"),
    ],
)
def test_settings_out_of_range(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(configs.ConfigError, match=reason):
        configs.build(ServeConfig, {"bundles": {"a": "b"}, **changes})
