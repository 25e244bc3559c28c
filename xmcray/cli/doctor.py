"""Looks at the machine, at a cluster, or at the file that describes one."""

from __future__ import annotations

import argparse
import dataclasses

from xmcray.cli.arguments import add_json
from xmcray.cli.output import show_json, show_line
from xmcray.errors import ConfigError, ResourceError


def doctor_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    target = verb.add_mutually_exclusive_group()
    target.add_argument(
        "--cluster",
        metavar="URL",
        help="a cluster's dashboard, http://HOST:PORT, or its head, HOST:PORT",
    )
    target.add_argument(
        "--cluster-file", metavar="FILE", help="check a cluster YAML or a Kubernetes manifest"
    )
    verb.add_argument(
        "--gpus",
        type=int,
        default=0,
        metavar="N",
        help="with --cluster: GPUs that it must have",
    )
    add_json(verb, "the findings")


def doctor(options: argparse.Namespace) -> None:
    """Prints the findings; the last line is an error if something must be mended."""
    if options.gpus and options.cluster is None:
        raise ConfigError("--gpus counts the GPUs of a cluster, expected --cluster URL with it")
    from xmcray.doctor.finding import Finding, worst

    if options.cluster_file is not None:
        from xmcray.cluster_files import check_cluster_file

        check_cluster_file(options.cluster_file)
        if options.json:
            # A mistake in the file is an error, so this is the only finding.
            finding = Finding("cluster file", "ok", f"{options.cluster_file} is fine")
            show_json([dataclasses.asdict(finding)])
        else:
            show_line(f"{options.cluster_file} is fine")
        return
    from xmcray.doctor.look import of_cluster, of_machine

    if options.cluster is None:
        findings = of_machine()
    else:
        findings = of_cluster(options.cluster, options.gpus)
    if options.json:
        show_json([dataclasses.asdict(finding) for finding in findings])
    else:
        for finding in findings:
            show_line(f"{finding.level:<9}{finding}")
    # All findings are printed first; the exit code then says whether one of them is an error.
    if error := worst(findings):
        raise ResourceError(error)
