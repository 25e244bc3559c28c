"""Cards: the README.md of a bundle or a corpus, with the metadata that the Hugging Face Hub reads.

A bundle's card is not part of its manifest, so measuring a bundle does not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml
from markupsafe import Markup

from xmcray.data.corpus import Corpus
from xmcray.evaluation.pages import render
from xmcray.hub_licences import UNKNOWN, hub_licence
from xmcray.storage.manifest import Manifest

if TYPE_CHECKING:
    from xmcray.retrieval.bundle import Settings

METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100")
TASK = "text-classification"
TAGS = ("extreme-multi-label-classification", "retrieval")


def corpus_card(corpus: Corpus, url: str) -> str:
    """The README.md of a corpus that goes to `url`."""
    card = corpus.card
    metadata = {**hub_licence(card.licence), "pretty_name": card.name, "tags": list(TAGS)}
    text = render(
        "corpus_card.md.j2",
        metadata=_yaml(metadata),
        card=card,
        sha256=corpus.sha256,
        url=url,
    )
    return str(text)


def bundle_card(
    settings: Settings,
    manifest: Manifest,
    max_len: int,
    url: str = "",
    metrics: Mapping[str, Any] | None = None,
) -> str:
    """The README.md of a bundle.

    Args:
        settings: of the bundle.
        manifest: of the bundle; `about` says what it was trained on.
        max_len: tokens that it reads of a text.
        url: where the bundle goes, if that is no local folder.
        metrics: content of metrics.json; left out if they are those of another bundle.
    """
    about = manifest.about
    if metrics is None or metrics.get("bundle_sha256") != manifest.sha256:
        metrics = {}
    corpus = about.get("corpus") or "texts that are not recorded"
    name = f"{settings.method or 'xmcray'} on {corpus}"
    if url:
        name = url.rstrip("/").rsplit("/", 1)[-1]
    licence = about.get("corpus_licence") or UNKNOWN
    rows = _rows(metrics)
    choices = {}
    for part in ("config", "fused", "distillation"):
        if about.get(part):
            choices[part] = about[part]
    text = render(
        "bundle_card.md.j2",
        metadata=_metadata(name, settings.method, corpus, licence, rows),
        name=name,
        where=url or "BUNDLE",
        settings=settings,
        sha256=manifest.sha256,
        corpus=corpus,
        licence="" if licence == UNKNOWN else licence,
        metrics=metrics,
        rows=rows,
        choices=_yaml(choices) if choices else "",
        max_len=max_len,
        calibrated=any(file.startswith("calibration/") for file in manifest.files),
    )
    return str(text)


def _rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Metrics that have an interval, in percent."""
    intervals = metrics.get("intervals", {})
    rows = []
    for name in METRICS:
        if name in intervals:
            value, low, high = (
                round(100 * share, 2) for share in (metrics[name], *intervals[name])
            )
            rows.append({"name": name, "value": value, "low": low, "high": high})
    return rows


def _metadata(
    name: str, method: str, corpus: str, licence: str, rows: list[dict[str, Any]]
) -> Markup:
    metadata: dict[str, Any] = {
        "library_name": "xmcray",
        **hub_licence(licence),
        "pipeline_tag": TASK,
        "tags": [tag for tag in (*TAGS, method) if tag],
    }
    if rows:
        result = {
            "task": {"type": TASK},
            "dataset": {"name": corpus, "type": corpus, "split": "test"},
            "metrics": [{"type": row["name"], "value": row["value"]} for row in rows],
        }
        metadata["model-index"] = [{"name": name, "results": [result]}]
    return _yaml(metadata)


def _yaml(values: Mapping[str, Any]) -> Markup:
    """YAML, which quotes what needs it: HTML's escapes would be part of the values."""
    return Markup(yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True))
