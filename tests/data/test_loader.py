import warnings

import pytest
import torch

from mmpos.data import create_data


def labels_and_sums(loader):
    return [(labels.tolist(), images.sum().item()) for images, labels in loader]


def data(**options):
    return create_data("fake", **{"image_size": 8, "train_count": 40, "test_count": 20, "batch_size": 8, **options})


def test_iterating_twice_gives_the_whole_epoch_twice():
    loader = data().train_dataloader()
    assert labels_and_sums(loader) == labels_and_sums(loader)
    assert len(loader) == 5 == len(labels_and_sums(loader))


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(stop):
    loader = data().train_dataloader()
    loader.sampler.set_epoch(3)
    expected = labels_and_sums(loader)
    iterator = iter(loader)
    for _ in range(stop):
        next(iterator)
    state = loader.state_dict()
    resumed = data().train_dataloader()
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(3)
    assert labels_and_sums(resumed) == expected[stop:]
    resumed.sampler.set_epoch(4)
    assert len(labels_and_sums(resumed)) == 5


def test_a_state_of_other_data_is_refused():
    state = data().train_dataloader().state_dict()
    with pytest.raises(ValueError, match="count 40, this one has 48"):
        data(train_count=48).train_dataloader().load_state_dict(state)
    with pytest.raises(ValueError, match="global_batch 8, this one has 4"):
        data(batch_size=4).train_dataloader().load_state_dict(state)


def test_two_ranks_deal_the_batches_of_one_process(monkeypatch):
    one = data(batch_size=8).train_dataloader()
    ranks = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        half = data(batch_size=4)
        ranks.append(list(half.train_dataloader()))
        with half.whole():
            assert sum(len(labels) for _, labels in half.test_dataloader()) == 20
        assert sum(len(labels) for _, labels in half.test_dataloader()) == 10
    for (images, labels), first, second in zip(one, *ranks, strict=True):
        assert torch.equal(torch.cat([first[1], second[1]]), labels)
        assert torch.equal(torch.cat([first[0], second[0]]), images)


def test_lightning_resumes_after_every_step(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 4)
            self.seen = []

        def training_step(self, batch, number):
            self.seen.append((self.current_epoch, number, batch[0].sum().item()))
            return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(checkpoint=None, save=False):
        torch.manual_seed(0)
        model = Model()
        callback = pl.callbacks.ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pl.Trainer(
                max_epochs=2,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=save,
                callbacks=[callback] if save else None,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(model, datamodule=data(train_count=24), ckpt_path=checkpoint, weights_only=True)
        return model

    whole = fit(save=True)
    assert len(whole.seen) == 6
    for step in (1, 3, 4):  # in the first epoch, at its end, in the second
        resumed = fit(str(tmp_path / f"{step}.ckpt"))
        assert resumed.seen == whole.seen[step:]
        assert torch.equal(resumed.layer.weight, whole.layer.weight)
