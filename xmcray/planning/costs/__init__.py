"""What each method adds to a plan, one class per method."""

from __future__ import annotations

from collections.abc import Mapping

from xmcray.planning.costs.base import Costs
from xmcray.planning.costs.dexml import DexmlCosts
from xmcray.planning.costs.one_vs_all import AstraCosts, ReneeCosts
from xmcray.planning.costs.prime import PrimeCosts
from xmcray.planning.costs.rae import RaeCosts
from xmcray.planning.costs.unidec import UnidecCosts
from xmcray.training.run import RunConfig

COSTS: Mapping[str, type[Costs]] = {
    "astra": AstraCosts,
    "dexml": DexmlCosts,
    "prime": PrimeCosts,
    "rae": RaeCosts,
    "renee": ReneeCosts,
    "unidec": UnidecCosts,
}


def costs_of(config: RunConfig) -> Costs:
    """The costs of the method that a configuration names."""
    return COSTS[config.method_name](config)
