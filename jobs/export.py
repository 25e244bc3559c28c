"""Writes the bundle of a finished run, as a job of a Ray cluster.

    ray job submit --working-dir . --runtime-env jobs/runtime_env.yaml -- \\
        python jobs/export.py RUN --out BUNDLE

Options are those of `xmcray export`.
BUNDLE may be a URL, from which any machine can answer.
"""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("export")
