"""What is particular to shared memory; tests/matrix and its neighbours have it among the other backends."""

import mmap
import os
import random
import signal
import sys
import tempfile
import threading
import time

import pytest
import torch

import deepspeed_mcrdl as mcrdl
from deepspeed_mcrdl.backends import shm
from deepspeed_mcrdl.backends.shm import SINGLE_COPY, ShmBackend
from deepspeed_mcrdl.backends.shm_segments import Peers, allocate, halves
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import CallFailedError, MCRDLError, UnsupportedError
from deepspeed_mcrdl.runtime import current
from tests.backends.test_operations_on_backends import _all_operations
from tests.programs import face, use
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(ShmBackend.unusable() is not None, reason=str(ShmBackend.unusable()))


_shm = shm._extension()


def _names():
    return {name for name in os.listdir("/dev/shm") if name.startswith("mcrdl_")}


def _every_half():
    use({"default": "shm"})
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        numbers = every.view(dtype)
        numbers = numbers[~numbers.isnan()]
        tensor = numbers.clone()
        mcrdl.all_reduce(tensor, "max")
        assert torch.equal(tensor.view(torch.int16), numbers.view(torch.int16))
        generator = torch.Generator().manual_seed(1)
        both = [numbers[torch.randperm(len(numbers), generator=generator)] for _ in range(2)]
        tensor = both[mcrdl.get_rank()].clone()
        mcrdl.all_reduce(tensor)
        wanted = (both[0].float() + both[1].float()).to(dtype)
        assert torch.equal(tensor.isnan(), wanted.isnan())
        assert torch.equal(tensor[~tensor.isnan()], wanted[~wanted.isnan()])


def test_16_bit_floats_are_rounded_once_to_the_nearest(ranks):
    ranks(2).run(_every_half)


def _order_of_sums():
    use({"default": "shm"})
    me, n = mcrdl.get_rank(), mcrdl.get_world_size()
    for count in (1, 1000, 5000, 300_001):
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(seed)) for seed in range(n)]
        wanted = parts[0]
        for part in parts[1:]:
            wanted = wanted + part
        tensor = parts[me].clone()
        mcrdl.all_reduce(tensor)
        assert torch.equal(tensor, wanted), count
        mine, output = torch.stack(parts)[me].repeat(n), torch.empty(count)
        mcrdl.reduce_scatter_tensor(output, mine)
        assert torch.equal(output, wanted), count


def test_sums_are_added_up_in_the_order_of_ranks_everywhere(ranks):
    ranks(3).run(_order_of_sums)


def _single_copies():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SINGLE_COPY, str(mcrdl.get_rank() + 1))  # what one rank alone is told must not divide them
        _all_operations("shm")
    assert "single copies" in current().backends["shm"].details()
    _messages_of_all_sizes()


def test_every_operation_is_right_with_single_copies(ranks):
    ranks(3).run(_single_copies)


def _messages_of_all_sizes():
    me, n = mcrdl.get_rank(), mcrdl.get_world_size()
    sizes = (0, 1, 100, 5000, 300_000, 3, 1_000_000)
    sends = [
        mcrdl.isend(torch.full((size,), me * 10.0 + tag), other, tag=tag, backend="shm")
        for other in range(n)
        for tag, size in enumerate(sizes)
    ]
    for tag in reversed(range(len(sizes))):  # none is expected when it comes
        tensors = [torch.zeros(sizes[tag]) for _ in range(n)]
        works = [mcrdl.irecv(tensor, other, tag=tag, backend="shm") for other, tensor in enumerate(tensors)]
        for other, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
            work.wait()
            assert (tensor == other * 10.0 + tag).all()
    for send in sends:
        send.wait()


def _many_messages():
    use({})
    _messages_of_all_sizes()
    me, n = mcrdl.get_rank(), mcrdl.get_world_size()
    if me == 0:
        seen = []
        for _ in range(200 * (n - 1)):
            tensor = torch.zeros(1)
            work = mcrdl.irecv(tensor, None, backend="shm")
            work.wait()
            seen.append((work.source_rank(), int(tensor)))
        for other in range(1, n):
            assert [number for source, number in seen if source == other] == list(range(200))
    else:
        for number in range(200):
            mcrdl.isend(torch.tensor([float(number)]), 0, backend="shm").wait()
    mcrdl.barrier()


