"""Bundles and corpora for others: push, promote."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xmcray import hub
from xmcray.api.settings_sources import Location, text_of
from xmcray.errors import BundleError, ConfigError
from xmcray.paths import bundle_at, kind_of

if TYPE_CHECKING:
    from xmcray.training.promotion import Verdict

logger = logging.getLogger(__name__)


def push(path: Location, url: str, data: Location | None = None) -> None:
    """Writes a bundle or a corpus to the Hugging Face Hub as one commit, with its card.

    Args:
        path: bundle, run or corpus.
        url: hf://OWNER/NAME for a bundle, hf://datasets/OWNER/NAME for a corpus; a repository that
            is not there yet is made private.
        data: corpus on whose test split the bundle is measured for the card; if not given, the card has the
            metrics of the run, if it was evaluated.
    Raises:
        ConfigError: the URL is of another kind of repository.
        DataError: bundle and corpus do not belong together.
        StorageError: no connection, no rights, or what is pushed is damaged.
    """
    target = hub.HubPath.parse(url)
    origin = os.fspath(path)
    is_corpus = (Path(origin) / "card.yaml").is_file()
    expected = "dataset" if is_corpus else "model"
    if target.repo_type != expected:
        raise ConfigError(
            f"{url} is of a {target.repo_type}, expected that of a {expected}:"
            f" hf://{'datasets/' if is_corpus else ''}OWNER/NAME"
        )
    from xmcray.training.hub_push import push_bundle, push_corpus

    if is_corpus:
        push_corpus(origin, url)
        return
    corpus_path = text_of(data)
    metrics = None
    if kind_of(origin) == "run":
        from xmcray.training.run import Run

        metrics = Run.open(origin).metrics()
    push_bundle(bundle_at(origin, corpus_path), url, corpus_path, metrics)


@dataclass(frozen=True, slots=True)
class Promotion:
    """What came of `promote`.

    Attributes:
        bundle: the one to use from now on.
        version: SHA-256 of the bundle that the server answers from; None without a server.
        verdict: of the test; None for a roll-back.
        num_annotated: labels of the new bundle that got the attributes that they have in the old one.
    """

    bundle: str
    version: str | None
    verdict: Verdict | None
    num_annotated: int = 0


def promote(
    old: Location,
    new: Location,
    data: Location | None = None,
    *,
    last: int = 5000,
    metric: str = "P@5",
    margin: float = 0.9,
    url: str | None = None,
    model: str | None = None,
    token_file: Location | None = None,
    admin_token_file: Location | None = None,
    roll_back: bool = False,
    progress: bool = True,
) -> Promotion:
    """Swaps in a new bundle if it is not worse on the newest queries, or goes back to the old one.

    Before it is swapped in, a new bundle without attributes of labels gets those of the old one.
    Warnings name labels that joined the old bundle or were removed from it, if the new one does not
    follow, and missing probabilities.

    Args:
        old: bundle in use, or its run.
        new: bundle that may replace it, or its run.
        data: corpus whose newest test queries decide.
        last: number of these queries.
        metric: what decides.
        margin: points of the metric that `new` may lose.
        url: server that answers from `old`; without one the bundles are tested only.
        model: its model; the first if not given.
        token_file: token of the server's readers.
        admin_token_file: token of its administrators.
        roll_back: without a test, let the server answer from `old`.
        progress: show the number of queries on stderr if that is a terminal.
    Raises:
        BundleError: the server answers from another bundle.
        ClientError: the server refuses, or is out of reach.
        ConfigError: arguments that do not go together, or attributes for a bundle at a URL.
        NotPromotedError: the new bundle is worse, or there are too few queries to tell; it has the
            verdict.
    """
    if roll_back and not url:
        raise ConfigError("--roll-back changes what a server answers from; name it with --url")
    if url and not admin_token_file:
        raise ConfigError("a swap needs the administrator's token; add --admin-token-file FILE")
    if last < 1 or not 0 <= margin <= 100:
        raise ConfigError(
            f"last is {last} and margin {margin:g}, expected at least one query and 0 to 100 points"
        )
    before = bundle_at(os.fspath(old))
    after = bundle_at(os.fspath(new))
    verdict = None
    if roll_back:
        before, after = after, before
    else:
        if data is None:
            raise ConfigError("the test needs queries; add --data CORPUS")
        from xmcray.training.promotion import lost_changes

        verdict = _judge(before, after, data, last, metric, margin / 100, progress)
        verdict.check()
        for line in lost_changes(before, after):
            logger.warning(line)
    if not url:
        return Promotion(after, None, verdict)
    version, num_annotated = _swap(
        before, after, url, model, token_file, admin_token_file, carries=not roll_back
    )
    return Promotion(after, version, verdict, num_annotated)


def _judge(
    old: str,
    new: str,
    data: Location,
    last: int,
    metric: str,
    margin: float,
    progress: bool,
) -> Verdict:
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting
    from xmcray.training.promotion import check_metric, judge, measure_newest

    check_metric(metric)
    corpus = Corpus.open(os.fspath(data))
    evaluations = []
    for bundle in (old, new):
        with counting("newest test queries", last, progress) as count:
            evaluations.append(measure_newest(bundle, corpus, last, count))
    before, after = evaluations
    return judge(before, after, metric, margin)


def _swap(
    before: str,
    after: str,
    url: str,
    model: str | None,
    token_file: Location | None,
    admin_token_file: Location | None,
    carries: bool,
) -> tuple[str, int]:
    """Lets the server answer from `after`, if it answers from `before` now or from a compaction of it.

    Args:
        before: folder or URL.
        after: folder or URL.
        url: see `promote`, as for the next three.
        model: name of the model.
        token_file: of the readers.
        admin_token_file: of the administrators.
        carries: whether `after` gets the attributes of `before` if it has none.
    Returns:
        The SHA-256 of `after`, or of the compaction of it that is served already; and the number of
        labels that got attributes.
    """
    from xmcray.client import Client
    from xmcray.retrieval.bundle import KIND
    from xmcray.retrieval.labels import carry_attributes
    from xmcray.storage.artifact import open_artifact
    from xmcray.storage.remote import is_url

    after_path = after if is_url(after) else str(Path(after).absolute())
    _, manifest = open_artifact(before, KIND, contents=False)
    _, wanted = open_artifact(after, KIND, contents=False)
    reader = text_of(token_file)
    with Client(url, token_file=reader, admin_token_file=text_of(admin_token_file)) as client:
        all_models = client.models()
        models = [info for info in all_models if model in (None, info.model)]
        if not models:
            raise ConfigError(f"{url} has no model {model!r}; name one of its own")
        served = models[0]
        # A compaction differs by operations that the server applies to the next bundle, too.
        versions = {served.version, served.compacted_from}
        # OLD may be the served compaction, and NEW the bundle that it was made of.
        is_old_served = manifest.sha256 == served.version != wanted.sha256
        if wanted.sha256 in versions and not is_old_served:
            return served.version, 0
        if manifest.sha256 not in versions:
            raise BundleError(
                f"{url} answers from another bundle ({served.version[:12]}), expected {before}"
                f" ({manifest.sha256[:12]}); name the one in use as OLD, or, if {before} was changed in its"
                " folder while it was served, swap it in again"
            )
        num_annotated = 0
        if carries and all(info.version != wanted.sha256 for info in all_models):
            # Not earlier: a bundle that is served must not change.
            num_annotated = carry_attributes(before, after)
            _, wanted = open_artifact(after, KIND, contents=False)
        # The test has compared the answers; the server's own probe would refuse new labels.
        client.swap(after_path, model=served.model, version=wanted.sha256, recall_floor=0.0)
    return wanted.sha256, num_annotated
