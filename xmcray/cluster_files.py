"""Checks a cluster file before `ray up` spends money on it, with Ray's own validators and with
checks of our own.

Ray accepts a file whose dashboard is open to everyone, whose nodes disagree about the token or
about Ray's version, or whose machine type does not exist. Strangers find an open dashboard; the
other mistakes cost minutes of waiting.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmcray import config as configs
from xmcray import settings_files
from xmcray.errors import ConfigError, one_line

PLACEHOLDER = "CHANGE-ME"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# RAY_AUTH_MODE=token as a word of a shell, also in quotes.
_TOKEN_MODE = re.compile(r"""\bRAY_AUTH_MODE=(["']?)token\1(?=[\s;&]|$)""")
_N1_CUSTOM = r"custom-\d+-\d+"
_GCP_FAMILY = r"[a-z]+\d+[a-z]*"
_SETUP = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
)
_AWS_SIZE = r"(nano|micro|small|medium|large|\d*xlarge|metal(-\d+xl)?)"
_CLUSTER_EXAMPLE = "compare with `xmcray files cluster/aws.yaml`"
_MANIFEST_EXAMPLE = "compare with `xmcray files cluster/kuberay/raycluster.yaml`"


@dataclass(frozen=True)
class _MachineType:
    """Where a cloud keeps the machine type of a node, and what a type looks like.

    Which types a region has is known to the cloud alone.

    Attributes:
        keys: way from node_config to the type.
        pattern: regular expression of a type.
        example: a type.
    """

    keys: Sequence[str]
    pattern: str
    example: str


_MACHINE_TYPES = {  # by the provider's type
    "aws": _MachineType(["InstanceType"], rf"[a-z]+[0-9]*[a-z0-9-]*\.{_AWS_SIZE}", "m7i.xlarge"),
    "gcp": _MachineType(
        ["machineType"], rf"({_N1_CUSTOM}|{_GCP_FAMILY}(-[0-9a-z]+)+)", "n2-standard-4"
    ),
    "azure": _MachineType(
        ["azure_arm_parameters", "vmSize"],
        r"(Standard|Basic)_[A-Z]+[0-9][A-Za-z0-9_-]*",
        "Standard_D4s_v5",
    ),
}


def check_cluster_file(path: str | Path) -> None:
    """Refuses a cluster file that Ray would not start, or that would start an open cluster.
    Contacts no cloud.

    Args:
        path: a file for `ray up`, or a manifest for KubeRay.

    Raises:
        ConfigError: one line that names the field: unreadable, missing, misspelt, a placeholder, an
            unknown kind of machine type, a dashboard beyond loopback, or nodes without token.
    """
    if not Path(path).is_file():
        problem = "is not a file" if Path(path).exists() else "does not exist"
        raise ConfigError(
            f"cluster file {path} {problem}, expected a YAML file for `ray up` or KubeRay;"
            " `xmcray files cluster/aws.yaml` prints one (azure.yaml, gcp.yaml, kuberay/raycluster.yaml)"
        )
    documents = settings_files.load_yaml_documents(str(path))
    manifests = [document for document in documents if "apiVersion" in document]
    if manifests:
        if any(document and "apiVersion" not in document for document in documents):
            raise ConfigError(
                f"{path} has a document without apiVersion, expected one in each; {_MANIFEST_EXAMPLE}"
            )
        for manifest in manifests:
            _check_manifest(path, manifest)
        return
    if len(documents) > 1:
        raise ConfigError(
            f"{path} has {len(documents)} documents, expected one for `ray up`; {_CLUSTER_EXAMPLE}"
        )
    values = documents[0] if documents else {}
    _check_provider(path, values)
    _check_fields(path, values)
    _check_with_ray(path, values)
    _check_placeholders(path, values)
    _check_machine_types(path, values)
    _check_start_commands(path, values)
    _check_version(path, values)


def _check_manifest(path: str | Path, values: Mapping[str, Any]) -> None:
    """Checks a manifest for what `kubectl apply --dry-run=server` does not know: placeholders, and
    Ray's rules for a RayCluster, RayJob or RayService.
    """
    from xmcray.ray_adapter.cluster import ray_version
    from xmcray.ray_adapter.private import autoscaling_config_of

    _check_placeholders(path, values)
    if not str(values["apiVersion"]).startswith("ray.io"):
        return
    spec = values.get("spec")
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{path}: spec is {spec!r}, expected a section; {_MANIFEST_EXAMPLE}")
    if spec.get("clusterSelector"):
        return  # a job for a cluster that exists
    cluster = spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec
    try:
        autoscaling_config_of(cluster)
    except KeyError as error:
        raise ConfigError(f"{path} has no {error.args[0]}; {_MANIFEST_EXAMPLE}") from None
    except Exception as error:  # any kind: Ray does not validate the manifest but reads it
        raise ConfigError(f"{path}: {_reason(error)}; {_MANIFEST_EXAMPLE}") from None
    authentication = cluster.get("authOptions")
    if not isinstance(authentication, Mapping) or authentication.get("mode") != "token":
        raise ConfigError(
            f"{path}: authOptions.mode is not token, so anyone who reaches a pod could run code there;"
            " set it to token"
        )
    version = cluster.get("rayVersion")
    if version != ray_version():
        raise ConfigError(
            f"{path}: rayVersion is {version}, here is {ray_version()}; expected the same"
        )


