"""Checks a cluster file before `ray up` spends money on it: Ray's own validators, and what they let pass.

Ray accepts a file whose dashboard answers to everybody, whose nodes disagree about the token or about Ray's version, or
whose machine type does not exist. The first is found by a stranger, the others after minutes of waiting.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xmcray import config as configs
from xmcray.errors import ConfigError

PLACEHOLDER = "CHANGE-ME"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Where a provider keeps the machine type, and what one looks like. Which of them a region has, only the provider knows.
_SIZE = r"(nano|micro|small|medium|large|\d*xlarge|metal(-\d+xl)?)"
_SHAPES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "aws": (("InstanceType",), rf"[a-z]+[0-9]*[a-z0-9-]*\.{_SIZE}", "m7i.xlarge"),
    "gcp": (("machineType",), r"[a-z][0-9][a-z]?-[a-z]+(-[0-9a-z]+)*", "n2-standard-4"),
    "azure": (
        ("azure_arm_parameters", "vmSize"),
        r"(Standard|Basic)_[A-Z]+[0-9][A-Za-z0-9_-]*",
        "Standard_D4s_v5",
    ),
}


def check_cluster_file(path: str | Path) -> None:
    """Refuses a cluster file that Ray would not start, or that would start an open cluster. Asks no cloud.

    Args:
        path: a file for `ray up`, or a manifest for KubeRay.

    Raises:
        ConfigError: one line that names the field: unreadable, missing, misspelt, a placeholder, an unknown shape of
            machine, a dashboard beyond loopback, or nodes without token.
    """
    if not Path(path).is_file():
        raise ConfigError(
            f"cluster file {path} does not exist; cluster/aws.yaml, gcp.yaml and azure.yaml are such files"
        )
    values = configs.load_yaml(str(path))
    if str(values.get("apiVersion", "")).startswith("ray.io"):
        _check_manifest(path, values)
        return
    _check_fields(path, values)
    _check_with_ray(path, values)
    _check_placeholders(path, values)
    _check_shapes(path, values)
    _check_commands(path, values)
    _check_version(path, values)


def _check_manifest(path: str | Path, values: Mapping[str, Any]) -> None:
    """A RayCluster, RayJob or RayService; what Kubernetes itself says of it, `kubectl apply --dry-run=server` tells."""
    import ray
    from ray.autoscaler._private.kuberay import autoscaling_config

    _check_placeholders(path, values)
    spec = values.get("spec") or {}
    cluster = spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec
    try:  # what the autoscaler reads of it
        autoscaling_config._derive_autoscaling_config_from_ray_cr(
            {"metadata": {"name": "-", "namespace": "-"}, "spec": cluster}
        )
    except KeyError as error:
        raise ConfigError(
            f"{path} has no {error.args[0]}; compare with cluster/kuberay/raycluster.yaml"
        ) from None
    except Exception as error:  # Ray raises what its code stumbles over
        raise ConfigError(
            f"{path}: {_one_line(str(error))}; compare with cluster/kuberay/raycluster.yaml"
        ) from None
    if (cluster.get("authOptions") or {}).get("mode") != "token":
        raise ConfigError(
            f"{path}: authOptions.mode is not token; whoever reaches a pod could run code there"
        )
    if cluster.get("rayVersion") != ray.__version__:
        found = cluster.get("rayVersion")
        raise ConfigError(
            f"{path}: rayVersion is {found}, here is {ray.__version__}; expected the same"
        )


def _check_fields(path: str | Path, values: Mapping[str, Any]) -> None:
    """Ray's schema, and the fields that Ray would fill in from defaults of its own."""
    import jsonschema  # type: ignore[import-untyped]
    import ray.autoscaler

    schema = json.loads(
        (Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8")
    )
    errors = sorted(
        jsonschema.Draft7Validator(schema).iter_errors(values),
        key=lambda error: list(map(str, error.path)),
    )
    if errors:
        where = ".".join(map(str, errors[0].absolute_path)) or "the file"
        raise ConfigError(
            f"{path}: {where}: {_one_line(errors[0].message)}; compare with cluster/aws.yaml"
        )
    for name in ("available_node_types", "head_node_type", "max_workers"):
        if name not in values:
            raise ConfigError(
                f"{path} has no {name}, expected it beside provider; compare with cluster/aws.yaml"
            )


def _check_with_ray(path: str | Path, values: Mapping[str, Any]) -> None:
    """What `ray up` does first: it merges the provider's defaults and validates the whole."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    plain = {
        **copy.deepcopy(dict(values)),
        "file_mounts": {},
    }  # it warns of every file that is mounted,
    for node_type in plain[
        "available_node_types"
    ].values():  # and tells of every type without a limit
        node_type.setdefault("max_workers", 0)
    try:
        validate_config(prepare_config(plain))
    except NotImplementedError:
        kind, known = values["provider"]["type"], list(_SHAPES)
        raise ConfigError(f"{path}: {configs.unknown('provider.type', str(kind), known)}") from None
    except Exception as error:  # Ray raises what its code stumbles over
        raise ConfigError(
            f"{path}: {_one_line(str(error))}; compare with cluster/aws.yaml"
        ) from None


def _check_placeholders(path: str | Path, values: Any, where: str = "") -> None:
    if isinstance(values, Mapping):
        for key, value in values.items():
            _check_placeholders(path, value, f"{where}.{key}" if where else str(key))
    elif isinstance(values, list):
        for i, value in enumerate(values):
            _check_placeholders(path, value, f"{where}[{i}]")
    elif isinstance(values, str) and PLACEHOLDER in values:
        raise ConfigError(
            f"{path}: {where} still holds {PLACEHOLDER}; put yours there (docs/clusters.md says which)"
        )


def _check_shapes(path: str | Path, values: Mapping[str, Any]) -> None:
    provider = values["provider"]["type"]
    if provider not in _SHAPES:
        return
    keys, pattern, example = _SHAPES[provider]
    for name, node_type in values["available_node_types"].items():
        shape: Any = node_type["node_config"]
        for key in keys:
            shape = shape.get(key) if isinstance(shape, Mapping) else None
        where = f"{path}: available_node_types.{name}.node_config.{'.'.join(keys)}"
        if shape is None:
            raise ConfigError(f"{where} is missing, expected a machine type such as {example}")
        if not re.fullmatch(pattern, str(shape)):
            raise ConfigError(
                f"{where} is {shape!r}, which is no machine type of {provider}, expected one such as {example}"
            )


def _check_commands(path: str | Path, values: Mapping[str, Any]) -> None:
    """The token reaches every node and is asked for, and the dashboard is for the head alone."""
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [command for command in values.get(name, ()) if "ray start" in command]
        if not starts:
            raise ConfigError(
                f"{path}: {name} starts no Ray, and Ray's default is an open dashboard; compare with cluster/aws.yaml"
            )
        if any("RAY_AUTH_MODE=token" not in command for command in starts):
            raise ConfigError(
                f"{path}: {name} does not export RAY_AUTH_MODE=token; put it before `ray start`"
            )
    for command in values["head_start_ray_commands"]:
        host = re.search(r"--dashboard-host[= ]+(\S+)", command)
        if host and host[1] not in LOOPBACK:
            raise ConfigError(
                f"{path}: --dashboard-host is {host[1]}, expected 127.0.0.1; `ray dashboard` forwards it"
            )
    if not any(str(remote).endswith(".ray/auth_token") for remote in values.get("file_mounts", {})):
        raise ConfigError(
            f"{path}: file_mounts has no ~/.ray/auth_token, expected the token's file; nodes would start without"
        )


def _check_version(path: str | Path, values: Mapping[str, Any]) -> None:
    import ray

    for command in values.get("setup_commands", ()):
        pinned = re.search(r"\bray(?:\[[^\]]*\])?==([0-9.]+[0-9])", command)
        if pinned and pinned[1] != ray.__version__:
            raise ConfigError(
                f"{path}: setup_commands install Ray {pinned[1]}, here is {ray.__version__}; expected the same"
            )


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")[:300]
