"""Finds a good bundle for a corpus within a time, as a job of a Ray cluster.

    ray job submit --working-dir . --runtime-env jobs/runtime_env.yaml -- \\
        python jobs/auto.py --data CORPUS --out DIR --budget 20m

Options are those of `xmcray auto`.
Everything runs on the node that the job runs on; DIR lies in a folder that all nodes share, so that the same job
continues an interrupted study on another node.
"""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("auto")
