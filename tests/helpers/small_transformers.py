"""Small random transformers, as files and in the place of the pretrained ones, and a drawn CLINC150."""

import json

import torch

from l2l_niw.models import text_blocks, timm_backbone, vit_blocks
from l2l_niw.vision import transformers as registry
from l2l_niw.vision.transformers import Transformer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "how", "much", "is", "left", "play", "some", "jazz", "please"]
WIDTH = 24


def vit(**options):
    return timm_backbone("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=WIDTH, depth=3, **options).eval()


def save_bert(folder):
    """A small random BERT with its tokeniser, as transformers saves them."""
    import transformers

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 48}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, initializer_range=0.3, **sizes)
    model = transformers.BertModel(config)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return model.eval()


def draw_clinc150(root, domains=3, intents=4, texts=6):
    """Intents that are pairs of words, in different orders and with another word."""
    words = WORDS[4:]
    names = {f"domain{d}": [f"intent{d}{i}" for i in range(intents)] for d in range(domains)}
    pairs = [(first, second) for first in words for second in words]
    lines, k = [], 0
    for own in names.values():
        for name in own:
            first, second = pairs[5 * k % len(pairs)]
            lines += [[f"{first} {second} {words[t % len(words)]}{' please' * (t % 3)}", name] for t in range(texts)]
            k += 1
    unknown = [[f"jazz jazz {word}", "oos"] for word in words]
    content = {"train": lines, "val": [], "test": [], "oos_train": unknown, "oos_val": [], "oos_test": []}
    folder = root / "clinc150"
    folder.mkdir(parents=True)
    (folder / "data_full.json").write_text(json.dumps(content))
    (folder / "domains.json").write_text(json.dumps(names))
    return root


def use_small_transformers(monkeypatch, folder):
    """Puts a small BERT and a small ViT, with the weights of one seed, in the place of MiniLM and DINOv2."""
    save_bert(folder)

    def small_vit(root):
        torch.manual_seed(1 if root is not None else int(torch.randint(100, ()) + 2))
        return vit_blocks(vit(), size=16)

    texts = Transformer(lambda root: text_blocks(folder)[0], 3, WIDTH, lambda: text_blocks(folder)[1])
    monkeypatch.setitem(registry.TRANSFORMERS, "minilm", texts)
    monkeypatch.setitem(registry.TRANSFORMERS, "dinov2", Transformer(small_vit, 3, WIDTH))
