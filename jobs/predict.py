"""Answers a file of queries, as a job of a Ray cluster.

    ray job submit --working-dir . --runtime-env jobs/runtime_env.yaml -- \\
        python jobs/predict.py BUNDLE queries.parquet --out PREDICTIONS -k 100

Options are those of `xmcray predict`.
BUNDLE and PREDICTIONS lie in folders that all nodes share, or are URLs; the same job continues an interrupted one.
"""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("predict")
