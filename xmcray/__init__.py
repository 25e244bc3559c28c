"""xmcray: train and serve retrieval over millions of labels, on a laptop and on a cluster with the same command."""

__version__ = "0.1.0"
