"""SGD or Adagrad for the rows of labels, with hard negatives and without: presets with that changed, on validation data.

    python benchmarks/row_optimisers.py                        # everything; finished trainings are kept
    python benchmarks/row_optimisers.py --set tate-subjects    # a part
    python benchmarks/row_optimisers.py --quick                # does it work?

One seed, and few rates, chosen by hand: what a first try with the other optimiser gives. Results are kept in
results/row_optimisers.json.
"""

from __future__ import annotations

from collections.abc import Mapping

from preset_variants import PRESET, Variants, compare

SGD = (
    "method.classifier.kind=sgd",
    "method.classifier.lr=300",
    "method.classifier.momentum=0",
)
UNIFORM = ("negatives.hard=0",)
FEW_EPOCHS = ("optim.epochs=8",)  # as with SGD


def adagrad(lr: float) -> list[str]:
    """Adagrad with a learning rate."""
    return ["method.classifier.kind=adagrad", f"method.classifier.lr={lr}"]


OTHERS = {
    PRESET: [],
    "uniform negatives": UNIFORM,
    "Adagrad": adagrad(1),
    "Adagrad, uniform negatives": [*adagrad(1), *UNIFORM],
}
VARIANTS: Mapping[tuple[str, str], Variants] = {
    ("tate-subjects", "astra"): {
        PRESET: [],
        "8 epochs": FEW_EPOCHS,
        "8 epochs, uniform negatives": [*FEW_EPOCHS, *adagrad(3), *UNIFORM],
        "8 epochs, SGD": [*FEW_EPOCHS, *SGD],
        "8 epochs, SGD, uniform negatives": [*FEW_EPOCHS, *SGD, *UNIFORM],
    },
    ("tate-subjects", "renee"): {PRESET: [], "SGD": SGD},
    ("cdnjs-keywords", "astra"): OTHERS,
    ("wordnet-hypernyms", "astra"): {
        PRESET: [],
        "uniform negatives": UNIFORM,
        "Adagrad": adagrad(2),
        "Adagrad, uniform negatives": [*adagrad(1), *UNIFORM],
    },
    ("msdocs-seealso", "astra"): OTHERS,
}


def main() -> None:
    compare(
        __doc__,
        "row_optimisers",
        "Optimisers of the rows of labels, on validation data",
        list(dict.fromkeys(set_name for set_name, _ in VARIANTS)),
        ("astra", "renee"),
        lambda set_name, method: VARIANTS.get((set_name, method), {}),
    )


if __name__ == "__main__":
    main()