def test_messages_come_whole_and_in_order_whenever_they_are_received(ranks):
    ranks(3).run(_many_messages)


def _too_long():
    use({})
    if mcrdl.get_rank() == 0:
        mcrdl.send(torch.ones(10), 1, backend="shm")
    else:
        with pytest.raises(CallFailedError, match="the message is longer than the 20 bytes of the tensor"):
            mcrdl.recv(torch.ones(5), 0, backend="shm")
    mcrdl.barrier()


def test_a_message_that_does_not_fit_is_an_error(ranks):
    ranks(2).run(_too_long)


def test_nothing_is_left_in_the_folder(ranks):
    before = _names()
    ranks(2).run(_many_messages)
    assert _names() <= before


def _two_hosts():
    me, n = mcrdl.get_rank(), mcrdl.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: f"host{me // 2}")
        face().restart(parse({"backends": ["shm", "gloo"], "banner": False}))
        groups = [(members, current().new_group(members)) for members in ([0, 1], [2, 3], [0, 2])]
        for members, group in [(list(range(n)), None), *groups]:
            if me in members:
                tensor = torch.ones(1000)
                mcrdl.all_reduce(tensor, group=group)
                assert (tensor == len(members)).all()
        carried = {(route.group.ranks, route.backend) for route in current()._routes.values()}
        left, right = (me - 1) % n, (me + 1) % n
        tensor = torch.zeros(5)
        work = mcrdl.irecv(tensor, left)
        mcrdl.send(torch.full((5,), float(me)), right)
        work.wait()
        assert (tensor == left).all()
        with pytest.raises(UnsupportedError, match="the backend shm carries calls within one host only"):
            mcrdl.all_reduce(tensor, backend="shm")
    use({})
    return carried


def test_it_carries_the_groups_within_a_host_and_leaves_the_others(ranks):
    world = ((0, 1, 2, 3), "gloo")
    across = ((0, 2), "gloo")
    found = ranks(4).run(_two_hosts)
    assert found == [{world, ((0, 1), "shm"), across}, {world, ((0, 1), "shm")}] + [
        {world, ((2, 3), "shm"), across},
        {world, ((2, 3), "shm")},
    ]


def test_a_wrong_switch_is_a_sentence(monkeypatch):
    monkeypatch.setenv(SINGLE_COPY, "1M")
    with pytest.raises(MCRDLError, match=f'{SINGLE_COPY} must be a number of bytes, got "1M"'):
        shm._single_copy_bytes()


@pytest.mark.parametrize("kind", ["collective", "message"])
def test_a_thread_that_sleeps_in_a_call_hears_that_the_group_is_left(kind):
    # The segment must stay mapped until it has woken up.
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        if kind == "collective":
            size = _shm.Collectives.size(2, 4, 4096)
            os.posix_fallocate(file.fileno(), 0, size)
            ends = _shm.Collectives(file.fileno(), 0, 2, 4, 4096, size, 0, [0, 0])
            call = ends.barrier()
        else:
            size = _shm.Messages.size(2, 4096)
            os.posix_fallocate(file.fileno(), 0, size)
            ends = _shm.Messages(file.fileno(), 0, 2, 4096, size, 0, [0, 0])
            call = ends.recv(0, 0, 1, 0, None)
        assert not call.poll()
        sleepers = [threading.Thread(target=call.block, args=(30.0,)) for _ in range(3)]
        for sleeper in sleepers:
            sleeper.start()
        time.sleep(0.2)
        ends.close()
        for sleeper in sleepers:
            sleeper.join(5)
            assert not sleeper.is_alive()
        with pytest.raises(RuntimeError, match="before"):
            call.poll()


def test_peers_are_watched_from_several_threads():
    peers = Peers(mmap.mmap(-1, 2), [0, 1], 0, [os.getpid(), os.getppid()])
    errors = []

    def watch():
        try:
            for _ in range(20_000):
                assert peers.gone([0, 1]) is None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=watch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peers.close()
    assert not errors


def _killed():
    use({})
    if mcrdl.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(MCRDLError, match="rank 1 has ended before the call was done"):
        mcrdl.all_reduce(torch.ones(10), backend="shm")
    assert time.monotonic() - began < 2


