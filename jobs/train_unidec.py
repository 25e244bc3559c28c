"""Trains UniDEC as a Ray job: `jobs/train.py unidec`, which says more."""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("train", "unidec")
