"""Trains ASTRA as a Ray job: `jobs/train.py astra`, which says more."""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("train", "astra")
