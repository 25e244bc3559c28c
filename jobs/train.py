"""Trains a method as a Ray job.

    ray job submit --working-dir . --runtime-env jobs/runtime_env.yaml -- \\
        python jobs/train.py METHOD --data CORPUS --out RUN --workers 8 --refit

Options are those of `xmcray train`. The scripts `train_METHOD.py` fix the method.
RUN lies in a folder that all nodes share; the same job continues an interrupted run.
"""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("train")
