import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_mcrdl.transforms.compression.plan import MARGIN, PARTITIONS, Carriage, Coding, Curve, choose, fit

positive = st.floats(0.01, 1e4)
curves = st.builds(Curve, floor=positive, fixed=st.floats(-100, 100), per_byte=st.floats(0, 0.1))
codings = st.builds(
    Coding,
    encode=curves,
    decode=curves,
    merge=curves,
    payload=st.tuples(st.floats(0, 100), st.floats(0, 1.2)),
    sized=st.booleans(),
)
carriages = st.dictionaries(
    st.sampled_from(["shm", "mpi", "gloo"]), st.builds(Carriage, curves, curves, st.booleans()), min_size=1
)


def took(coding, carriage, nbytes, ranks, reduces, pieces):
    """The time of a call, piece by piece: two resources, each of which takes the pieces in their order."""
    part = nbytes / pieces / ranks
    payload = coding.payload[0] + coding.payload[1] * part
    code = sum(coding.encode(part) for _ in range(ranks - 1))
    send = carriage.exchange((ranks - 1) * payload)
    if coding.sized:
        send += carriage.exchange(8 * ranks)
    if reduces:
        code += sum(coding.merge(part) for _ in range(ranks - 1)) + coding.encode(part)
        code += sum(coding.decode(part) for _ in range(ranks))
        send += carriage.gather(ranks * payload)
        if coding.sized:
            send += carriage.gather(8 * ranks)
    else:
        code += sum(coding.decode(part) for _ in range(ranks - 1))
    coded = sent = 0.0
    for _ in range(pieces):
        coded = (coded if carriage.overlaps else max(coded, sent)) + code
        sent = max(coded, sent) + send
    return sent


@given(codings, carriages, curves, st.integers(1024, 2**28), st.integers(2, 64), st.booleans())
def test_the_plan_is_the_best_of_all(coding, carriers, plain, nbytes, ranks, reduces):
    plan = choose(coding, carriers, plain, nbytes, ranks, reduces)
    times = {
        (name, pieces): took(coding, carrier, nbytes, ranks, reduces, pieces)
        for (name, carrier), pieces in itertools.product(carriers.items(), PARTITIONS if reduces else (1,))
    }
    assert plan.us == pytest.approx(min(times.values()))
    assert times[plan.carrier, plan.partitions] == pytest.approx(plan.us)
    assert plan.compress == (plan.us < MARGIN * plain(nbytes))
    assert plan.plain_us == plain(nbytes)


def test_a_fast_link_is_left_as_it_is_and_a_slow_one_is_not():
    cpu = Curve(5, 5, 1 / 500)  # 0.5 GB/s
    int8 = Coding(cpu, cpu, cpu, (4, 0.252), sized=False)
    nbytes, ranks = 2**22, 2
    for rate, compress in ((1 / 5000, False), (1 / 100, True)):  # 5 GB/s, 0.1 GB/s
        link = Curve(10, 10, rate)
        plan = choose(int8, {"mpi": Carriage(link, link, overlaps=False)}, link, nbytes, ranks, True)
        assert plan.compress is compress
        assert plan.partitions == 1


def test_pieces_pay_where_sending_goes_on_by_itself():
    cpu, link = Curve(1, 1, 1 / 1000), Curve(1, 1, 1 / 300)
    int8 = Coding(cpu, cpu, cpu, (4, 0.252), sized=False)
    for overlaps, partitions in ((True, PARTITIONS[-1]), (False, 1)):
        assert choose(int8, {"gloo": Carriage(link, link, overlaps)}, link, 2**22, 2, True).partitions == partitions


def test_a_fit_gives_back_what_it_was_made_from():
    curve = fit([(size, 20 + size / 100) for size in (2**14, 2**17, 2**20, 2**22)])
    assert curve.fixed == pytest.approx(20)
    assert curve.per_byte == pytest.approx(0.01)
    assert curve(0) == curve.floor == pytest.approx(20 + 2**14 / 100)
    assert fit([(2**14, 9.0), (2**17, 8.0), (2**20, 7.0)]).per_byte == 0
