"""Raw files to a corpus, as a job of a Ray cluster.

    ray job submit --working-dir . --runtime-env jobs/runtime_env.yaml -- \\
        python jobs/prepare.py SRC --out CORPUS

Options are those of `xmcray prepare`.
Any node may read SRC, and the driver writes CORPUS; name a folder that all nodes see, or a URL for CORPUS.
"""

from xmcray.cli.job import run_job

if __name__ == "__main__":
    run_job("prepare")
