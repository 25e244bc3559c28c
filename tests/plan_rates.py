"""Rates of devices that plans are made with."""

from __future__ import annotations

import dataclasses

from xmcray.planning.devices import device_rates

A100 = device_rates("a100-80gb")
ON_CPU = dataclasses.replace(A100, on_gpu=False)
