"""Vectors of folders by sentence-transformers; runs in the environment of the peers.

FOLDER/cases.json    [{"folder": ..., "trusted": ...}], texts; NUMBER-query.npy and NUMBER-document.npy are written
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    import numpy as np
    from sentence_transformers import SentenceTransformer

    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    for number, case in enumerate(cases["folders"]):
        trusted = case["trusted"]
        model = SentenceTransformer(case["folder"], device="cpu", trust_remote_code=trusted)
        np.save(folder / f"{number}-query.npy", model.encode_query(cases["texts"]))
        np.save(folder / f"{number}-document.npy", model.encode_document(cases["texts"]))


if __name__ == "__main__":
    main()
