"""Vision-language training: the loss of answers, what learns at which stage, and a whole run from tower to table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmpos.config import compose
from mmpos.data import create_data
from mmpos.data.vlm import IGNORED, Places
from mmpos.evaluation.answers import greedy_answers, overlaps, right_answers
from mmpos.evaluation.results import read_results
from mmpos.evaluation.weights import model_state, read_checkpoint
from mmpos.models.vlm import create_vlm
from mmpos.training.build import check_config
from mmpos.training.stages import train_stages
from mmpos.training.vlm import answer_loss
from tests.data.boxed_files import write_bccd, write_nlvr

pytest.importorskip("transformers")
pytest.importorskip("mlxtend")
pytest.importorskip("matplotlib")

TINY = [
    "recipe=vlm_grounding",
    "data.images=[[3,4]]",
    "data.several=[[2,2,3]]",
    "data.videos=[[2,3,2]]",
    "data.train_count=8",
    "data.batch_size=4",
    "data.val_count=2",
    "trainer.max_epochs=1",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "logger=csv",
    "callbacks.progress=false",
    "++model.options.tower.depth=1",
    "++model.options.tower.embed_dim=24",
    "++model.options.tower.num_heads=2",
    "++model.options.decoder={num_hidden_layers: 1, hidden_size: 32, intermediate_size: 32}",
    "stages.tower.model.options.tower.depth=1",
    "+stages.tower.model.options.tower.embed_dim=24",
    "+stages.tower.model.options.tower.num_heads=2",
    "stages.tower.data.batch_size=4",
    "stages.projector.data.batch_size=4",
    "stages.tower.trainer.max_epochs=1",
    "stages.projector.trainer.max_epochs=1",
    "evaluation.images=[[3,4],[4,5]]",
    "evaluation.several=[]",
    "evaluation.videos=[[2,3,2],[3,3,2]]",
    "evaluation.count=3",
]


def test_loss_of_answers() -> None:
    torch.manual_seed(0)
    places = Places(first=4, count=6, step=2.0)
    logits = torch.randn(2, 5, 12, dtype=torch.float64)
    labels = torch.full((2, 5), IGNORED)
    labels[0, 2], labels[1, 4], labels[1, 1] = 3, 6, 9
    found = answer_loss(logits, labels)
    picked = torch.stack([logits[0, 1], logits[1, 0], logits[1, 3]])
    wanted = torch.nn.functional.cross_entropy(picked, torch.tensor([3, 9, 6]))
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(answer_loss(logits, labels, places, 0.0), found)
    # the target of a place is a Gaussian over the places, of every other word the word itself
    spread = torch.softmax(-0.5 * ((torch.arange(6) - 2.0) / 1.5) ** 2, -1)
    sure = torch.full((1, 2, 12), -60.0)
    sure[0, 0, 4:10] = spread.log()
    assert answer_loss(sure, torch.tensor([[IGNORED, 6]]), places, 1.5).abs() < 1e-5
    assert answer_loss(sure, torch.tensor([[IGNORED, 7]]), places, 1.5) > 0.1


def test_right_and_wrong_answers_are_counted_as_they_should() -> None:
    data = create_data("mnist_grounding")
    batch = data.questions("val", data.shapes[0], range(4))
    assert bool(right_answers(batch, batch.tokens).all())  # boxes in steps of two pixels still overlap by half
    for number, question in enumerate(batch.questions):
        wrong = batch.tokens.clone()
        wrong[:, question.answer] = data.vocabulary.index["frame"]
        right = right_answers(batch, wrong)
        assert not bool(right[:, number].any()) or question.kind == "where"
        assert bool(right.sum() == right.numel() - int((~right[:, number]).sum()))
    found = overlaps(batch, batch.tokens, 0)
    assert found is not None
    assert bool((found > 0.5).all())
    assert overlaps(batch, batch.tokens, 5) is None
    far = batch.tokens.clone()
    first = batch.questions[0].answer
    far[:, first : first + 4] = data.places(data.shapes[0]).first + torch.tensor([40, 40, 48, 48])
    assert not bool(right_answers(batch, far)[:, 0].any())


def test_all_answers_at_once_are_the_answers_one_by_one() -> None:
    torch.manual_seed(0)
    data = create_data("mnist_grounding")
    batch = data.questions("val", data.shapes[8], range(2))
    words = data.vocabulary
    model = create_vlm(vocabulary=len(words), image_token=words.IMAGE, tower={"depth": 1}).eval()
    # untrained, tied embeddings would repeat the last word of each question whatever stands before it
    readout = torch.randn(len(words), model.decoder.embedding.embedding_dim)
    model.logits = lambda hidden: hidden @ readout.T  # type: ignore[method-assign]
    together = greedy_answers(model, batch)
    prefix = int((batch.branch == 0).sum())
    for question in batch.questions:
        prompt = torch.cat([batch.tokens[:, :prefix], batch.tokens[:, question.first : question.answer]], 1)
        asked = question.answer - question.first
        blocks = [segment for segment in batch.segments if not getattr(segment, "shared", False)]
        segments = [[*blocks, type(batch.segments[0])(asked)]]
        alone = model.generate(prompt, batch.pixels, segments, max_new_tokens=question.length + 1)
        assert torch.equal(alone, together[:, question.answer : question.answer + question.length + 1])


def test_three_stages_end_with_a_table_and_leave_the_tower_alone(tmp_path: Path) -> None:
    config = compose(TINY)
    train_stages(config, tmp_path)
    states = {
        name: model_state(read_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt"))
        for name in ("tower", "projector", "whole")
    }
    of = lambda stage, part: {n: v for n, v in states[stage].items() if n.startswith(part)}  # noqa: E731
    for part, value in of("tower", "tower.").items():
        assert torch.equal(states["projector"][part], value)
        assert torch.equal(states["whole"][part], value)
    same = [
        torch.equal(states["whole"][name], value) for name, value in of("projector", "decoder.model.layers").items()
    ]
    assert same and not any(same[:4])  # noqa: PT018  the decoder learns in the last stage
    rows = read_results(tmp_path / "results.csv")
    forms = {row.coordinates for row in rows}
    assert forms == {
        "image 24 x 32",
        "image 32 x 40",
        "video 2 of 24 x 16",
        "video 3 of 24 x 16",
        "trained",
        "beyond",
    }
    assert {row.encoding for row in rows} == {"mrope_interleave"}
    page = (tmp_path / "whole" / "report.md").read_text()
    assert "image 32 x 40" in page
    assert (tmp_path / "whole" / "vlm.png").stat().st_size > 10_000


SMALL = [
    entry for entry in TINY if not entry.startswith(("recipe", "data.images", "data.several", "data.videos", "eval"))
]


@pytest.mark.parametrize(
    ("name", "write", "forms"),
    [
        ("nlvr", write_nlvr, ["data.several=[[3,4,4]]", "evaluation.several=[[3,4,4],[3,5,5]]"]),
        ("bccd", write_bccd, ["data.images=[[5,8],[8,5]]", "evaluation.images=[[5,8],[10,12]]"]),
    ],
)
def test_pictures_with_boxes_train_in_three_stages_too(
    tmp_path: Path, name: str, write: Callable[[Path], None], forms: list[str]
) -> None:
    pytest.importorskip("PIL.Image")
    (tmp_path / "files").mkdir()
    write(tmp_path / "files")
    options = [f"recipe=vlm_{name}", f"data.root={tmp_path / 'files'}", *SMALL, *forms, "evaluation.count=3"]
    train_stages(
        compose([*options, "++stages.tower.data.train_count=8", "++stages.projector.data.train_count=8"]), tmp_path
    )
    rows = read_results(tmp_path / "results.csv")
    assert len({row.coordinates for row in rows} - {"trained", "beyond"}) == 2
    kinds = {"nlvr": {"sentence", "where", "count", "which"}, "bccd": {"where", "what", "count"}}[name]
    assert {f"{kind}_accuracy" for kind in kinds} <= {row.metric for row in rows}
    for form in {row.coordinates for row in rows} - {"trained", "beyond"} if name == "bccd" else ():
        of_form = {row.metric: row for row in rows if row.coordinates == form}
        whole = of_form["where_accuracy"]
        parts = [row for metric, row in of_form.items() if metric.startswith("where_") and metric.count("_") == 2]
        assert len(parts) >= 2
        assert sum(row.n or 0 for row in parts) == whole.n == 12
        assert abs(sum(row.value * (row.n or 0) for row in parts) - 12 * whole.value) < 1e-6
    tested = {row.n for row in rows if row.metric == "rows_per_second"}
    assert tested == {3}
    assert (tmp_path / "whole" / "vlm.png").stat().st_size > 10_000


def test_names_are_learned_without_the_decoder() -> None:
    from mmpos.training.vlm import NameModule

    data = create_data("mnist_grounding", dense=True)
    batch, words = data.cells("train", data.shapes[0], range(3)), data.vocabulary
    model = create_vlm(vocabulary=len(words), image_token=words.IMAGE, tower={"depth": 1}, visual_encoding="sincos")
    optimizer = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0}
    module = NameModule(model, words=data.object_words, optimizer=optimizer, seed=0, config={})
    module.loss(batch)[0].backward()
    learns = {name for name, value in model.named_parameters() if value.grad is not None and value.grad.abs().max() > 0}
    assert not {name for name in learns if name.startswith(("decoder.model.layers", "decoder.model.norm"))}
    assert "decoder.model.embed_tokens.weight" in learns
    assert any(name.startswith("projector.") for name in learns)
    # each cell is to name what lies in it
    named = torch.tensor(data.object_words)[batch.labels]
    shown = torch.nn.functional.one_hot(named, len(words)).float() * 50
    model.logits = lambda hidden: shown  # type: ignore[method-assign]
    loss, right = module.loss(batch)
    assert float(loss) < 1e-6
    assert bool(right.all())


def test_models_data_and_objectives_have_to_fit(tmp_path: Path) -> None:
    from mmpos.training.run import train

    base = [entry for entry in TINY if not entry.startswith("stages")]
    for changes, message in (
        (["objective.name=dense"], "data.dense=true"),
        (["data.dense=true"], "data.dense=false"),
        (["objective.name=names"], "names needs model=vlm_micro"),
        (["+objective.options.sigma=1"], "answers has no option sigma"),
        (["+objective.options.place_sigma=-1"], "place_sigma and name_weight of 0 or more"),
        (["model=vit_micro"], "model.name: mnist_grounding asks questions, which 'vit_micro' cannot answer"),
    ):
        options = [entry for entry in base if changes != ["model=vit_micro"] or "model.options" not in entry]
        config = {**compose([*options, *changes]), "stages": {}}
        with pytest.raises(ValueError, match=message):
            train(config, tmp_path / "x")
    check_config({**compose(base), "stages": {}})


def test_a_missing_package_is_named_before_anything_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"mmpos\[vlm\]"):
        train_stages(compose(TINY), tmp_path)
    assert not list(tmp_path.rglob("*.ckpt"))
