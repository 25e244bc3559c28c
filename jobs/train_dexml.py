"""Trains DEXML as a Ray job: `jobs/train.py dexml`, which says more."""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("train", "dexml")
