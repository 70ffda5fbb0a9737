"""DLRM: its samples, its exchange of vectors, and that more ranks train the same model."""

import math

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F

from deepspeed_mcrdl.bench.workloads import dlrm
from deepspeed_mcrdl.bench.workloads.clicks import Clicks
from deepspeed_mcrdl.bench.workloads.dlrm import DLRM, EmbeddingTables, Preset, all_to_all

FIVE_TABLES = Preset(tables=5, rows=20, dim=4, hots=3, dense=6, bottom=(8,), top=(8,))
BATCH = 12  # of all ranks
STEPS = 2
LR = 0.5


def clicks(alpha=1.05, seed=1, rows=1000, preset=FIVE_TABLES):
    return Clicks(tables=preset.tables, rows=rows, hots=preset.hots, dense=preset.dense, alpha=alpha, seed=seed)


def test_samples_depend_on_the_seed_alone():
    first, again, other = clicks(), clicks(), clicks(seed=2)
    for _ in range(2):
        batch = first.batch(8)
        assert [t.shape for t in batch] == [(8, 6), (5, 8, 3), (8,)]
        assert [t.dtype for t in batch] == [torch.float32, torch.int64, torch.float32]
        assert all(map(torch.equal, batch, again.batch(8)))
        assert not any(map(torch.equal, batch, other.batch(8)))


@pytest.mark.parametrize("alpha", [0, 1.05, 2])
def test_rows_are_as_skewed_as_alpha_says(alpha):
    _, sparse, _ = clicks(alpha, rows=100).batch(20_000)
    counts = torch.bincount(sparse.flatten(), minlength=100)
    assert len(counts) == 100
    wanted = torch.arange(1, 101).pow(-float(alpha))
    assert counts / counts.sum() == pytest.approx(wanted / wanted.sum(), abs=0.003)


def test_labels_are_balanced_and_follow_the_features():
    stream = clicks()
    dense, sparse, labels = stream.batch(20_000)
    assert labels.mean().item() == pytest.approx(0.5, abs=0.1)
    of_dense = dense @ stream._dense_weights
    of_rows = sum(weights[rows].sum(dim=1) for weights, rows in zip(stream._row_weights, sparse, strict=True))
    both, dense_alone = (F.binary_cross_entropy_with_logits(x, labels).item() for x in (of_dense + of_rows, of_dense))
    assert both < dense_alone - 0.1
    assert dense_alone < math.log(2)


def exchange(tables):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = [len(range(owner, tables, ranks)) for owner in range(ranks)]
    sent, received = [10 * counts[rank]] * ranks, [10 * count for count in counts]
    x = torch.arange(float(sum(sent))) + 1000 * rank
    y = all_to_all(x, sent, received)
    for source, part in enumerate(y.split(received)):
        start = 1000 * source + rank * received[source]
        assert part.tolist() == list(range(start, start + received[source]))
    assert torch.equal(all_to_all(y, received, sent), x)


@pytest.mark.parametrize(("world_size", "tables"), [(2, 4), (2, 5), (3, 5)])
def test_the_reverse_exchange_takes_everything_back(ranks, world_size, tables):
    ranks(world_size).run(exchange, tables)


def train_on_ranks():
    """Return this rank's tables by number, its MLPs' parameters and its losses."""
    torch.manual_seed(0)
    model = DLRM(FIVE_TABLES)
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0,  # else the MLPs' gradients are clipped, at 1
        "comm_backend": "mcrdl",
        "mcrdl": {"banner": False},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tables = EmbeddingTables(FIVE_TABLES, seed=1)
    optimizer = torch.optim.SGD(tables.parameters(), lr=LR)
    stream, losses = clicks(rows=FIVE_TABLES.rows), []
    for _ in range(STEPS):
        dense, sparse, labels = dlrm.share(stream.batch(BATCH), tables, engine.device)
        loss = engine(dense, tables(sparse), labels)
        engine.backward(loss)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.destroy()
    weights = [bag.weight.detach() for bag in tables.bags]
    return dict(zip(tables.owned, weights, strict=True)), [p.detach() for p in model.parameters()], losses


def train_in_one_process():
    """Return the same of plain torch: all tables, no engine, no exchange, the mean over the global batch."""
    torch.manual_seed(0)
    model = DLRM(FIVE_TABLES)
    bags = [EmbeddingTables.bag(FIVE_TABLES, seed=1 + table) for table in range(FIVE_TABLES.tables)]
    tables = [bag.weight for bag in bags]
    optimizer = torch.optim.SGD([*model.parameters(), *tables], lr=LR)
    stream, losses = clicks(rows=FIVE_TABLES.rows), []
    for _ in range(STEPS):
        dense, sparse, labels = stream.batch(BATCH)
        embedded = torch.stack([bag(rows) for bag, rows in zip(bags, sparse, strict=True)], dim=1)
        loss = model(dense, embedded, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tables, list(model.parameters()), losses


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_ranks_train_the_same_model(ranks, world_size):
    tables, mlps, losses = train_in_one_process()
    results = ranks(world_size).run(train_on_ranks)
    trained = {}
    for owned, mlps_of_rank, _ in results:
        trained |= owned
        torch.testing.assert_close(mlps_of_rank, mlps)
    torch.testing.assert_close([trained[table] for table in range(FIVE_TABLES.tables)], tables)
    means = [sum(of_step) / world_size for of_step in zip(*(of_rank for *_, of_rank in results), strict=True)]
    assert means == pytest.approx(losses)


def test_more_ranks_than_tables_is_a_sentence(monkeypatch):
    monkeypatch.setattr(dlrm.dist, "get_world_size", lambda: 6)
    with pytest.raises(SystemExit, match="6 ranks can't share 5 tables: each needs one"):
        EmbeddingTables(FIVE_TABLES, seed=1)
