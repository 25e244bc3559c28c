"""The cycle from feedback to a better bundle, on a schedule, as a job of a Ray cluster.

    ray job submit --working-dir . --runtime-env jobs/runtime_env.yaml --no-wait -- \\
        python jobs/continual.py --config /mnt/xmcray/cycle.yaml --out /mnt/xmcray/cycles

Options are those of `xmcray continual`.
The driver reads the state folder of the server: it has to run on the same machine. The same job goes on with a cycle
that was stopped.
"""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("continual")
