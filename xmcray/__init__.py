"""xmcray: train and serve retrieval over millions of labels, on a laptop and on a cluster with the same command.

    import xmcray

    corpus = xmcray.prepare("raw", "corpus")
    run = xmcray.train("astra", corpus, "run", {"cluster.workers": 0})
    print(xmcray.load(run).search(["blue kettle"], k=5))

A name is imported when it is used first, so that `import xmcray` needs neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmcray.api import (
        auto,
        calibrate,
        distil,
        evaluate,
        events,
        export,
        fuse,
        labels,
        load,
        memory,
        plan,
        predict,
        prepare,
        promote,
        push,
        serve,
        train,
        train_reranker,
        tune,
        tune_bundle,
    )
    from xmcray.client import Client
    from xmcray.retrieval.retriever import Retriever

__version__ = "0.1.0"
__all__ = [
    "Client",
    "Retriever",
    "auto",
    "calibrate",
    "distil",
    "evaluate",
    "events",
    "export",
    "fuse",
    "labels",
    "load",
    "memory",
    "plan",
    "predict",
    "prepare",
    "promote",
    "push",
    "serve",
    "train",
    "train_reranker",
    "tune",
    "tune_bundle",
]

# Modules of the names that are not functions of `api`.
_MODULES = {"Client": "xmcray.client", "Retriever": "xmcray.retrieval.retriever"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'xmcray' has no attribute {name!r}")
    module = importlib.import_module(_MODULES.get(name, "xmcray.api"))
    value = getattr(module, name)
    # From now on the name is found without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
