"""Trains RAE-XMC, as a job of a Ray cluster.

    ray job submit --working-dir . --runtime-env jobs/runtime_env.yaml -- \\
        python jobs/train_rae.py --data CORPUS --out RUN --workers 8 --refit

Options are those of `xmcray train rae`.
RUN lies in a folder that all nodes share; the same job continues an interrupted run.
"""

import sys

from xmcray.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "rae", *sys.argv[1:]]))
