"""Episodes under shift: corrupted queries, classes that the support does not have, other ways and shots."""

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from drawings import draw_omniglot

from l2l_niw.data import (
    ClassTaskset, CorruptedQueries, ImageTaskset, Images, OpenSetQueries, SineLine, SineLineTaskset, contrast,
    gaussian_blur, gaussian_noise, get_tasksets,
)  # fmt: skip
from l2l_niw.errors import ArgumentError

KINDS = ("noise", "blur", "contrast")


def marked(classes=12, each=10):
    """Images that say what they are, also when turned: the centre is the class, one corner is bright."""
    pixels = torch.full((classes * each, 1, 3, 3), 100, dtype=torch.uint8)
    labels = torch.arange(classes).repeat_interleave(each)
    pixels[:, 0, 1, 1], pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = labels, 255, torch.arange(each).repeat(classes)
    return Images(pixels, labels)


def taskset(**options):
    return ImageTaskset(**{"images": marked(), "ways": 5, "shots": 2, "queries": 3, "num_tasks": 20, **options})


def classes(images):
    return (images[:, 0, 1, 1] * 255).round().int()


def pictures(n=6, channels=3, height=11, width=8):
    return torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def same(a, b):
    return all(map(torch.equal, a, b))


class TestCorruptions:
    @pytest.mark.parametrize("std", [0.1, 0.4, 0.7, 1.0, 3.3])  # the last reaches beyond the image
    def test_blur_is_scipy_s(self, std):
        images = pictures()
        expected = scipy.ndimage.gaussian_filter(images.numpy(), (0, 0, std, std), mode="nearest")
        assert np.allclose(gaussian_blur(images, std), expected, atol=1e-12)
        assert np.allclose(gaussian_blur(images.float(), std), expected, atol=1e-6)

    def test_noise_is_gaussian_of_its_std_and_independent(self):
        grey = torch.full((50, 3, 16, 16), 0.5)
        noise = (gaussian_noise(grey, 0.08, torch.Generator().manual_seed(0)) - 0.5).double() / 0.08
        assert scipy.stats.kstest(noise.flatten(), "norm").pvalue > 1e-3
        for first, second in (
            (noise[1:], noise[:-1]),
            (noise[:, 1:], noise[:, :-1]),
            (noise[..., 1:], noise[..., :-1]),
        ):
            assert abs((first * second).mean()) < 5 / first.numel() ** 0.5

    def test_noise_is_clipped_and_the_generator_s(self):
        black, white = torch.zeros(20, 1, 16, 16), torch.ones(20, 1, 16, 16)
        first, again, other = (gaussian_noise(black, 0.1, torch.Generator().manual_seed(k)) for k in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert first.min() == 0
        assert gaussian_noise(white, 0.1).max() == 1
        assert (first == 0).double().mean().item() == pytest.approx(0.5, abs=0.03)  # E max(z, 0) = std / sqrt(2 pi)
        assert first.mean().item() == pytest.approx(0.1 / (2 * torch.pi) ** 0.5, rel=0.05)
        assert torch.equal(gaussian_noise(pictures(), 0), pictures())

    def test_contrast_by_hand(self):
        images = torch.tensor([[[[0.0, 1.0], [0.5, 0.5]], [[0.2, 0.2], [0.2, 0.6]]]])  # channels of means 0.5 and 0.3
        expected = torch.tensor([[[[0.35, 0.65], [0.5, 0.5]], [[0.27, 0.27], [0.27, 0.39]]]])
        assert torch.allclose(contrast(images, 0.3), expected)
        assert torch.allclose(contrast(images, 1), images)
        assert torch.allclose(contrast(images, 0)[0, 1], torch.full((2, 2), 0.3))

    @pytest.mark.parametrize("corrupt", [
        lambda x: gaussian_noise(x, 0.1), lambda x: gaussian_blur(x, 1.0), lambda x: contrast(x, 0.5),
    ])  # fmt: skip
    def test_images_that_are_none_are_named(self, corrupt):
        for bad in (pictures()[0], pictures() * 255, pictures() - 0.5, (pictures() * 255).byte(), pictures() / 0):
            with pytest.raises(ArgumentError, match="images must be .* divide bytes by 255"):
                corrupt(bad)
        for value in (0.0, 1.0):
            constant = torch.full((2, 3, 9, 9), value)
            assert corrupt(constant).min() >= 0
            assert corrupt(constant).max() <= 1

    def test_strengths_are_checked(self):
        with pytest.raises(ArgumentError, match="std must be .* at least 0"):
            gaussian_noise(pictures(), -0.1)
        with pytest.raises(ArgumentError, match="std must be .* above 0"):
            gaussian_blur(pictures(), 0)
        with pytest.raises(ArgumentError, match="factor must be .* at most 1"):
            contrast(pictures(), 1.5)


class TestCorruptedQueries:
    @pytest.mark.parametrize("kind", KINDS)
    def test_only_query_images_change(self, kind):
        clean, found = taskset()[3], CorruptedQueries(taskset(), kind, 3)[3]
        assert same(found.support, clean.support)
        assert torch.equal(found.y_query, clean.y_query)
        assert not torch.equal(found.x_query, clean.x_query)
        both = CorruptedQueries(taskset(), kind, 3, support=True)[3]
        assert same(both.query, found.query)
        assert not torch.equal(both.x, clean.x)
        assert torch.equal(both.y, clean.y)

    def test_severities_are_cifar_c_s(self):
        x = taskset()[0].x_query
        for severity, std, factor in ((1, 0.4, 0.75), (2, 0.6, 0.5), (3, 0.7, 0.4), (4, 0.8, 0.3), (5, 1.0, 0.15)):
            blurred, faded = (CorruptedQueries(taskset(), kind, severity)[0].x_query for kind in ("blur", "contrast"))
            expected = scipy.ndimage.gaussian_filter(x.double().numpy(), (0, 0, std, std), mode="nearest")
            assert np.allclose(blurred, expected, atol=1e-6)
            mean = x.mean((2, 3), keepdim=True)
            assert torch.allclose(faded, factor * x + (1 - factor) * mean, atol=1e-6)
        grey = Images(torch.full((40, 3, 16, 16), 128, dtype=torch.uint8), torch.arange(2).repeat_interleave(20))
        for severity, std in enumerate((0.04, 0.06, 0.08, 0.09, 0.10), start=1):
            noisy = CorruptedQueries(ImageTaskset(grey, 2, 1, 19), "noise", severity)[0].x_query
            assert noisy.std().item() == pytest.approx(std, rel=0.03)

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_image_gets_worse_with_severity_and_stays_an_image(self, kind):
        random = np.random.default_rng(0).integers(256, size=(40, 3, 12, 12), dtype=np.uint8)
        clean = ImageTaskset(Images(torch.from_numpy(random), torch.arange(4).repeat_interleave(10)), 4, 1, 5)
        distances = []
        for severity in range(1, 6):
            x = CorruptedQueries(clean, kind, severity)[0].x_query
            assert x.min() >= 0
            assert x.max() <= 1
            assert x.dtype == torch.float32
            distances.append((x - clean[0].x_query).flatten(1).norm(dim=1))
        assert (torch.stack(distances).diff(dim=0) > 0).all()

    def test_noise_is_the_task_s_own(self):
        grey = Images(torch.full((40, 1, 16, 16), 128, dtype=torch.uint8), torch.arange(4).repeat_interleave(10))
        clean = ImageTaskset(grey, 4, 5, 5, num_tasks=6)
        noisy, again, other = (CorruptedQueries(clean, "noise", 5, seed, support=True) for seed in (0, 0, 1))
        backwards = {i: again[i] for i in reversed(range(6))}
        torch.manual_seed(0)
        assert all(same(noisy[i], backwards[i]) for i in range(6))
        everything = torch.cat([torch.cat([t.x, t.x_query]) for t in (*noisy, *other)])  # 480 images, all grey before
        assert len(everything.flatten(1).unique(dim=0)) == 480
        noise = (everything - 128 / 255).double().flatten(1)
        correlations = np.corrcoef(noise.numpy())[~np.eye(480, dtype=bool)]
        assert abs(correlations).max() < 6 / 16  # standard deviations, of 256 pixels


class TestOpenSetQueries:
    @pytest.mark.parametrize("rotate", [False, True])
    def test_added_classes_are_not_the_support_s(self, rotate):
        clean, found = taskset(rotate=rotate), OpenSetQueries(taskset(rotate=rotate), classes=7, queries=4)
        for i in range(20):
            task = found[i]
            assert same(task.support, clean[i].support)
            assert same((part[:15] for part in task.query), clean[i].query)
            assert task.y_query[15:].tolist() == [-1] * 28
            added = classes(task.x_query[15:]).view(7, 4)
            assert (added == added[:, :1]).all()
            assert set(added.flatten().tolist()) == set(range(12)) - set(classes(task.x).tolist())  # 5 + 7 = 12
            assert len(task.x_query[15:].flatten(1).unique(dim=0)) == 28

    def test_as_many_classes_and_images_as_the_task_has_by_default(self):
        task = OpenSetQueries(taskset())[0]
        assert task.x_query.shape == (30, 1, 3, 3)
        assert (task.y_query < 0).sum() == 15
        assert len(classes(task.x_query).unique()) == 10

    def test_all_other_classes_and_images_come_alike(self):
        found = OpenSetQueries(taskset(num_tasks=-1), classes=2, queries=1)
        added = torch.cat([found[i].x_query[15:] for i in range(1200)])
        numbers = classes(added) * 10 + (added[:, 0, 0, 1] * 255).round().int()
        counts = torch.bincount(numbers, minlength=120)
        assert len(counts) == 120
        assert scipy.stats.chisquare(counts).pvalue > 1e-3

    def test_it_is_the_task_s_own_whatever_the_order(self):
        found, again, other = (OpenSetQueries(taskset(), seed=seed) for seed in (0, 0, 1))
        backwards = {i: again[i] for i in reversed(range(20))}
        assert all(same(found[i], backwards[i]) for i in range(20))
        assert any(not torch.equal(found[i].x_query, other[i].x_query) for i in range(3))

    def test_inputs_of_no_class_may_be_given(self):
        clean = ClassTaskset(torch.zeros(40, 3), torch.arange(4).repeat_interleave(10), 2, 1, 3, num_tasks=30)
        unknown = torch.arange(1.0, 9.0).unsqueeze(1).repeat(1, 3)
        found = OpenSetQueries(clean, classes=1, queries=4, unknown=unknown)
        for task in found:
            added = task.x_query[task.y_query < 0]
            assert added.shape == (4, 3)
            assert (added > 0).all()
            assert len(added.unique(dim=0)) == 4
        assert len(torch.cat([task.x_query for task in found]).unique(dim=0)) == 9
        with pytest.raises(ArgumentError, match="unknown must be 12 inputs or more of shape .3,."):
            OpenSetQueries(clean, classes=3, queries=4, unknown=unknown)

    def test_added_classes_are_turned_as_a_whole_where_the_taskset_turns_its_own(self):
        turned = OpenSetQueries(taskset(rotate=True), classes=4)
        corners = []
        for task in turned:
            added = task.x_query[15:, 0][:, [0, 0, 2, 2], [0, 2, 2, 0]].argmax(1).view(4, 3)
            assert (added == added[:, :1]).all()
            corners.append(added[:, 0])
        assert set(torch.cat(corners).tolist()) == {0, 1, 2, 3}
        upright = torch.cat([task.x_query for task in OpenSetQueries(taskset())])
        assert (upright[:, 0, 0, 0] == 1).all()


class TestWithShape:
    def test_the_same_images_in_tasks_of_another_shape(self):
        clean = taskset(rotate=True, seed=(2, 3))
        wide = clean.with_shape(ways=10, shots=1)
        assert (wide.ways, wide.shots, wide.queries, len(wide)) == (10, 1, 3, 20)
        expected = ImageTaskset(marked(), 10, 1, 3, num_tasks=20, rotate=True, seed=(2, 3))
        assert all(map(same, wide, expected))
        assert wide.images.pixels is clean.images.pixels

    def test_the_same_ways_have_the_same_classes(self):
        clean = taskset()
        assert all(map(same, clean.with_shape(), clean))
        more, moved = clean.with_shape(shots=5, queries=5), clean.with_shape(shots=4, queries=1)
        for i in range(20):
            assert torch.equal(classes(more[i].x)[::5], classes(clean[i].x)[::2])
            own, other = (torch.cat([t.x.view(5, -1, 9), t.x_query.view(5, -1, 9)], 1) for t in (clean[i], moved[i]))
            assert torch.equal(own, other)

    def test_what_the_images_cannot_give_is_named(self):
        for change, message in (
            ({"ways": 13}, "ways is 13, but there are 12"),
            ({"ways": 0}, "ways must be"),
            ({"shots": 8}, "shots . queries is 11"),
        ):
            with pytest.raises(ArgumentError, match=message):
                taskset().with_shape(**change)


class TestTogether:
    def test_corrupted_open_set_queries_of_ten_ways(self):
        clean = taskset(num_tasks=3).with_shape(ways=10, shots=5)
        opened = OpenSetQueries(clean, classes=2, queries=4)
        found = CorruptedQueries(opened, "contrast", 2)
        task = found[1]
        assert same(task.support, clean[1].support)
        assert torch.equal(task.y_query, torch.cat([clean[1].y_query, torch.full((8,), -1)]))
        assert torch.allclose(task.x_query, contrast(opened[1].x_query, 0.5))
        twice = CorruptedQueries(CorruptedQueries(opened, "blur", 1), "contrast", 2)[1]
        assert torch.allclose(twice.x_query, contrast(gaussian_blur(opened[1].x_query, 0.4), 0.5))

    @pytest.mark.parametrize("shift", [OpenSetQueries, lambda tasks: CorruptedQueries(tasks, "noise", 2)])
    def test_they_are_tasksets(self, shift):
        clean = taskset(num_tasks=3)
        clean.sample()  # where the wrapped taskset is changes nothing
        found = shift(clean)
        assert len(found) == len(list(found)) == 3
        assert same(found.sample(), found[0])
        together = found.batch(3)
        assert together.x.shape == (3, 10, 1, 3, 3)
        for k, i in enumerate((1, 2, 0)):
            assert same((part[k] for part in together), found[i])
        assert clean.position == 1
        for i in (-1, 3):
            with pytest.raises(IndexError):
                found[i]
        endless = shift(taskset(num_tasks=-1))
        assert len(endless) == 1
        assert same(next(iter(endless)), endless[0])

    def test_omniglot(self, tmp_path, monkeypatch):
        draw_omniglot(tmp_path, monkeypatch)
        clean = get_tasksets("omniglot", ways=2, queries=3, root=tmp_path).train
        found = CorruptedQueries(OpenSetQueries(clean), "noise", 5)
        assert clean.rotate
        x, y, x_query, y_query = found[0]
        assert torch.equal(x, clean[0].x)
        assert x_query.shape == (12, 1, 28, 28)
        assert y_query.tolist() == [0, 0, 0, 1, 1, 1] + [-1] * 6


@pytest.mark.parametrize(("make", "message"), [
    (lambda: CorruptedQueries(taskset(), "fog", 1), "kind must be one of noise, blur, contrast; got 'fog'"),
    (lambda: CorruptedQueries(taskset(), "blur", 6), "severity must be a whole number of at least 1 and at most 5"),
    (lambda: CorruptedQueries(taskset(), "blur", 1.5), "severity must be"),
    (lambda: CorruptedQueries(taskset(), "blur", 1, seed=-1), "seed must be"),
    (lambda: CorruptedQueries(SineLineTaskset(SineLine()), "noise", 1), "taskset must be .*; got SineLineTaskset"),
    (lambda: OpenSetQueries(taskset(), classes=8), "classes is 8, but 5 ways leave 7 of 12 classes: lower classes, or"),
    (lambda: OpenSetQueries(taskset(ways=7)), "classes is 7, but 7 ways leave 5"),
    (lambda: OpenSetQueries(taskset(ways=12), classes=1), "classes is 1, but 12 ways leave 0"),
    (lambda: OpenSetQueries(taskset(), classes=0), "classes must be"),
    (lambda: OpenSetQueries(taskset(), queries=11), "queries is 11, but a class has 10 examples: lower it"),
    (lambda: OpenSetQueries(taskset(), queries=0), "queries must be"),
    (lambda: OpenSetQueries(taskset(), seed=1.5), "seed must be"),
    (lambda: OpenSetQueries(CorruptedQueries(taskset(), "blur", 1)), "wrap OpenSetQueries in CorruptedQueries"),
])  # fmt: skip
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()
