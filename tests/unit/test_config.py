"""Settings from YAML and dotted overrides: types, ranges, and the one line each mistake gets."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from xmcray import config, settings_files
from xmcray.errors import ConfigError
from xmcray.training.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    count: int = 3
    mode: Literal["fast", "exact"] = "fast"
    weight: Literal["prior"] | float = "prior"
    switch: bool = False


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    layers: tuple[int, ...] = ()
    limit: int | None = None


def built(*overrides: str) -> Outer:
    return config.build(Outer, config.merge({"name": "x"}, overrides))


def test_dotted_overrides_become_the_annotated_types(tmp_path: Path) -> None:
    found = built(
        "inner.rate=1e-4",
        "inner.count=7",
        "inner.switch=true",
        "layers=[1, 2]",
        "limit=null",
        "name='3'",
    )
    assert found == Outer(name="3", inner=Inner(rate=1e-4, count=7, switch=True), layers=(1, 2))
    assert type(built("inner.rate=3").inner.rate) is float
    assert built("inner.weight=2").inner.weight == 2.0
    assert built("inner.weight=prior").inner.weight == "prior"
    (tmp_path / "c.yaml").write_text(
        "name: x\ninner: {rate: 1e-4}\n"
    )  # YAML 1.1 reads 1e-4 as a string
    assert (
        config.build(Outer, settings_files.load_yaml(str(tmp_path / "c.yaml"))).inner.rate == 1e-4
    )


def test_a_setting_of_a_section_leaves_what_its_owner_gives_it_by_default() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Owner:
        inner: Inner = field(default_factory=lambda: Inner(count=9, mode="exact"))

    # Annotations are texts here, which are looked up in the module.
    Owner.__annotations__["inner"] = Inner
    assert config.build(Owner, {"inner": {"rate": 0.1}}).inner == Inner(
        rate=0.1, count=9, mode="exact"
    )
    unidec = RunConfig.resolve("unidec", {}, ["method.classifier.lr=0.01"])
    assert unidec.method.classifier.kind == "adam"


def test_overrides_win_over_files_and_leave_the_rest() -> None:
    base = {"name": "x", "inner": {"rate": 0.1, "count": 5}}
    merged = config.merge(
        config.overlay(base, {"inner": {"rate": 0.2}}), ["inner.rate=0.3", "inner.mode=exact"]
    )
    assert merged == {"name": "x", "inner": {"rate": 0.3, "count": 5, "mode": "exact"}}
    assert base == {"name": "x", "inner": {"rate": 0.1, "count": 5}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.rat=1", "unknown setting 'inner.rat'; did you mean 'inner.rate'?"),
        ("innr.rate=1", "unknown setting 'innr'; did you mean 'inner'?"),
        ("inner.rate", "override 'inner.rate' is not of the form section.name=value"),
        ("=1", "override '=1' is not of the form section.name=value"),
        ("inner.rate=[", "override 'inner.rate=[': '[' is not a YAML value"),
        ("inner.rate=fast", "inner.rate is 'fast', expected a number"),
        ("inner.rate=true", "inner.rate is True, expected float"),
        ("inner.rate=1" + "0" * 400, "expected a number"),
        ("inner.count=1.5", "inner.count is 1.5, expected int"),
        ("inner.count=true", "inner.count is True, expected int"),
        ("inner.switch=1", "inner.switch is 1, expected bool"),
        ("inner.mode=slow", "inner.mode is 'slow', expected one of fast, exact"),
        ("inner.weight=none", "inner.weight is 'none', expected one of prior, float"),
        ("inner=3", "inner is 3, expected a section with settings"),
        ("name.x=3", "override 'name.x=3': 'name' is a value, not a section"),
    ],
)
def test_a_mistaken_override_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_required_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="setting 'name' is required and was not given"):
        config.build(Outer, {})


@pytest.mark.parametrize("value", [math.nan, -0.1, 1.1, -math.inf])
def test_a_range_refuses_what_is_not_inside(value: float) -> None:
    with pytest.raises(ConfigError, match=f"rate is {value}, expected at least 0 and at most 1"):
        config.check_range("rate", value, 0, 1)
    config.check_range("rate", 1, 0, 1)


def test_a_range_without_an_end_refuses_infinity() -> None:
    with pytest.raises(ConfigError, match="lr is inf, expected at least 0 and finite"):
        config.check_range("lr", math.inf, 0)
    # It would overflow where it is rounded to float32.
    with pytest.raises(ConfigError, match=r"lr is 1e\+39, expected at least 0 and at most 1e\+30"):
        config.check_range("lr", 1e39, 0)


@pytest.mark.parametrize(
    "setting",
    [
        "optim.lr=.nan",
        "optim.lr=.inf",
        "optim.weight_decay=1e999",
        "optim.stop_epoch=-1",
        "optim.stop_epoch=16",
        "optim.beta1=1",
        "optim.beta2=-0.1",
        "optim.beta2=1.0",
        "optim.eps=0",
        "data.seed=-1",
        "data.validation=nan",
        "cluster.cpus_per_worker=.nan",
        "method.logit_prior=.inf",
        "method.regulariser_margin=.nan",
    ],
)
def test_settings_of_a_run_out_of_range(setting: str) -> None:
    name = setting.partition("=")[0]
    method = "prime" if name == "method.regulariser_margin" else "astra"
    with pytest.raises(ConfigError, match=f"^{name} is .*, expected at least"):
        RunConfig.resolve(method, {}, [setting])


@pytest.mark.parametrize(
    ("values", "override", "message"),
    [
        (
            {"method": "astra"},
            "optim.epochs=1",
            "method is 'astra', expected a section with the settings of astra",
        ),
        ({"method": None}, "optim.epochs=1", "method is None, expected a section"),
        ({}, "method=astra", "method is 'astra', expected a section"),
        ({"method": "astra"}, "method.dropout=0", "'method' is a value, not a section"),
        ({}, "method_name=x", "the configuration is for method x, not for astra"),
        (
            {"method_name": "x"},
            "optim.epochs=1",
            "the configuration is for method x, not for astra",
        ),
        ({"methd": {}}, "optim.epochs=1", "unknown setting 'methd'; did you mean 'method'?"),
        ({1: 2}, "optim.epochs=1", "unknown setting '1'; known: "),
        ({}, "method.dropot=0", "unknown setting 'method.dropot'; did you mean 'method.dropout'?"),
        ({}, "optim=adam", "optim is 'adam', expected a section with settings"),
    ],
)
def test_a_run_is_not_resolved_from_a_mistake(
    values: dict[str, Any], override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.resolve("astra", values, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_run_writes_resolves_to_the_same() -> None:
    given = RunConfig.resolve(
        "astra", {"method": {"dropout": 0.1}}, ["optim.beta2=0.99", "method_name=astra"]
    )
    assert given.optim.beta2 == 0.99
    assert RunConfig.resolve("astra", given.to_dict()) == given
    assert dataclasses.replace(given, method_name="astra") == given
