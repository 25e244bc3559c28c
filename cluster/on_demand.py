"""Asks the autoscaler for nodes at the price on demand, where spot nodes do not come; docs/clusters.md says when.

    ray job submit --working-dir cluster -- python on_demand.py --gpus 4
    ray job submit --working-dir cluster -- python on_demand.py               # takes all of it back

What was asked for stays up, used or not, until it is taken back.
"""

import argparse

import ray
from ray.autoscaler.sdk import request_resources

ON_DEMAND = {
    "market": "on-demand"
}  # a label of the node types in aws.yaml, gcp.yaml and azure.yaml


def main() -> None:
    """Replaces what an earlier call asked for."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--gpus", type=int, default=0, help="as many as the run has workers")
    options.add_argument(
        "--index", type=int, default=0, help="index actors: as many as the run has workers"
    )
    given = options.parse_args()
    bundles = [{"GPU": 1}] * given.gpus + [{"index": 1}] * given.index
    ray.init(log_to_driver=False)
    request_resources(bundles=bundles, bundle_label_selectors=[ON_DEMAND] * len(bundles))
    print(f"asked for {given.gpus} GPUs and {given.index} index actors on demand")


if __name__ == "__main__":
    main()
