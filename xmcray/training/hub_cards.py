"""Cards for the Hugging Face Hub: README.md of a bundle or a corpus, with the metadata that the Hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml
from markupsafe import Markup

from xmcray.data.corpus import Card, Corpus
from xmcray.evaluation.evaluate import Evaluation
from xmcray.evaluation.pages import render
from xmcray.retrieval.retriever import Retriever

if TYPE_CHECKING:
    from huggingface_hub import CardData

METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100")
TASK = "text-classification"
TAGS = ("extreme-multi-label-classification", "retrieval")


def corpus_card(corpus: Corpus, url: str) -> str:
    """The README.md of a corpus that goes to `url`."""
    from huggingface_hub import DatasetCardData  # its import takes a while

    card = corpus.card
    metadata = DatasetCardData(**_licence(card), pretty_name=card.name, tags=list(TAGS))
    text = render(
        "corpus_card.md.j2",
        metadata=_yaml(metadata),
        card=card,
        sha256=corpus.sha256,
        url=url,
    )
    return str(text)


def bundle_card(
    retriever: Retriever,
    about: Mapping[str, Any],
    url: str,
    data: Card | None,
    evaluation: Evaluation | None,
) -> str:
    """The README.md of a bundle.

    Args:
        retriever: the bundle.
        about: `about` of its manifest, with the settings of its training.
        url: where the bundle goes.
        data: the card of the corpus that it was trained on, if it is there.
        evaluation: on the test split of this corpus, if it was measured.
    """
    name = url.rstrip("/").rsplit("/", 1)[-1]
    rows = []
    for metric in METRICS if evaluation else ():
        assert evaluation is not None
        if metric not in evaluation.intervals:
            continue
        low, high = evaluation.intervals[metric]
        value = evaluation.metrics[metric]
        rows.append({"name": metric, "value": value, "low": low, "high": high})
    text = render(
        "bundle_card.md.j2",
        metadata=_metadata(name, retriever.settings.method, data, rows),
        name=name,
        url=url,
        settings=retriever.settings,
        sha256=retriever.sha256,
        data_name=data.name if data else about.get("corpus"),
        licence=data.licence if data else "",
        evaluation=evaluation,
        rows=rows,
        config=Markup(yaml.safe_dump(dict(about.get("config") or {}), sort_keys=False)),
        max_len=retriever.tokenizer.max_len,
        calibrated=retriever.calibration is not None,
    )
    return str(text)


def _metadata(name: str, method: str, data: Card | None, rows: list[dict[str, Any]]) -> Markup:
    from huggingface_hub import EvalResult, ModelCardData  # its import takes a while

    results = []
    for row in rows:
        assert data is not None
        result = EvalResult(
            task_type=TASK,
            dataset_type=data.name,
            dataset_name=data.name,
            dataset_split="test",
            metric_type=row["name"],
            metric_value=row["value"],
        )
        results.append(result)
    card = ModelCardData(
        library_name="xmcray",
        **_licence(data),
        model_name=name,
        eval_results=results or None,
        pipeline_tag=TASK,
        tags=[tag for tag in (*TAGS, method) if tag],
    )
    return _yaml(card)


def _licence(data: Card | None) -> dict[str, Any]:
    """Names of the Hub's own list are SPDX's in lower case; it takes others with a name only."""
    if data is None:
        return {}
    if re.fullmatch(r"[A-Za-z0-9.-]+", data.licence) and data.licence.lower() != "none":
        return {"license": data.licence.lower()}
    return {"license": "other", "license_name": data.licence or "not recorded"}


def _yaml(card: CardData) -> Markup:
    """Metadata as YAML, which quotes what needs it: HTML's escapes would be part of the values."""
    return Markup(card.to_yaml().rstrip("\n") + "\n")
