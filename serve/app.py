"""The application for Ray's own commands; `xmcray serve BUNDLE` is the short way to the same.

serve run serve.app:build bundle=bundles/a mode=composed
serve deploy serve/config.yaml
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from ray.serve import Application

from xmcray.serving import application


def build(args: Mapping[str, Any]) -> Application:
    """Settings of `xmcray.serving.settings.ServeConfig`; `bundle` alone names the only one.

    `serve run` gives every value as text, which is read as YAML.
    """
    values = {
        name: yaml.safe_load(value) if isinstance(value, str) else value
        for name, value in args.items()
    }
    if "bundle" in values:
        values["bundles"] = {"default": values.pop("bundle")}
    return application.build(values)
