from datetime import timedelta

import pytest

from deepspeed_mcrdl.work import AllOf, FinishedBy, Work


class Manual(Work):
    """Done when told so."""

    def __init__(self):
        self.done, self.error = False, None

    def wait(self, timeout=None):
        if timeout is not None and not self.done:
            raise TimeoutError
        self.done = True
        if self.error:
            raise self.error
        return True

    def is_completed(self):
        return self.done

    def exception(self):
        return self.error


def test_the_last_step_runs_once_however_the_end_is_seen():
    steps = []
    inner = Manual()
    work = FinishedBy(inner, lambda: steps.append(1))
    assert not work.is_completed()
    assert not steps
    inner.done = True
    assert work.is_completed()
    assert work.is_success()
    work.wait()
    assert steps == [1]


def test_the_last_step_is_left_out_after_an_error():
    steps = []
    inner = Manual()
    inner.error = RuntimeError("lost")
    work = FinishedBy(inner, lambda: steps.append(1))
    with pytest.raises(RuntimeError, match="lost"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert not steps


def test_several_are_done_when_all_are():
    first, second = Manual(), Manual()
    work = AllOf([first, second])
    first.done = True
    assert not work.is_completed()
    with pytest.raises(TimeoutError):
        work.wait(timedelta(seconds=1))
    second.done = True
    assert work.is_completed()
    assert work.wait()


def test_a_future_is_completed_by_the_wait():
    work = Manual()
    assert work.get_future().wait() is None
    failing = Manual()
    failing.error = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        failing.get_future().wait()
