import torch

from deepspeed_mcrdl.observe.log import CommunicationLog
from tests.programs import use


def _counted():
    cdb = use({"default": "mpi", "all_reduce": [{"max_bytes": 100, "backend": "gloo"}, {"backend": "mpi"}]})
    log = CommunicationLog()
    cdb.runtime.observe(log)
    for size in (10, 10, 1000):
        cdb.all_reduce(torch.ones(size))
    cdb.all_to_all_single(torch.empty(8), torch.ones(8), [4, 4], [4, 4])
    cdb.all_reduce(torch.ones(1000), async_op=True).wait()
    cdb.runtime.ignore(log)
    cdb.all_reduce(torch.ones(10))
    return log.rows()


def test_calls_bytes_and_seconds_by_operation_and_backend(ranks):
    for rows in ranks(2).run(_counted):
        counts = {(row["operation"], row["backend"]): (row["calls"], row["bytes"]) for row in rows}
        assert counts == {
            ("all_reduce", "gloo"): (2, 80),
            ("all_reduce", "mpi"): (2, 8000),
            ("all_to_all_single", "mpi"): (1, 32),
        }
        assert all(row["seconds"] > 0 for row in rows)


def test_a_log_can_start_again():
    log = CommunicationLog()
    log.add("send", "mpi", 4, 0.5)
    log.add("send", "mpi", 0, 0.25, calls=0)
    assert log.rows() == [{"operation": "send", "backend": "mpi", "calls": 1, "bytes": 4, "seconds": 0.75}]
    log.reset()
    assert log.rows() == []
