"""``torch.export`` with dynamic height and width, for every encoding that says it can; the others must fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mmpos import Positions, list_encodings
from mmpos.encodings import encoding_class
from mmpos.testing import TinyTransformer, assert_close, build, encodings_of, randomise, seeded

IMAGES = [
    name for name in list_encodings() if encoding_class(name).facts.axes[0] <= 2 <= encoding_class(name).facts.axes[1]
]


class OnImages(nn.Module):
    """A tiny transformer that reads its grid from the shape of a feature map ``(B, D, H, W)``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        stack = build(name, depth=2, axes=2, num_prefix=1, train_grid=(4, 3))
        self.tiny = TinyTransformer(randomise(stack, 0.1))
        self.prefix = nn.Parameter(seeded(1, 1, self.tiny.dim, seed=3))

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        tokens = torch.cat([self.prefix.expand(image.shape[0], -1, -1), image.flatten(2).mT], dim=1)
        return self.tiny(tokens, Positions.grid(height, width, num_prefix=1))


def export(model: OnImages) -> torch.export.ExportedProgram:
    height, width = (torch.export.Dim(name, min=2, max=64) for name in ("height", "width"))
    image = seeded(2, model.tiny.dim, 3, 5)
    return torch.export.export(model, (image,), dynamic_shapes=({2: height, 3: width},))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [name for name in IMAGES if encoding_class(name).facts.exportable])
def test_exported_program_takes_sizes_it_has_not_seen(name: str) -> None:
    model = OnImages(name).eval()
    program = export(model).module()
    for sizes in ((3, 5), (4, 3), (6, 4), (2, 9)):
        image = seeded(2, model.tiny.dim, *sizes, seed=sum(sizes))
        assert_close(program(image), model(image), terms=4096, what=f"{name} at {sizes}")


@pytest.mark.parametrize("name", [name for name in IMAGES if not encoding_class(name).facts.exportable])
def test_encodings_that_cannot_be_exported_say_so(name: str) -> None:
    model = OnImages(name).eval()
    assert encodings_of(model.tiny.stack)
    with pytest.raises(Exception):  # noqa: B017, PT011 - the exporter has many ways to refuse
        export(model)
