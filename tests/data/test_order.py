import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos.data.order import BatchOrder, sample_seed, sample_uniforms

SIZES = {"count": st.integers(6, 60), "batch": st.integers(1, 7), "world": st.integers(1, 4), "seed": st.integers(0, 9)}


def test_every_sample_once_in_the_first_epoch():
    order = BatchOrder(10, 5, seed=3)
    assert sorted(torch.cat(list(order)).tolist()) == list(range(10))


def test_without_shuffle_the_order_is_the_stored_one():
    batches = list(BatchOrder(7, 3, shuffle=False, drop_last=False))
    assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]


def test_epochs_and_seeds_differ():
    order = BatchOrder(30, 30, seed=1)
    first = order.permutation()
    order.set_epoch(1)
    assert not torch.equal(first, order.permutation())
    order.set_epoch(0)
    assert torch.equal(first, order.permutation())
    assert not torch.equal(first, BatchOrder(30, 30, seed=2).permutation())


@settings(max_examples=60, deadline=None)
@given(**SIZES)
def test_ranks_deal_every_sample_once(count, batch, world, seed):
    ranks = [
        BatchOrder(count, batch, seed=seed, drop_last=False, rank=rank, world_size=world).batches()
        for rank in range(world)
    ]
    dealt = torch.cat([index for batches in ranks for index in batches])
    assert sorted(dealt.tolist()) == list(range(count))
    assert len({len(batches) for batches in ranks}) == 1, "ranks must deal equally many batches or DDP hangs"
    assert all(len(index) for batches in ranks for index in batches)


@settings(max_examples=60, deadline=None)
@given(**SIZES, epoch=st.integers(0, 3))
def test_ranks_together_deal_the_batches_of_one_process(count, batch, world, seed, epoch):
    if count < batch * world:
        with pytest.raises(ValueError, match="batch_size"):
            BatchOrder(count, batch, world_size=world)
        return
    one = BatchOrder(count, batch * world, seed=seed)
    many = [BatchOrder(count, batch, seed=seed, rank=rank, world_size=world) for rank in range(world)]
    for order in (one, *many):
        order.set_epoch(epoch)
    for number, whole in enumerate(one.batches()):
        assert torch.equal(whole, torch.cat([order.batches()[number] for order in many]))


@settings(max_examples=40, deadline=None)
@given(**SIZES, start=st.integers(0, 5))
def test_starting_late_leaves_out_the_first_batches(count, batch, world, seed, start):
    order = BatchOrder(count, batch, seed=seed, drop_last=False)
    expected = order.batches()[start:]
    assert [index.tolist() for index in order.batches(start)] == [index.tolist() for index in expected]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"count": 3, "batch_size": 4}, "lower batch_size"),
        ({"count": 3, "batch_size": 0}, "batch_size: expected 1 or more, got 0"),
        ({"count": 9, "batch_size": 2, "rank": 2, "world_size": 2}, "rank: expected 0 to 1"),
        ({"count": 1, "batch_size": 2, "world_size": 2, "drop_last": False}, "2 x 2 processes is more than the 1"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        BatchOrder(**arguments)


# -- random numbers of a sample ---------------------------------------------------------------------------------------


def test_numbers_belong_to_the_sample_not_to_the_batch():
    together = sample_uniforms(5, 2, torch.arange(40), 6)
    alone = torch.cat([sample_uniforms(5, 2, torch.tensor([i]), 6) for i in range(40)])
    assert torch.equal(together, alone)


def test_numbers_look_uniform_and_independent():
    numbers = sample_uniforms(0, 0, torch.arange(20000), 4).double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert torch.allclose(numbers.mean(0), torch.full((4,), 0.5, dtype=torch.double), atol=0.01)
    assert torch.allclose(numbers.var(0), torch.full((4,), 1 / 12, dtype=torch.double), atol=0.003)
    correlation = torch.corrcoef(numbers.T)
    assert (correlation - torch.eye(4, dtype=torch.double)).abs().max() < 0.03
    neighbours = torch.corrcoef(torch.stack([numbers[:-1, 0], numbers[1:, 0]]))
    assert neighbours[0, 1].abs() < 0.03


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}])
def test_numbers_change_with_seed_and_epoch(change):
    index = torch.arange(500)
    base = sample_uniforms(0, 0, index, 2)
    other = sample_uniforms(change.get("seed", 0), change.get("epoch", 0), index, 2)
    assert (base == other).float().mean() < 0.01


def test_sample_seed_fits_a_torch_generator():
    seeds = {sample_seed(seed, epoch, index) for seed in range(4) for epoch in range(4) for index in range(50)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))
