import csv
import re

import numpy as np
import pytest
import torch

from mmpos.data import create_data
from mmpos.encodings import PositionEncoding
from mmpos.evaluation import evaluate_checkpoint, resolution_rule, run_resolution, wilson_interval
from mmpos.evaluation.resolution import patch_size, usable_size

pytest.importorskip("timm")
pytest.importorskip("matplotlib")

SIZES = [16, 24, 26]  # 26 px is not a multiple of the patch of 8


@pytest.fixture(scope="module")
def data():
    return create_data("fake", image_size=16, test_count=40, eval_batch_size=16)


def build(encoding="rope_axial", **options):
    from mmpos.models import create_vit

    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 8, "in_chans": 1, "num_classes": 4}
    return create_vit(encoding=encoding, encoding_options=options, embed_dim=24, depth=2, num_heads=2, **sizes)


def evaluate(model, data, folder, sizes=SIZES, **options):
    return run_resolution(
        model, data, sizes, output_dir=folder, progress=False, **{"encoding_name": "rope_axial", **options}
    )


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.csv").write_text("step,epoch,train/loss,val/accuracy\n1,0,1.4,\n5,0,,0.5\n9,1,1.1,0.75\n")
    (folder / "config.yaml").write_text("seed: 3\noptimizer: {lr: 0.001}\n")
    evaluation = evaluate(build(), data, folder, rules=["index", "rescaled"], command="python train.py recipe=x")
    return folder, evaluation


def correct(model, data, size, cut, rule):
    """The number the evaluation must find, counted the plain way."""
    model.eval()
    total = 0
    with torch.no_grad(), resolution_rule(model.position_encoding, rule):
        for images, labels in data.test_loader(size)[0]:
            total += int((model(images[..., :cut, :cut]).argmax(1) == labels).sum())
    return total


def test_accuracy_of_every_size_and_rule(data, finished):
    _, evaluation = finished
    model = build()
    for size, cut in ((16, 16), (24, 24), (26, 24)):
        for rule in ("index", "rescaled"):
            row = evaluation.accuracy(size, rule)
            expected = correct(model, data, size, cut, rule)
            assert (row.value, row.n) == (pytest.approx(expected / 40), 40)
            assert (row.ci_low, row.ci_high) == pytest.approx(wilson_interval(expected, 40))


def test_table(finished):
    folder, _ = finished
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["encoding", "size", "coordinates", "metric", "value", "ci_low", "ci_high", "n"]
    got = {(int(r["size"]), r["coordinates"], r["metric"]) for r in rows}
    expected = {(s, c, m) for s in SIZES for c in ("index", "rescaled") for m in ("accuracy", "images_per_second")}
    assert got == expected | {(16, "index", "encoding_parameters"), (16, "index", "time_over_none")}
    for row in rows:
        if row["metric"] != "accuracy":
            assert (row["ci_low"], row["ci_high"]) == ("", "")
        if row["metric"] == "images_per_second":
            assert float(row["value"]) > 0


def test_report_is_complete_and_self_contained(finished):
    folder, _ = finished
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "results.csv",
        "report.md",
        "report.html",
        "resolution.png",
        "encoding.png",
        "confusion.png",
        "training.png",
    }
    page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:)", page), "the page loads something from outside"
    assert "@import" not in page
    assert "url(" not in page
    for name in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text):
        assert (folder / name).is_file()
    assert page.count("data:image/png;base64,") == len(re.findall(r"!\[", text)) >= 5
    for part in (page, text):
        assert "RoPE-Axial" in part
        assert "python train.py recipe=x" in part
        assert "optimizer.lr" in part
        assert "At 26 px the model sees 24 x 24" in part
        assert "enlarged from the stored size" in part
        assert "Images of 16 px are real pixels" in part


def test_report_shows_the_numbers_of_the_table(finished):
    folder, evaluation = finished
    text = (folder / "report.md").read_text()
    row = evaluation.accuracy(24, "rescaled")
    assert f"{100 * row.value:.1f} % [{100 * row.ci_low:.1f}, {100 * row.ci_high:.1f}]" in text


