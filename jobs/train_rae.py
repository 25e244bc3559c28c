"""Trains RAE-XMC as a Ray job: `jobs/train.py rae`, which says more."""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("train", "rae")
