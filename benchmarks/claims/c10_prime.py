"""Claim 10 (PRIME): what each part of the loss, the free vectors and the draw of positives are worth."""

from __future__ import annotations

from claim import Claim, Comparison, Training, main, present


def make(full: bool) -> Claim:
    plain, dense = ("msdocs-seealso", "tate-subjects") if full else ("sample", "cdnjs-keywords")
    here = present(plain, dense)
    few, many = (64, 4096) if full else (1, 1024)

    def training(corpus: str, *settings: str) -> Training:
        epochs = [] if full else ["optim.epochs=8"]
        return Training(
            method="prime",
            corpus=corpus,
            preset="prime/sample",
            settings=[*epochs, *settings],
            full=full,
        )

    variants = {}
    comparisons = []
    if plain in here:
        parts = {
            "no query to text": ["method.query_to_text=0"],
            "no text to query": ["method.text_to_query=0"],
            "fixed margin": ["method.gamma_min=0.3", "method.gamma_max=0.3"],
            "no regulariser": ["method.regulariser=0"],
            f"{few} free vectors": [f"method.free_vectors={few}"],
            f"{many} free vectors": [f"method.free_vectors={many}"],
        }
        variants = {plain: training(plain)} | {
            name: training(plain, *settings) for name, settings in parts.items()
        }
        comparisons = [
            *(Comparison(of=plain, against=name, low=0) for name in list(parts)[:3]),
            *(
                Comparison(of=plain, metric=m, against="no regulariser", low=0)
                for m in ("PSP@1", "R@100")
            ),
            Comparison(of=plain, metric="P@1", against="no regulariser", low=-1, high=1),
            Comparison(of=f"{many} free vectors", against=f"{few} free vectors", low=0),
        ]
    if dense in here:
        for how in ("inverse_propensity", "uniform"):
            variants[f"{dense}, {how}"] = training(
                dense, "method.num_positives=1", f"method.positives={how}"
            )
        of = f"{dense}, inverse_propensity"
        against = f"{dense}, uniform"
        comparisons += [
            Comparison(of=of, metric="PSP@1", against=against, low=0, paper="2.0"),
            Comparison(of=of, metric="PSP@5", against=against, low=0),
        ]
    return Claim(
        number=10,
        title="PRIME: its losses, free vectors and positives",
        statement="The losses from query to label text and back and the dynamic margin raise P@1; the regulariser"
        " raises PSP@1 and R@100 at about equal P@1; more free vectors help; positives drawn by inverse propensity"
        " raise PSP",
        source="PRIME, Tables 6, 9 and 11; paper's number of LF-AmazonTitles-1.3M",
        variants=variants,
        comparisons=comparisons,
        setup=f"{' and '.join(here)}, static encoder, settings of `prime/sample` (64 free vectors, margin 0.2 to 0.4)"
        f"{'' if full else ' for 8 epochs'}; each part is left out alone. On the dense set one positive of a query is"
        " drawn in each step. About equal: within a point.",
        metrics=("P@1", "P@5", "PSP@1", "PSP@5", "R@100"),
        reason="every part but the draw of positives changes less than seeds do. Half the labels of the sample have"
        " one or two queries, and all a telling text; what a part adds is there without it: the encoder learns texts"
        " through the prototypes too, one margin fits labels of nearly equal frequency, and free vectors have too few"
        " queries to learn from, so that one for all labels does as well as 1,024.",
    )


if __name__ == "__main__":
    main(make)
