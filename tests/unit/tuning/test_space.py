"""Search spaces: their files, the values that are sampled from them, and messages about wrong ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xmcray import settings_files
from xmcray.errors import ConfigError
from xmcray.methods.registry import method_names
from xmcray.training.run_config import RunConfig
from xmcray.tuning.proposals import OptunaProposals, RandomProposals
from xmcray.tuning.space import (
    Choice,
    NumberRange,
    check_space,
    nearest_values,
    nested,
    parse_space,
)
from xmcray.tuning.sweep import SweepConfig

SPACES = Path(__file__).parents[3] / "tune" / "spaces"
OF_BUNDLES = {"memory", "fusion", "index"}


def sweep_of(method: str, *settings: str) -> SweepConfig:
    values = RunConfig.resolve(method, {}, settings).to_dict()
    return SweepConfig(
        method=method, corpus="", corpus_sha256="", settings=values, space={}, metric="P@1"
    )


def test_draws_lie_on_their_scales() -> None:
    space = parse_space(
        {
            "a": {"uniform": [0, 1], "step": 0.1},
            "b": {"log_uniform": ["1e-4", 1]},
            "c": {"int": [3, 5]},
            "d": {"log_int": [1, 1000]},
            "e": {"choice": ["x", [1, 2], None]},
        },
        "here",
    )
    drawn = RandomProposals(space, 0, lambda _: None)
    values = [drawn.propose(number) for number in range(2000)]
    assert {v["a"] for v in values} == {round(i / 10, 12) for i in range(11)}
    assert {v["c"] for v in values} == {3, 4, 5}
    for name, far, middle in (
        ("b", 1e-4, 0.5),
        ("d", 1000, 0.45),
    ):  # integers reach half a unit below 1
        logs = np.log([v[name] for v in values]) / np.log(far)
        assert abs(np.mean(logs) - middle) < 0.03
        assert 0 <= logs.min() < 0.02
        assert 0.98 < logs.max() <= 1
    assert all(isinstance(v["d"], int) for v in values)
    assert abs(np.mean([v["e"] == [1, 2] for v in values]) - 1 / 3) < 0.04


def test_a_trial_draws_the_same_whatever_else_is_drawn() -> None:
    a = NumberRange(low=0, high=1)
    alone, together = (
        RandomProposals({"a": a}, 3, lambda _: None),
        RandomProposals({"b": Choice(values=(1, 2)), "a": a}, 3, lambda _: None),
    )
    assert alone.propose(7)["a"] == together.propose(7)["a"] != alone.propose(8)["a"]
    assert RandomProposals({"a": a}, 4, lambda _: None).propose(7)["a"] != alone.propose(7)["a"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            0.1,
            "x.yaml: optim.lr is 0.1, expected one of uniform, log_uniform, int, log_int, choice",
        ),
        ({"uniform": [0, 1], "int": [0, 1]}, "expected one of uniform"),
        ({"unifrom": [0, 1]}, "unknown distribution 'unifrom'; did you mean 'uniform'?"),
        ({"uniform": [1, 0]}, "uniform is [1, 0], expected the lower bound first"),
        ({"uniform": [0, 0]}, "expected the lower bound first"),
        ({"uniform": [0]}, "uniform is [0], expected [lowest, highest]"),
        ({"uniform": [0, "fast"]}, "holds 'fast', expected a number"),
        ({"uniform": [0, float("nan")]}, "holds nan, expected a number"),
        ({"uniform": [False, True]}, "holds False, expected a number"),
        ({"log_uniform": [0, 1]}, "log_uniform starts at 0, expected more than 0"),
        ({"log_int": [-1, 4]}, "log_int starts at -1"),
        ({"int": [0.5, 2]}, "holds 0.5, expected an integer"),
        ({"int": [0, 10**400]}, "expected an integer"),
        ({"uniform": [0, 1], "step": 2}, "step is 2, expected more than 0 and at most 1"),
        ({"uniform": [0, 1], "step": 1e-30}, "step is 1e-30, expected a larger one, or none"),
        ({"choice": [{"validation": 0.3}]}, "expected values, no sections"),
        ({"uniform": [0, 1], "step": 0}, "step is 0, expected more than 0"),
        ({"log_uniform": [1, 2], "step": 0.5}, "step is 0.5, expected none for log_uniform"),
        ({"choice": []}, "choice is [], expected a list of values"),
        ({"choice": "none"}, "choice is 'none', expected a list of values"),
    ],
)
def test_a_wrong_distribution_is_named(body: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_space({"optim.lr": body}, "x.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("x.yaml: optim.lr")


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            {"optim.lrr": {"uniform": [0, 1]}},
            "f: unknown setting 'optim.lrr'; did you mean 'optim.lr'?",
        ),
        ({"method.clasifier.lr": {"uniform": [0, 1]}}, "did you mean 'method.classifier'?"),
        (
            {"method.dropout": {"uniform": [0, 2]}},
            "f: method.dropout is 2.0, expected at least 0 and at most 0.99",
        ),
        ({"negatives.hard": {"uniform": [0, 9]}}, "f: negatives.hard is 0.0, expected int"),
        (
            {"method.init": {"choice": ["random", "text"]}},
            "f: method.init is 'text', expected one of random",
        ),
        ({"optim": {"choice": [1]}}, "f: optim is 1, expected a section"),
    ],
)
def test_a_space_is_compared_with_the_settings(space: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_space(parse_space(space, "f"), sweep_of("astra").resolve, "f")
    assert message in str(error.value)


def test_settings_that_bound_each_other() -> None:
    """The lowest gamma_max is below the usual gamma_min: legal, as long as the draws respect it."""
    prime, bodies = (
        sweep_of("prime"),
        {"method.gamma_min": {"uniform": [0, 0.4]}, "method.gamma_max": {"uniform": [0.05, 0.6]}},
    )
    space = parse_space(bodies, "f")
    check_space(space, prime.resolve, "f")
    drawn = RandomProposals(space, 0, prime.resolve)
    pairs = [(v["method.gamma_min"], v["method.gamma_max"]) for v in map(drawn.propose, range(50))]
    assert all(low <= high for low, high in pairs)
    assert any(low > 0.05 for low, _ in pairs)
    never = parse_space(
        {"method.gamma_min": {"uniform": [0.5, 0.6]}, "method.gamma_max": {"uniform": [0.1, 0.2]}},
        "f",
    )
    with pytest.raises(ConfigError, match="no feasible trial"):
        RandomProposals(never, 0, prime.resolve).propose(0)


def test_the_spaces_that_ship_fit_their_methods() -> None:
    names = {path.stem for path in SPACES.glob("*.yaml")}
    assert names == OF_BUNDLES | set(method_names())
    for name in names - OF_BUNDLES:
        path = str(SPACES / f"{name}.yaml")
        for preset in ({}, settings_files.load_yaml(f"preset:{name}/sample")):
            sweep = SweepConfig(
                method=name,
                corpus="",
                corpus_sha256="",
                settings=RunConfig.resolve(name, preset).to_dict(),
                space={},
                metric="P@1",
            )
            check_space(parse_space(settings_files.load_yaml(path), path), sweep.resolve, path)


def test_a_configuration_moves_to_the_nearest_values_of_a_space() -> None:
    space = parse_space(
        {
            "optim.lr": {"log_uniform": [1e-4, 1e-2]},
            "optim.epochs": {"int": [4, 12], "step": 4},
            "method.dropout": {"uniform": [0.3, 0.8], "step": 0.05},
            "encoder.dim": {"choice": [128, 256]},
            "encoder.residual": {"choice": [True, False]},
        },
        "f",
    )
    settings = {
        "optim": {"lr": 0.5, "epochs": 7},
        "method": {"dropout": 0.52},
        "encoder": {"dim": 200, "residual": False},
    }
    values = nearest_values(space, settings, "f")
    assert list(values.values()) == [1e-2, 8, 0.5, 256, False]
    space = parse_space({"method.loss": {"choice": ["softmax"]}}, "f")
    with pytest.raises(ConfigError, match="loss is 'bce', expected one of 'softmax'; add it"):
        nearest_values(space, {"method": {"loss": "bce"}}, "f")
    with pytest.raises(ConfigError, match="expected one of 'softmax'; it cannot be had here"):
        nearest_values(space, {"method": {"loss": "bce"}}, "f", {"method.loss": ["bce"]})


@pytest.mark.parametrize("value", [None, "auto", [1], True])
def test_only_a_number_has_a_nearest_one_in_a_range(value: object) -> None:
    space = parse_space({"encoder.dim": {"int": [8, 16]}}, "f")
    message = "^g: encoder.dim is .*, expected a number from 8 to 16; add it to the space"
    with pytest.raises(ConfigError, match=message):
        nearest_values(space, {"encoder": {"dim": value}}, "g")


def test_choices_that_yaml_reads_as_texts_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "optim.lr: {choice: [1e-3, 1E-2, 2.5e1, 0.1]}\nmethod.x: {choice: [e5, 8-bit]}\n"
    )
    space = parse_space(settings_files.load_yaml(str(path)), "f")
    rates = space["optim.lr"]
    assert list(rates.values_to_check()) == [0.001, 0.01, 25.0, 0.1]
    assert list(space["method.x"].values_to_check()) == ["e5", "8-bit"]
    assert (
        nearest_values(space, {"optim": {"lr": 0.02}, "method": {"x": "e5"}}, "f")["optim.lr"]
        == 0.01
    )
    # Ledgers of sweeps of older releases hold the texts.
    assert rates.place("1e-3") == rates.place(0.001) == 0


def test_dotted_names_become_sections() -> None:
    assert nested({"a.b.c": 1, "a.d": 2, "e": 3}) == {"a": {"b": {"c": 1}, "d": 2}, "e": 3}


def test_optuna_avoids_what_failed() -> None:
    pytest.importorskip("optuna")
    space = parse_space({"x": {"uniform": [0, 1]}}, "here")
    proposals = OptunaProposals(space, 0, lambda _: None, [])
    tried = []
    for number in range(40):
        values = proposals.propose(number)
        tried.append(float(values["x"]))
        # The larger the better, but all above 0.4 fail.
        proposals.learn(number, values, tried[-1] if tried[-1] <= 0.4 else None)
    assert np.mean([x > 0.4 for x in tried[-20:]]) < 0.7


def test_optuna_learns_and_goes_on_where_another_was() -> None:
    pytest.importorskip("optuna")
    space = parse_space(
        {"x": {"uniform": [0, 1], "step": 0.001}, "kind": {"choice": [[1], "b"]}}, "here"
    )

    def reached(values: dict[str, object]) -> float:
        return 2 - abs(float(str(values["x"])) - 0.8) - (values["kind"] != "b")

    past = []
    first = OptunaProposals(space, 0, lambda _: None, [])
    for number in range(20):
        values = first.propose(number)
        past.append((values, None if number == 3 else reached(values)))
        first.learn(number, *past[-1])
    second = OptunaProposals(space, 0, lambda _: None, past[:15])
    second.learn(15, *past[15])  # of a trial that the first one proposed
    proposed = []
    for number in range(20, 50):
        proposed.append(second.propose(number))
        second.learn(number, proposed[-1], reached(proposed[-1]))
    blind = np.mean(
        [reached(v) for v in map(RandomProposals(space, 0, lambda _: None).propose, range(1000))]
    )
    assert np.mean([reached(v) for v in proposed[-15:]]) > blind + 0.2
    assert len({v["x"] for v in proposed} & {v["x"] for v, _ in past}) < 10, (
        "the draws of before, once more"
    )