def test_predictions_are_those_of_the_training_size(data, finished):
    folder, evaluation = finished
    with np.load(folder / "predictions.npz", allow_pickle=False) as file:
        right = int((file["labels"] == file["predictions"]).sum())
        index, images = file["example_index"], file["example_images"]
        wrong = np.flatnonzero(file["labels"] != file["predictions"])
        confidence = file["confidence"]
    assert right == round(40 * evaluation.accuracy(16, "index").value)
    assert set(index) <= set(wrong)
    assert confidence[index].tolist() == sorted(confidence[wrong].tolist(), reverse=True)[: len(index)]
    assert np.array_equal(images, data.splits["test"][0][index].numpy())


def test_a_restart_measures_only_what_is_missing(data, finished, monkeypatch):
    folder, before = finished
    model, calls = build(), []
    original = model.forward

    def count(x):
        calls.append(tuple(x.shape[-2:]))
        return original(x)

    monkeypatch.setattr(model, "forward", count)
    after = evaluate(model, data, folder, rules=["index", "rescaled"])
    assert calls == []
    assert [row.key for row in after.rows] == [row.key for row in before.rows]
    assert [row.value for row in after.rows] == pytest.approx([row.value for row in before.rows], rel=1e-5)
    evaluate(model, data, folder, sizes=[16, 32], rules=["index", "rescaled"])
    assert set(calls) == {(32, 32)}


def test_other_weights_start_anew(data, tmp_path):
    model = build()
    evaluate(model, data, tmp_path, sizes=[16], rules=["index"], overhead=False)
    first = (tmp_path / "evaluation.json").read_text()
    (tmp_path / "results.csv").write_text((tmp_path / "results.csv").read_text().replace("accuracy", "stale"))
    with torch.no_grad():
        model.head.bias[2] += 100  # every answer is class 2 now
    evaluation = evaluate(model, data, tmp_path, sizes=[16], rules=["index"], overhead=False)
    assert (tmp_path / "evaluation.json").read_text() != first
    assert "stale" not in (tmp_path / "results.csv").read_text()
    labels = data.splits["test"][1]
    assert evaluation.accuracy(16, "index").value == pytest.approx(float((labels == 2).float().mean()))


def test_the_model_is_left_as_it_was(data, tmp_path):
    model = build("rope_mixed").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(model, data, tmp_path, sizes=[16, 24], encoding_name="rope_mixed")
    assert model.training
    assert {m.resolution for m in model.modules() if isinstance(m, PositionEncoding)} == {"index"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_rule_is_restored_after_an_error():
    stack = build().position_encoding
    stack.set_resolution("ntk")

    def fail():
        with resolution_rule(stack, "rescaled"):
            assert {m.resolution for m in stack.modules() if isinstance(m, PositionEncoding)} == {"rescaled"}
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert {m.resolution for m in stack.modules() if isinstance(m, PositionEncoding)} == {"ntk"}


def test_default_rules_and_sizes(data, tmp_path):
    evaluation = run_resolution(build("none"), data, encoding_name="none", output_dir=tmp_path, progress=False)
    assert evaluation.sizes == [16, 24, 32]
    assert evaluation.rules == ["index"]
    known = evaluate(build(), data, tmp_path / "axial", sizes=[16], overhead=False).rules
    assert {"index", "rescaled", "ntk", "yarn"} <= set(known)
    assert "linear" not in known  # the same as rescaled


def test_training_mode_of_dropout_does_not_leak(data, tmp_path):
    model = build().train()
    first = evaluate(model, data, tmp_path / "a", sizes=[16], rules=["index"], overhead=False)
    second = evaluate(model.eval(), data, tmp_path / "b", sizes=[16], rules=["index"], overhead=False)
    assert first.accuracy(16, "index").value == second.accuracy(16, "index").value


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sizes": [4]}, "sizes: 4 px is smaller than a patch of 8 x 8 px"),
        ({"rules": ["indices"]}, r"rules: \['indices'\] not among"),
    ],
)
def test_bad_requests(data, tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        evaluate(build(), data, tmp_path, **options)


def test_usable_size_of_patches_that_are_not_square():
    assert usable_size(30, (4, 8)) == (28, 24)
    with pytest.raises(ValueError, match="smaller than a patch"):
        usable_size(6, (4, 8))


def test_a_model_without_patches_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match=r"patch_embed\.patch_size, or a model with patch_size, got Linear"):
        patch_size(torch.nn.Linear(2, 2))


