"""What simple methods reach on the data sets, in percent, on the same splits as every benchmark.

Quoted from the BASELINES.md of the data sets, as renewed on 22 November 2026: filter pairs masked, propensity constants
A 0.55 and B 1.5. XR-Linear is libpecos 1.2.8 on TF-IDF of words split at camel case and of pairs of words, trained on
queries and label texts, beam 20, else default settings. The sample's two rows belong to another build of it.
"""

from __future__ import annotations

NEAREST = "TF-IDF, 10 nearest queries"
TEXTS = "TF-IDF, label texts"
BOTH = "TF-IDF, both"
LINEAR = "XR-Linear"
FUSED = "XR-Linear and TF-IDF, fused"

METRICS = ("P@1", "P@5", "PSP@5")
FLOORS: dict[str, dict[str, tuple[float | None, ...]]] = {
    "msdocs-seealso": {
        NEAREST: (67.4, 30.3, 59.8),
        TEXTS: (37.4, 18.8, 53.0),
        BOTH: (71.4, 32.3, 70.2),
        LINEAR: (77.8, 33.5, 69.4),
        FUSED: (76.0, 32.6, 70.5),
    },
    "msdocs-links": {
        NEAREST: (62.2, 35.3, 38.2),
        TEXTS: (30.6, 16.8, 33.4),
        BOTH: (59.8, 33.1, 45.1),
        LINEAR: (66.5, 37.2, 44.3),
        FUSED: (65.9, 36.2, 47.0),
    },
    "cdnjs-keywords": {
        NEAREST: (60.3, 33.0, 33.7),
        TEXTS: (57.4, 30.9, 45.3),
        BOTH: (69.7, 39.4, 49.6),
        LINEAR: (62.3, 36.6, 39.6),
        FUSED: (68.3, 40.2, 49.8),
    },
    "tate-subjects": {
        NEAREST: (68.3, 44.2, 35.3),
        TEXTS: (30.4, 12.7, 28.0),
        BOTH: (67.3, 44.5, 45.0),
        LINEAR: (78.7, 51.9, 42.9),
        FUSED: (79.0, 50.1, 47.4),
    },
    "wordnet-hypernyms": {
        NEAREST: (48.8, 31.8, 45.2),
        TEXTS: (17.6, 8.3, 25.0),
        BOTH: (45.9, 29.2, 50.3),
        LINEAR: (58.7, 37.2, 50.0),
        FUSED: (58.0, 35.7, 54.8),
    },
    "sample": {
        "TF-IDF, nearest queries, another build": (47.0, None, None),
        "XR-Linear, another build": (56.0, None, None),
    },
}