def test_a_rank_that_is_killed_is_noticed_in_two_seconds():
    own = Ranks(3)
    try:
        with pytest.raises(AssertionError) as failure:
            own.run(_killed, timeout_s=20)
        assert len(str(failure.value).splitlines()) == 1, failure.value
        assert str(failure.value).startswith("rank 1: the process ended with status")
    finally:
        own.close()


def _ended_in_order():
    use({})
    tensor = torch.full((10,), float(mcrdl.get_rank()))
    if mcrdl.get_rank() == 1:
        mcrdl.gather(tensor, None, 0, backend="shm")
        current().close()
        return
    time.sleep(1)
    outputs = [torch.zeros(10), torch.zeros(10)]
    mcrdl.gather(tensor, outputs, 0, backend="shm")
    assert (outputs[1] == 1).all()


def test_what_a_rank_has_left_is_read_after_it_has_closed():
    own = Ranks(2)
    try:
        own.run(_ended_in_order, timeout_s=20)
    finally:
        own.close()


def test_less_is_taken_where_there_is_little_room():
    large, larger = 10**13, 10**14
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        assert allocate(file.fileno(), lambda choice: choice, [larger, large, 4096]) == 4096
        assert os.fstat(file.fileno()).st_size == 4096
        with pytest.raises(MCRDLError, match=rf"/dev/shm has \d+ bytes free, where {large} are needed: remount it"):
            allocate(file.fileno(), lambda choice: choice, [large])
    assert halves(65536, 10_000) == [65536, 32768, 16384, 10_000]


def test_without_the_extension_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed_mcrdl.backends._shm", None)
    monkeypatch.delattr("deepspeed_mcrdl.backends._shm", raising=False)
    assert "built without its C extension: it needs a C compiler" in ShmBackend.unusable()


def _comes_later():
    """The first rank makes its calls and then does something else; return how long the last rank's calls take."""
    face = use({})
    n, took = face.get_world_size(), []
    for count in (2**18, 2**19):  # 1 and 2 MB from each rank: more than the slots that stay in the caches
        block, gathered = torch.full((count,), float(face.get_rank())), torch.empty(n, count)
        face.barrier()
        if face.get_rank() == 0:
            work = mcrdl.all_gather_into_tensor(gathered, block, backend="shm", async_op=True)
            time.sleep(0.6)
            work.wait()
        else:
            time.sleep(0.1)
            began = time.monotonic()
            mcrdl.all_gather_into_tensor(gathered, block, backend="shm")
            took.append(time.monotonic() - began)
        assert (gathered == torch.arange(n)[:, None]).all()
    return max(took, default=0.0)


def test_a_rank_that_is_busy_elsewhere_has_put_all_before(ranks):
    assert max(ranks(2).run(_comes_later)) < 0.4


def _byte_by_byte(calls, seed):
    """Random calls on three overlapping groups, half of them asynchronous, every byte of every result checked."""
    face = use({})
    me, n = mcrdl.get_rank(), mcrdl.get_world_size()
    groups = [(None, list(range(n)))]
    for members in ([0, 1], list(range(1, n))):
        group = face.new_group(members)
        if me in members:
            groups.append((group, members))
    generators = [random.Random(f"{seed}/{members}") for _, members in groups]  # the same on all members
    for call in range(0, calls, 2):
        for (group, members), generator in zip(groups, generators, strict=True):
            size, k, place = int(2 ** generator.uniform(0, 14)), len(members), members.index(me)
            tensor = torch.full((size,), call % 50 + place, dtype=torch.int32)
            work = mcrdl.all_reduce(tensor, group=group, backend="shm", async_op=True)
            blocks = torch.arange(k * 8, dtype=torch.int32) + place * 1000
            output = torch.empty_like(blocks)
            mcrdl.all_to_all_single(output, blocks, group=group, backend="shm")
            work.wait()
            assert (tensor == k * (call % 50) + k * (k - 1) // 2).all()
            wanted = torch.cat([torch.arange(8, dtype=torch.int32) + place * 8 + p * 1000 for p in range(k)])
            assert torch.equal(output, wanted)
    for group, _ in groups[1:]:
        face.destroy_process_group(group)


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "calls"), [(2, 600_000), (4, 100_000)])
def test_a_million_calls_byte_by_byte(ranks, world_size, calls):
    ranks(world_size).run(_byte_by_byte, calls, world_size, timeout_s=800)


def test_some_calls_byte_by_byte(ranks):
    ranks(3).run(_byte_by_byte, 4000, 0)
