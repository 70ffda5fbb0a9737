import socket

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.bench.wire import least_bytes, sent_bytes
from deepspeed_mcrdl.groups import Mesh


def test_what_goes_over_loopback_is_not_sent_to_others():
    before = sent_bytes()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(bytes(2**20))
            received = 0
            while received < 2**20:
                received += len(accepted.recv(2**20))
    assert 0 <= sent_bytes() - before < 2**20


def test_the_least_that_a_host_must_send():
    mesh = Mesh(nodes=2, ranks_per_node=4, stride=1)
    assert least_bytes(ops.ALL_REDUCE, mesh, 1000) == 1000  # half of the sums out, half of the data
    assert least_bytes(ops.ALL_GATHER_INTO_TENSOR, mesh, 1000) == 500
    assert least_bytes(ops.REDUCE_SCATTER_TENSOR, mesh, 1000) == 500
    assert least_bytes(ops.BROADCAST, mesh, 1000) == 1000
    assert least_bytes(ops.ALL_TO_ALL_SINGLE, mesh, 1000) == 2000  # four ranks, half of each one's data
