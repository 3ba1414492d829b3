import pytest
import torch
import torch.nn.functional as F

from mmpos.data.images import ENLARGED, REAL, BatchAugment, pixel_origin, resize, statistics

INDEX = torch.arange(5)


def images(height=6, width=9, channels=2):
    return torch.rand(5, channels, height, width, generator=torch.Generator().manual_seed(0))


def augmented(x, seed=0, epoch=0, index=INDEX, **options):
    return BatchAugment(**options)(x, index, seed=seed, epoch=epoch)


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_smaller_is_antialiased_bilinear_and_larger_is_bicubic():
    x = images(8, 8)
    small = F.interpolate(x, (4, 4), mode="bilinear", antialias=True, align_corners=False)
    large = F.interpolate(x, (12, 12), mode="bicubic", align_corners=False)
    assert torch.equal(resize(x, 4), small)
    assert torch.equal(resize(x, 12), large)
    assert resize(x, 8) is x


def test_origin_of_pixels():
    assert [pixel_origin(28, size) for size in (14, 28, 29)] == [REAL, REAL, ENLARGED]


def test_statistics_equal_those_of_the_pixels():
    x = torch.randint(0, 256, (7, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    mean, std = statistics(x)
    pixels = x.double().div(255).transpose(0, 1).flatten(1)
    assert torch.allclose(torch.tensor(mean, dtype=torch.double), pixels.mean(1), atol=1e-12)
    assert torch.allclose(torch.tensor(std, dtype=torch.double), pixels.std(1), atol=1e-12)


def test_a_constant_channel_does_not_divide_by_zero():
    assert statistics(torch.full((2, 1, 3, 3), 7, dtype=torch.uint8)) == ((7 / 255,), (1.0,))


# -- augmentation -----------------------------------------------------------------------------------------------------


def test_nothing_asked_nothing_done():
    x = images()
    assert augmented(x) is x


def test_flip():
    x = images()
    assert torch.allclose(augmented(x, flip=1.0), x.flip(-1), atol=1e-6)
    some = augmented(images().repeat(20, 1, 1, 1), index=torch.arange(100), flip=0.5)
    flipped = (some - images().repeat(20, 1, 1, 1)).abs().amax((1, 2, 3)) > 1e-4
    assert 30 < int(flipped.sum()) < 70


def test_rotation_is_rigid_on_images_that_are_not_square():
    # a small disc keeps its distance from the middle in pixels, whichever way a 21 x 41 image turns
    height, width = 21, 41
    y, x = torch.meshgrid(torch.arange(height) - 10.0, torch.arange(width) - 20.0, indexing="ij")
    disc = torch.exp(-((y - 0) ** 2 + (x - 7) ** 2) / 2).expand(64, 1, -1, -1)
    turned = augmented(disc, index=torch.arange(64), degrees=180.0)
    weight = turned / turned.sum((-1, -2), keepdim=True)
    centre_y, centre_x = (weight * y).sum((-1, -2))[:, 0], (weight * x).sum((-1, -2))[:, 0]
    assert torch.allclose(torch.hypot(centre_y, centre_x), torch.full((64,), 7.0), atol=0.05)
    assert centre_y.abs().max() > 5  # and it does turn


def test_magnification():
    x = torch.zeros(1, 1, 33, 33)
    x[..., 12:21, 12:21] = 1
    larger = augmented(x, index=torch.tensor([0]), scale=(2.0, 2.0))
    assert larger.sum() == pytest.approx(4 * 81, rel=0.1)


def test_translation_stays_inside_its_range():
    x = torch.zeros(200, 1, 21, 21)
    x[:, :, 10, 10] = 1
    moved = augmented(x, index=torch.arange(200), translate=0.2)
    y, x_place = torch.meshgrid(torch.arange(21) - 10.0, torch.arange(21) - 10.0, indexing="ij")
    shift = torch.stack([(moved * y).sum((-1, -2)), (moved * x_place).sum((-1, -2))])
    assert shift.abs().max() <= 0.2 * 21 + 1e-3
    assert shift.amax() > 3
    assert shift.amin() < -3


def test_crop_never_leaves_the_image():
    ones = torch.ones(200, 1, 12, 17)
    cropped = augmented(ones, index=torch.arange(200), crop=(0.3, 0.9))
    assert torch.allclose(cropped[..., 1:-1, 1:-1], ones[..., 1:-1, 1:-1], atol=1e-5)


def test_brightness_stays_on_unit_range_and_varies():
    bright = augmented(torch.full((100, 1, 2, 2), 0.9), index=torch.arange(100), brightness=0.5)
    assert bright.max() <= 1
    assert bright.min() >= 0.45 - 1e-6
    assert bright.std() > 0.1


def test_a_sample_is_augmented_alike_in_any_batch():
    x, options = images(), {"degrees": 20.0, "translate": 0.1, "scale": (0.8, 1.2), "shear": 10.0, "flip": 0.5}
    order = torch.tensor([3, 0, 4, 1, 2])
    together = augmented(x, seed=4, epoch=2, **options)
    assert torch.equal(augmented(x[order], seed=4, epoch=2, index=order, **options), together[order])
    for i in range(5):
        alone = augmented(x[i : i + 1], seed=4, epoch=2, index=INDEX[i : i + 1], **options)
        assert torch.allclose(alone, together[i : i + 1], atol=1e-6)
    assert not torch.allclose(augmented(x, seed=4, epoch=3, **options), together)
    assert not torch.allclose(augmented(x, seed=5, epoch=2, **options), together)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scale": (1.2, 0.8)}, "scale"),
        ({"scale": (0.0, 1.0)}, "scale"),
        ({"crop": (0.5, 1.5)}, "crop"),
        ({"flip": 1.5}, "flip"),
        ({"padding": "wrap"}, "padding: expected 'zeros'"),
        ({"degrees": -1.0}, "degrees"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        BatchAugment(**options)
