"""Each part of a key changes what is drawn."""

import numpy as np

from xmcray import draws


def test_seed_purpose_and_place_give_draws_of_their_own() -> None:
    keys = [(3, "hard", 7), (4, "hard", 7), (3, "positives", 7), (3, "hard", 8)]
    first_numbers = [draws.generator(*key).random() for key in keys]
    assert len(set(first_numbers)) == len(keys)
    assert draws.generator(3, "hard", 7).random() == first_numbers[0]


def test_pools_of_other_seeds_and_steps_are_other_pools() -> None:
    pool = draws.uniform_labels(0, 5, 1000, 20)
    assert pool.tolist() == sorted(pool)
    assert not np.array_equal(pool, draws.uniform_labels(1, 5, 1000, 20))
    assert not np.array_equal(pool, draws.uniform_labels(0, 6, 1000, 20))


def test_a_key_gives_the_same_number_in_every_release() -> None:
    # Otherwise a run that goes on under a newer release would draw its first pools again.
    assert draws.torch_seed(1, "hard", 2) == 7800396994287936953
