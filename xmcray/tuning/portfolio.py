"""The trainings that `xmcray auto` tries, in the order in which it tries them.

Each training starts from a preset for the static encoder on a CPU. Presets that were chosen on a
data set of about the corpus's size come first. The methods are those of the best bundles in
docs/methods/README.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xmcray import settings_files
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.nn import pretrained
from xmcray.tuning.space import Values

# Data sets that have presets for the static encoder: numbers of labels and of training queries.
SET_SIZES = {
    "sample": (2_200, 2_391),
    "cdnjs-keywords": (2_320, 3_436),
    "tate-subjects": (14_471, 41_791),
    "wordnet-hypernyms": (19_032, 68_583),
    "msdocs-seealso": (32_085, 43_433),
    "msdocs-links": (104_969, 68_350),
}
# In the order in which they are tried. RAE-XMC trains quickly, and gains most by fusing.
DEFAULT_METHODS = ("rae", "astra", "dexml", "unidec", "renee")
# PRIME is slower, and a part of the best bundle of one set of five: it runs only if it is named.
METHODS = (*DEFAULT_METHODS, "prime")
DISTILLED_FROM = "sentence-transformers/all-MiniLM-L6-v2"
NUM_PRESETS = 3  # presets that are tried of each method
# Sections of a preset that depend on the machine, or that `auto` sets itself.
_LEFT_OUT = ("cluster", "log", "memory")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A training that may be tried.

    Attributes:
        method: name of the method.
        preset: SET of preset:METHOD/SET.
        encoder: the encoder, in words.
        values: settings by dotted name that replace the method's defaults.
    """

    method: str
    preset: str
    encoder: str
    values: Values


def candidates(corpus: Corpus, methods: Sequence[str] = DEFAULT_METHODS) -> list[Candidate]:
    """The candidates for a corpus, the most promising first; equal ones once.

    Args:
        corpus: the corpus, whose size chooses the presets.
        methods: names of the methods that are tried, in the order of `METHODS`.
    """
    has_transformer = _can_distil()
    presets = nearest_presets(corpus.card.num_labels, corpus.card.num_train)
    chosen = []
    for method, preset, is_other_encoder in _order(methods, presets[:NUM_PRESETS]):
        chosen.append(_candidate(method, preset, is_other_encoder, has_transformer))
    # Presets of several data sets may be equal.
    return _without_equal_ones(chosen)


def with_overrides(candidates: Sequence[Candidate], overrides: Values) -> list[Candidate]:
    """Candidates with settings in place of their own, by dotted name; equal ones once."""
    changed = []
    for candidate in candidates:
        values = {**candidate.values, **overrides}
        encoder = encoder_in_words(values)
        changed.append(dataclasses.replace(candidate, encoder=encoder, values=values))
    return _without_equal_ones(changed)


def encoder_in_words(values: Values) -> str:
    """The encoder of a training, such as "static, distilled from all-MiniLM-L6-v2".

    Args:
        values: settings by dotted name.
    """
    name = values.get("encoder.name", "static")
    if name != "static":
        return _last_part(name)
    start = values.get("encoder.init_from", "")
    return f"static, distilled from {_last_part(start)}" if start else "static"


def _last_part(model: Any) -> str:
    """The name of a model without its owner or folder."""
    return str(model).rstrip("/").rpartition("/")[2]


def _without_equal_ones(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first of each group of candidates that are the same training."""
    kept: list[Candidate] = []
    for candidate in candidates:
        if not any(_are_equal(candidate, other) for other in kept):
            kept.append(candidate)
    return kept


def _are_equal(first: Candidate, second: Candidate) -> bool:
    """Whether two candidates are the same training; the names of their presets do not matter."""
    return first.method == second.method and first.values == second.values


def nearest_presets(num_labels: int, num_train: int) -> list[str]:
    """Data sets with presets, the nearest in numbers of labels and queries first."""

    def distance(name: str) -> float:
        labels, queries = SET_SIZES[name]
        # Ten times more is as far away as ten times less.
        label_distance = abs(math.log(num_labels / labels))
        query_distance = abs(math.log(num_train / queries))
        return label_distance + query_distance

    return sorted(SET_SIZES, key=distance)


def _order(methods: Sequence[str], presets: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yields method, preset, and whether the encoder is the one that the preset does not have."""
    for preset in presets:
        for is_other_encoder in (False, True):
            # Methods change fastest: different methods add more to each other than settings of one
            # method do.
            for method in methods:
                yield method, preset, is_other_encoder


def _candidate(
    method: str, preset: str, is_other_encoder: bool, has_transformer: bool
) -> Candidate:
    """The training of a preset, or of the same with the other encoder: distilled or not."""
    settings = settings_files.load_yaml(f"preset:{method}/{preset}")
    # It is no setting of a trial; the candidate holds it as `method`.
    del settings["method_name"]
    for section in _LEFT_OUT:
        settings.pop(section, None)
    values = dotted(settings)
    # The study sets it, so that all trials hold the same queries out.
    values.pop("data.validation", None)
    is_distilled = bool(values.pop("encoder.init_from", ""))
    if is_other_encoder:
        is_distilled = not is_distilled
    if is_distilled and has_transformer:
        values["encoder.init_from"] = DISTILLED_FROM
    return Candidate(method, preset, encoder_in_words(values), values)


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Values:
    """Turns {"optim": {"lr": 0.1}} into {"optim.lr": 0.1}."""
    values: Values = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            values |= dotted(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def _can_distil() -> bool:
    """Whether the transformer that encoders are distilled from is on disk or can be downloaded."""
    try:
        pretrained.find(DISTILLED_FROM)
    except ConfigError:
        return False
    return True