def _check_provider(path: str | Path, values: Mapping[str, Any]) -> None:
    """Refuses files for machines of one's own, whose fields are others than those that are checked."""
    provider = values.get("provider")
    if isinstance(provider, Mapping) and provider.get("type") == "local":
        known = ", ".join(_MACHINE_TYPES)
        raise ConfigError(
            f"{path}: provider.type is local, expected one of {known}; only files for these are checked"
        )


def _check_fields(path: str | Path, values: Mapping[str, Any]) -> None:
    """Checks Ray's schema, and the fields for which Ray would take defaults of its own."""
    import jsonschema  # type: ignore[import-untyped]

    from xmcray.ray_adapter.private import cluster_file_schema

    validator = jsonschema.Draft7Validator(cluster_file_schema())
    errors = validator.iter_errors(values)
    # The order of errors is not fixed. That of their fields makes the message reproducible.
    errors_by_field = sorted(errors, key=lambda error: [str(part) for part in error.path])
    first = next(iter(errors_by_field), None)
    if first is not None:
        field = ".".join(str(part) for part in first.absolute_path) or "the file"
        raise ConfigError(f"{path}: {field}: {_reason(first.message)}; {_CLUSTER_EXAMPLE}")
    for name in ("available_node_types", "head_node_type", "max_workers"):
        if name not in values:
            raise ConfigError(
                f"{path} has no {name}, expected it at the level of provider; {_CLUSTER_EXAMPLE}"
            )


def _check_with_ray(path: str | Path, values: Mapping[str, Any]) -> None:
    """Checks what `ray up` checks first."""
    from xmcray.ray_adapter.private import check_cluster_config

    plain = copy.deepcopy(dict(values))
    # Ray prints a warning for each mounted file and a notice for each type without a limit.
    plain["file_mounts"] = {}
    for node_type in plain["available_node_types"].values():
        node_type.setdefault("max_workers", 0)
    try:
        check_cluster_config(plain)
    except NotImplementedError:
        provider = str(values["provider"]["type"])
        message = configs.unknown("provider.type", provider, list(_MACHINE_TYPES))
        raise ConfigError(f"{path}: {message}") from None
    except Exception as error:  # any kind: Ray's code reads the file while it validates it
        raise ConfigError(f"{path}: {_reason(error)}; {_CLUSTER_EXAMPLE}") from None


def _check_placeholders(path: str | Path, values: Mapping[str, Any]) -> None:
    for field, text in _texts(values, ""):
        if PLACEHOLDER in text:
            raise ConfigError(
                f"{path}: {field} still holds {PLACEHOLDER}; put yours there (docs/clusters.md says which)"
            )


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yields all texts of nested settings with their dotted names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _texts(item, f"{field}[{i}]")
    elif isinstance(value, str):
        yield field, value


def _check_machine_types(path: str | Path, values: Mapping[str, Any]) -> None:
    provider = values["provider"]["type"]
    kind = _MACHINE_TYPES.get(provider)
    if kind is None:
        return
    for name, node_type in values["available_node_types"].items():
        # Each step down may meet something that is not a section.
        machine: Any = node_type["node_config"]
        for key in kind.keys:
            machine = machine.get(key) if isinstance(machine, Mapping) else None
        dotted_keys = ".".join(kind.keys)
        field = f"{path}: available_node_types.{name}.node_config.{dotted_keys}"
        if machine is None:
            raise ConfigError(f"{field} is missing, expected a machine type such as {kind.example}")
        if not re.fullmatch(kind.pattern, str(machine)):
            raise ConfigError(
                f"{field} is {machine!r}, which is no machine type of {provider}, expected one such as {kind.example}"
            )


def _check_start_commands(path: str | Path, values: Mapping[str, Any]) -> None:
    """Checks that each node gets the token and demands it, and that only the head reaches the
    dashboard.
    """
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [command for command in values.get(name, ()) if "ray start" in command]
        if not starts:
            raise ConfigError(
                f"{path}: {name} starts no Ray, and Ray's default is an open dashboard; {_CLUSTER_EXAMPLE}"
            )
        for command in starts:
            # A comment, and what follows Ray's start, set nothing for it.
            before_start = re.sub(r"#.*", "", command).partition("ray start")[0]
            if not _TOKEN_MODE.search(before_start):
                raise ConfigError(
                    f"{path}: {name} does not export RAY_AUTH_MODE=token; put it before `ray start`"
                )
    # Only the head starts a dashboard.
    for command in values["head_start_ray_commands"]:
        for host in re.findall(r"--dashboard-host[= ]+([^\s;&|]+)", command):
            if host.strip("\"'") not in LOOPBACK:
                raise ConfigError(
                    f"{path}: --dashboard-host is {host}, expected 127.0.0.1; `ray dashboard` forwards it"
                )
    # The keys of file_mounts are paths on the nodes.
    mounts = values.get("file_mounts", {})
    if not any(str(remote).endswith(".ray/auth_token") for remote in mounts):
        raise ConfigError(
            f"{path}: file_mounts has no ~/.ray/auth_token, expected the token's file; nodes would start without"
        )


def _check_version(path: str | Path, values: Mapping[str, Any]) -> None:
    from xmcray.ray_adapter.cluster import ray_version

    for name in _SETUP:
        for command in values.get(name) or ():
            # With or without extras, as in ray[default]==2.40.0.
            for version in re.findall(r"\bray(?:\[[^\]]*\])?==([0-9.]+[0-9])", command):
                if version != ray_version():
                    raise ConfigError(
                        f"{path}: {name} install Ray {version}, here is {ray_version()}; expected the same"
                    )


def _reason(error: object) -> str:
    """What Ray says, so that a hint can follow in the same line."""
    return one_line(error, limit=300).rstrip(".")
