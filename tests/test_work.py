import time
from datetime import timedelta

import pytest

from deepspeed_mcrdl.errors import CallFailedError, CallTimeoutError
from deepspeed_mcrdl.groups import Group, Mesh
from deepspeed_mcrdl.observe.log import Wrapped
from deepspeed_mcrdl.operations import ALL_REDUCE
from deepspeed_mcrdl.safety import Call, Progress
from deepspeed_mcrdl.work import AllOf, Pending, Then, Together, Work


class Manual(Pending):
    """Done when told so."""

    def __init__(self, done=False, error=None):
        self.done, self.error = done, error
        self.polls = 0

    def poll(self):
        self.polls += 1
        if self.error:
            raise self.error
        return self.done


class Issued(Manual):
    """One whose results are in order with streams."""

    stream_ordered = True

    def __init__(self, done=False, error=None):
        super().__init__(done, error)
        self.orders = 0

    def order(self):
        self.orders += 1


CALL = Call(ALL_REDUCE, Group([0, 1], 0, "world", 0, Mesh(1, 2, 1), None), "mpi", 7)


def work_of(pending):
    return Work(pending, CALL, Progress(timeout_s=10))


def test_the_last_step_runs_once_however_the_end_is_seen():
    steps = []
    inner = Manual()
    work = work_of(Then(inner, lambda: steps.append(1)))
    assert not work.is_completed()
    assert not steps
    inner.done = True
    assert work.is_completed()
    assert work.is_success()
    work.wait()
    assert steps == [1]


def test_the_last_step_is_left_out_after_an_error_which_names_the_call():
    steps = []
    work = work_of(Then(Manual(error=RuntimeError("lost")), lambda: steps.append(1)))
    for _ in range(2):
        with pytest.raises(CallFailedError, match=r"all_reduce #7 on group 'world' \(ranks 0, 1\) by mpi failed: lost"):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception().__cause__, RuntimeError)
    assert not steps


def test_a_done_operation_is_polled_no_more():
    inner = Manual(done=True)
    work = work_of(inner)
    work.wait()
    work.wait()
    assert work.is_completed()
    assert inner.polls == 1


def test_several_are_done_when_all_are():
    first, second = Manual(done=True), Manual()
    work = AllOf([work_of(first), work_of(second)])
    assert not work.is_completed()
    with pytest.raises(CallTimeoutError, match="was not done after"):
        work.wait(timedelta(milliseconds=50))
    second.done = True
    assert work.is_completed()
    assert work.wait()


def test_the_parts_of_one_operation_are_polled_until_each_is_done():
    parts = [Manual(done=True), Manual()]
    together = Together(parts)
    assert not together.poll()
    parts[1].done = True
    assert together.poll()
    assert parts[0].polls == 1


def test_parts_in_order_with_streams_and_parts_of_the_host_are_one():
    parts = [Issued(), Manual()]
    together = Together(parts)
    assert not together.orderable()
    parts[1].done = True
    assert together.orderable()
    together.order()
    assert parts[0].orders == 1
    assert not together.poll()
    parts[0].done = True
    assert together.poll()


def test_a_future_is_completed_by_the_wait():
    assert work_of(Manual(done=True)).get_future().wait() is None
    with pytest.raises(RuntimeError, match="lost"):
        work_of(Manual(error=RuntimeError("lost"))).get_future().wait()


def test_a_future_waits_until_what_streams_are_in_order_with_has_happened():
    inner = Issued()
    work = work_of(inner)
    future = work.get_future()
    while inner.polls < 3:
        time.sleep(0.001)
    assert not future.done()
    inner.done = True
    assert future.wait() is None
    assert not inner.orders, "the thread that waits puts no stream in order with it, which others may use"


def test_a_wrapped_operation_that_is_done_is_polled_no_more():
    inner = Manual(done=True)
    wrapped = Wrapped(work_of(inner))
    assert wrapped.advance()
    assert wrapped.advance()
    assert wrapped._work.is_completed()
    assert inner.polls == 1


def test_a_timeout_is_both_an_error_of_ours_and_a_timeout_error():
    with pytest.raises(TimeoutError):
        work_of(Manual()).wait(timedelta(milliseconds=10))
    with pytest.raises(RuntimeError):
        work_of(Manual()).wait(timedelta(milliseconds=10))
