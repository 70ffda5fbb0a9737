import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_mcrdl.tuning import evidence


def times(median, count=200, spread=0.2, seed=0):
    return list(median * numpy.exp(spread * numpy.random.default_rng(seed).standard_normal(count)))


def test_a_clear_difference_is_evidence_and_noise_is_not():
    assert evidence.faster(times(10, seed=1), times(13, seed=2))
    assert not evidence.faster(times(13, seed=1), times(10, seed=2))
    assert not evidence.faster(times(10, seed=1), times(10.1, seed=2))
    assert not evidence.faster(times(10, count=5, seed=1), times(10.5, count=5, seed=2))


def test_noise_that_lasts_is_not_taken_for_a_difference():
    # 25 rounds in a row in which one of the two is twice as slow, among 100 without a difference
    slow = [20.0] * 25 + times(10, count=75, seed=1)
    assert not evidence.faster(times(10, count=100, seed=2), slow)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_equal_backends_are_seldom_told_apart(seed):
    a, b = times(10, seed=seed), times(10, seed=seed + 1)
    assert not (evidence.faster(a, b) and evidence.faster(b, a))
    low, high = evidence.gain(a, b)
    assert low <= high
    assert 0.85 < low < 1.06


def test_without_evidence_the_neighbours_choice_is_kept():
    by_size = {
        256: {"mpi": times(5, seed=1), "gloo": times(100, seed=2)},
        4096: {"mpi": times(10.1, seed=3), "gloo": times(10, seed=4)},
        65536: {"mpi": times(50, seed=5), "gloo": times(20, seed=6)},
        1048576: {"mpi": times(99.5, seed=7), "gloo": times(100, seed=8)},
    }
    chosen = evidence.choose(by_size, ["mpi", "gloo"])
    assert chosen == {256: "mpi", 4096: "mpi", 65536: "gloo", 1048576: "gloo"}
    steps = evidence.steps(by_size, chosen)
    assert [step.backend for step in steps] == ["mpi", "gloo"]
    assert 4096 <= steps[0].max_bytes < 10000  # near where the lines cross
    assert evidence.unsized(by_size, chosen) == "mpi"


def test_equal_backends_leave_the_preferred_one():
    by_size = {256: {"mpi": times(10, seed=1), "gloo": times(10, seed=2)}}
    assert evidence.choose(by_size, ["mpi", "gloo"]) == {256: "mpi"}
    assert evidence.choose(by_size, ["gloo", "mpi"]) == {256: "gloo"}


def test_a_limit_lies_where_two_lines_cross():
    by_size = {
        1000: {"mpi": [10.0] * 9, "gloo": [40.0] * 9},
        16000: {"mpi": [160.0] * 9, "gloo": [40.0] * 9},
    }
    steps = evidence.steps(by_size, {1000: "mpi", 16000: "gloo"})
    assert steps[0].max_bytes in range(3990, 4010)


def test_a_backend_that_lacks_a_size_does_not_stand_for_all():
    by_size = {256: {"mpi": times(10), "shm": times(1)}, 4096: {"mpi": times(10)}}
    assert evidence.unsized(by_size, evidence.choose(by_size, ["mpi", "shm"])) == "mpi"


def test_more_samples_are_asked_for_only_where_they_could_matter():
    assert evidence.unsettled({"mpi": times(10, 20, seed=1), "gloo": times(10.2, 20, seed=2)}, "mpi")
    assert not evidence.unsettled({"mpi": times(10, seed=1), "gloo": times(100, seed=2)}, "mpi")
