"""Requests on-demand nodes from the autoscaler when spot nodes do not come; see docs/clusters.md.

    ray job submit --working-dir cluster -- python on_demand.py --gpus 4
    ray job submit --working-dir cluster -- python on_demand.py               # withdraws the request

Requested nodes stay up, used or not, until the request is withdrawn.
"""

import argparse

import ray
from ray.autoscaler.sdk import request_resources

# A label of the node types in aws.yaml, gcp.yaml and azure.yaml.
ON_DEMAND = {"market": "on-demand"}


def main() -> None:
    """Replaces the request of an earlier call."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=0, help="as many as the run has workers")
    parser.add_argument(
        "--index", type=int, default=0, help="index actors: as many as the run has workers"
    )
    options = parser.parse_args()
    for name, count in vars(options).items():
        if count < 0:
            parser.error(f"--{name} is {count}, expected at least 0")
    bundles = [{"GPU": 1}] * options.gpus + [{"index": 1}] * options.index
    ray.init(log_to_driver=False)
    request_resources(bundles=bundles, bundle_label_selectors=[ON_DEMAND] * len(bundles))
    print(f"requested {options.gpus} GPUs and {options.index} index actors on demand")


if __name__ == "__main__":
    main()