# -- checkpoints ------------------------------------------------------------------------------------------------------

TIMM = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def plain_timm(**options):
    import timm

    torch.manual_seed(1)
    return timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=4, **{**TIMM, **options}).eval()


def options_of(**more):
    return {
        "model": "vit_tiny_patch16_224",
        "model_options": {k: v for k, v in TIMM.items() if k != "img_size"},
        "progress": False,
        **more,
    }


@pytest.mark.parametrize("kind", ["pt", "safetensors", "wrapped"])
def test_any_timm_checkpoint(data, tmp_path, kind):
    model = plain_timm()
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file(model.state_dict(), path)
    else:
        state = model.state_dict()
        torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}} if kind == "wrapped" else state, path)
    evaluation = evaluate_checkpoint(path, data=data, sizes=[16, 24], output_dir=tmp_path / "out", **options_of())
    assert evaluation.rules == ["own"]
    with torch.no_grad():
        expected = sum(int((model(x).argmax(1) == y).sum()) for x, y in data.test_dataloader())
    assert evaluation.accuracy(16, "own").value == pytest.approx(expected / 40)
    larger = plain_timm(img_size=24)
    from timm.layers import resample_abs_pos_embed

    state = dict(model.state_dict())
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], new_size=[3, 3], num_prefix_tokens=1)
    larger.load_state_dict(state)
    with torch.no_grad():
        expected = sum(int((larger(x).argmax(1) == y).sum()) for x, y in data.test_loader(24)[0])
    assert evaluation.accuracy(24, "own").value == pytest.approx(expected / 40)
    assert "carries the position encoding it was built with" in (tmp_path / "out" / "report.md").read_text()


def test_checkpoint_with_an_attached_encoding(data, tmp_path):
    from mmpos.adapters.timm import attach

    model = attach(plain_timm(), "rope_axial", theta=50.0).eval()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    evaluation = evaluate_checkpoint(
        tmp_path / "w.pt",
        data=data,
        sizes=[16],
        output_dir=tmp_path,
        encoding="rope_axial",
        encoding_options={"theta": 50.0},
        **options_of(),
    )
    with torch.no_grad():
        expected = sum(int((model(x).argmax(1) == y).sum()) for x, y in data.test_dataloader())
    assert evaluation.accuracy(16, "index").value == pytest.approx(expected / 40)


def test_checkpoint_errors(data, tmp_path):
    (tmp_path / "broken.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"broken\.pt cannot be read"):
        evaluate_checkpoint(tmp_path / "broken.pt", data=data, output_dir=tmp_path, **options_of())
    with pytest.raises(FileNotFoundError, match="no file"):
        evaluate_checkpoint(tmp_path / "gone.pt", data=data, output_dir=tmp_path, **options_of())
    torch.save({"head.weight": torch.zeros(7, 24)}, tmp_path / "seven.pt")
    with pytest.raises(ValueError, match="trained for 7 classes, data fake has 4"):
        evaluate_checkpoint(tmp_path / "seven.pt", data=data, output_dir=tmp_path, **options_of())
    torch.save({"x": torch.zeros(1)}, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match="does not fit this model"):
        evaluate_checkpoint(tmp_path / "odd.pt", data=data, output_dir=tmp_path, **options_of())
    with pytest.raises(ValueError, match="timm has no model 'vit_tinny'"):
        evaluate_checkpoint(
            tmp_path / "odd.pt", data=data, output_dir=tmp_path, **{**options_of(), "model": "vit_tinny"}
        )
