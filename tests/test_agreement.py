from deepspeed.comm import comm

from deepspeed_mcrdl import agreement
from deepspeed_mcrdl.backends.c10d import GlooBackend
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import MCRDLError
from tests.backends import BACKENDS


class Brittle(GlooBackend):
    """Fails to start on one rank."""

    name = "brittle"
    preference = 1

    def __init__(self, job):
        super().__init__(job)
        if job.rank == 1:
            raise OSError("no such luck")


class Absent(GlooBackend):
    """Can't be used on one rank."""

    name = "absent"
    preference = 2

    @classmethod
    def unusable(cls):
        return "no such library" if comm.cdb.get_rank() == 0 else None


class Other(GlooBackend):
    """Another version on each rank."""

    name = "other"
    preference = 3

    @classmethod
    def version(cls):
        return f"other {comm.cdb.get_rank()}"


def _start_with_strange_backends(config):
    known = agreement.installed
    agreement.installed = lambda: {"brittle": Brittle, "absent": Absent, "other": Other, **known()}
    try:
        comm.cdb.restart(parse(config))
        return list(comm.cdb.runtime.backends), comm.cdb.runtime.left_out
    except MCRDLError as error:
        return str(error)
    finally:
        agreement.installed = known
        comm.cdb.restart(parse({"banner": False}))


def test_a_backend_that_fails_on_one_rank_is_dropped_on_all(ranks):
    first, *others = ranks(3).run(_start_with_strange_backends, {"banner": False})
    backends, left_out = first
    assert backends == list(BACKENDS), left_out.get("mpi")
    assert left_out["brittle"] == "failed to start on rank 1: OSError: no such luck"
    assert left_out["absent"] == "no such library (rank 0)"
    assert left_out["other"] == "its versions differ: other 0 on rank 0, other 1 on rank 1, other 2 on rank 2"
    assert all(other == first for other in others)


def test_a_backend_that_is_asked_for_and_unusable_is_an_error_on_all(ranks):
    errors = ranks(2).run(_start_with_strange_backends, {"backends": ["absent", "gloo"]})
    assert len(set(errors)) == 1
    assert 'asks for the backend "absent", which can\'t be used: no such library (rank 0)' in errors[0]


def test_nothing_left_is_an_error_on_all(ranks):
    errors = ranks(2).run(_start_with_strange_backends, {"backends": ["brittle"]})
    assert len(set(errors)) == 1
    assert "no backend could be started: brittle: failed to start on rank 1" in errors[0]


def _start_with_own_config():
    rank = comm.cdb.get_rank()
    try:
        comm.cdb.restart(parse({"routing": {"all_reduce": "gloo" if rank else "mpi"}, "banner": False}))
    except MCRDLError as error:
        return str(error)
    finally:
        comm.cdb.restart(parse({"banner": False}))


def test_different_configs_are_shown_on_every_rank(ranks):
    # sgl-project PR 35343, flashinfer 3186: ranks that choose alone deadlock
    errors = ranks(2).run(_start_with_own_config)
    assert len(set(errors)) == 1
    assert '"mcrdl.routing" is {' in errors[0]
    assert "on rank 0 but {" in errors[0]
    assert "Give every rank the same ds_config.json" in errors[0]
