"""Sweeps the settings of a method, as a job of a Ray cluster.

    ray job submit --working-dir . --runtime-env jobs/runtime_env.yaml -- \\
        python jobs/tune.py astra --data CORPUS --space tune/spaces/astra.yaml --out DIR --trials 32 --workers 4

Options are those of `xmcray tune`.
DIR lies in a folder that all nodes share; as many trials run at a time as the cluster has CPUs or GPUs for, and the
same job continues an interrupted sweep.
"""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("tune")
