"""Measures a run or a bundle, as a job of a Ray cluster.

    ray job submit --working-dir . --runtime-env jobs/runtime_env.yaml -- \\
        python jobs/evaluate.py RUN_OR_BUNDLE --data CORPUS --json metrics.json

Options are those of `xmcray evaluate`.
It searches on the node the job runs on; with --compare it tests two results against each other.
"""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("evaluate")
