"""Numbers of negatives by epoch, and the epochs of each version, in tables made by hand."""

from __future__ import annotations

from xmcray.negatives.plan import NegativesConfig, Schedule


def test_versions_are_collected_two_epochs_before_they_are_used() -> None:
    schedule = Schedule(start_epoch=3, refresh_every=2)
    epochs = range(8)
    assert [schedule.collecting(epoch) for epoch in epochs] == [None, 0, None, 1, None, 2, None, 3]
    assert [schedule.using(epoch) for epoch in epochs] == [None, None, None, 0, 0, 1, 1, 2]
    assert [schedule.use_epoch(version) for version in range(3)] == [3, 5, 7]
    assert NegativesConfig(start_epoch=3, refresh_every=2).schedule_of == schedule


def test_a_curriculum_grows_to_all_hard_negatives() -> None:
    config = NegativesConfig(hard=10, start_epoch=3, curriculum=4)
    # Quarters of 10, rounded up.
    assert [config.hard_at(epoch) for epoch in range(2, 9)] == [0, 3, 5, 8, 10, 10, 10]
    at_once = NegativesConfig(hard=10, start_epoch=3)
    assert [at_once.hard_at(epoch) for epoch in (2, 3, 4)] == [0, 10, 10]


def test_uniform_candidates_end_with_their_epochs() -> None:
    config = NegativesConfig(uniform=7, uniform_epochs=2)
    assert [config.uniform_at(epoch) for epoch in range(4)] == [7, 7, 0, 0]
    assert NegativesConfig(uniform=7).uniform_at(100) == 7


def test_epochs_with_neither_kind_of_negatives_are_counted() -> None:
    late = NegativesConfig(uniform=7, uniform_epochs=2, hard=10, start_epoch=5, curriculum=4)
    assert [late.num_epochs_without(num_epochs) for num_epochs in (2, 4, 9, 10**12)] == [0, 2, 3, 3]
    assert NegativesConfig(uniform=7, hard=0).num_epochs_without(10**12) == 0
    assert NegativesConfig(uniform=0, hard=0).num_epochs_without(9) == 9


def test_clusters_double_at_the_start_of_their_epochs() -> None:
    config = NegativesConfig(cluster_size=4, cluster_doubles=(2, 5))
    # 100 queries: 25 clusters of 4 become 16, 12 of 8 become 8, 6 of 16 become 4.
    assert [config.num_clusters_at(epoch, 100) for epoch in range(7)] == [16, 16, 8, 8, 8, 4, 4]
    assert config.num_clusters_at(0, 3) == 1


def test_torch_alone_searches_an_exact_index_on_a_gpu() -> None:
    suits_gpu = {
        index: NegativesConfig(hard=1, index=index).suits_gpu for index in ("auto", "Flat", "HNSW8")
    }
    assert suits_gpu == {"auto": True, "Flat": True, "HNSW8": False}
