"""The functions of `import xmcray`, which the verbs of the command line call.

Each imports what it needs when it runs, so that mistakes in its arguments are reported before torch
and Ray are loaded. What a user can repair is raised as an `XmcrayError` whose message is one line.
"""

from xmcray.api.answers import load, predict, serve
from xmcray.api.bundling import calibrate, distil, fuse, labels, memory, train_reranker
from xmcray.api.estimates import plan
from xmcray.api.preparing import PrepareOptions, events, prepare
from xmcray.api.publishing import Promotion, promote, push
from xmcray.api.runs import (
    ENCODER_SYSTEMS,
    VECTOR_SYSTEMS,
    Export,
    evaluate,
    export,
    run_settings,
    train,
)
from xmcray.api.sweeps import auto, tune, tune_bundle

__all__ = [
    "ENCODER_SYSTEMS",
    "VECTOR_SYSTEMS",
    "Export",
    "PrepareOptions",
    "Promotion",
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
    "run_settings",
    "serve",
    "train",
    "train_reranker",
    "tune",
    "tune_bundle",
]
