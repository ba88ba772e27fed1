"""The methods and networks of `complexity.py`, and what one process measures of them: time or memory."""

import itertools
import statistics
import sys
import time
import warnings

import torch
from processes import timed
from torch import nn
from torch.nn import functional as F

from l2l_niw import NIW, BatchedEpisodes, EpisodicModel
from l2l_niw.inference.curvature import GGN
from l2l_niw.heads import NearestCentroid
from l2l_niw.models import (
    MLP, PoseEncoder, add_adapters, batch_statistics, text_blocks, timm_backbone, vit_blocks,
)  # fmt: skip
from l2l_niw.utils._process import peak_memory

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


class WithLinearLayer(nn.Module):
    """A backbone with a linear layer, for methods that adapt one."""

    def __init__(self, backbone, width, outputs):
        super().__init__()
        self.backbone, self.out = backbone, nn.Linear(width, outputs)

    def forward(self, x):
        return self.out(self.backbone(x).flatten(1))


def images(size, channels=3, ways=5, shots=1, queries=15):
    y = torch.arange(ways)
    support = torch.randn(ways * shots, channels, size, size), y.repeat(shots)
    return support, (torch.randn(ways * queries, channels, size, size), y.repeat(queries))


def points(inputs, targets, shots, queries):
    return tuple((torch.randn(n, *inputs), torch.randn(n, targets)) for n in (shots, queries))


def texts(tokens=16, ways=10, shots=1, queries=5):
    y = torch.arange(ways)
    support, query = (torch.randint(1000, 20_000, (ways * n, tokens)) for n in (shots, queries))
    return (support, y.repeat(shots)), (query, y.repeat(queries))


def dinov2():
    """Random weights: DINOv2's cost as much."""
    vit = timm_backbone("vit_small_patch14_dinov2", depth=11, img_size=518, dynamic_img_size=True)
    return vit_blocks(vit, size=112)


def classes_loss(outputs, y):
    """Cross-entropy on made-up classes, of points."""
    return F.cross_entropy(outputs, y.argmax(-1))


# name: (network, its features' width, one episode's data, loss)
NETWORKS = {
    "sine-line": (lambda: MLP(1, (40, 40), activate_last=True), 40, lambda: points((1,), 1, 5, 45), F.mse_loss),
    "mlp-256": (
        lambda: MLP(20, (256, 256), activate_last=True), 256, lambda: points((20,), 5, 5, 75), classes_loss,
    ),
    "conv-4": (
        lambda: l2l.vision.models.CNN4Backbone(hidden_size=32, channels=3, max_pool=True),
        800, lambda: images(84), F.cross_entropy,
    ),
    "pose": (lambda: PoseEncoder(), 64, lambda: points((1, 128, 128), 2, 15, 15), F.mse_loss),
    "resnet-18": (lambda: timm_backbone("resnet18"), 512, lambda: images(84, queries=5), F.cross_entropy),
    "resnet-18-15": (lambda: timm_backbone("resnet18"), 512, lambda: images(84), F.cross_entropy),
    "vit-small": (
        lambda: timm_backbone("dino-small", img_size=80), 384, lambda: images(80, queries=5), F.cross_entropy,
    ),
    "dinov2": (dinov2, 384, lambda: images(32, queries=5), F.cross_entropy),
    "minilm": (lambda: text_blocks()[0], 384, texts, F.cross_entropy),
}  # fmt: skip
HIDDEN = {"dinov2": (65, 384), "minilm": (16, 384)}  # tokens that a transformer's last block takes, which are on disk
STEPS = (1, 3, 5)
OF_PARTS = ("niw-block-5", "niw-adapters-5", "niw-adapters-all-5")
METHODS = [
    "protonet",
    *(f"{m}-{k}" for m in ("maml", "higher", "fo-maml") for k in STEPS),
    "reptile-5",
    *(f"niw-{k}" for k in (1, 3, 5, 50)),
    *(f"fo-niw-{k}" for k in (1, 5, 50)),
    *(f"niw-{name}-5" for name in ("all", "ggn", "closed-form", "batch")),
    *(f"niw-rank-{k}" for k in (1, 3, 5)),
    *(f"niw-rank-last-{k}" for k in (1, 3, 50)),
    "niw-rank-batch-3",
    *OF_PARTS,
]
OF_TRANSFORMERS = ("protonet", "fo-maml-5", "maml-5", "niw-5", *OF_PARTS)
ADAPTERS = ["*lora_*", "out.*"]  # what is random, with the linear layer


def methods_of(network, methods):
    """Of these methods those that a network is measured with: blocks and adapters are of pretrained transformers."""
    return [m for m in methods if (m in OF_TRANSFORMERS if network in HIDDEN else m not in OF_PARTS)]


BATCH = {"sine-line": 32}  # episodes of a batched row; 2 where not said


def protonet_of(network):
    backbone, _, _, loss = NETWORKS[network]
    if loss is not F.cross_entropy:  # no classes: the cost of one forward and backward of support and query
        model = WithLinearLayer(backbone(), NETWORKS[network][1], NETWORKS[network][2]()[0][1].shape[-1])

        def run(support, query):
            (loss(model(support[0]), support[1]) + loss(model(query[0]), query[1])).backward()

        return model, run
    model = EpisodicModel(backbone(), NearestCentroid("cosine", 10.0))
    return model, lambda support, query: model(*support, query[0]).nll(query[1]).backward()


def with_linear_layer(network):
    backbone, width, data, loss = NETWORKS[network]
    (_, y), _ = data()
    return WithLinearLayer(backbone(), width, int(y.max()) + 1 if loss is F.cross_entropy else y.shape[-1])


def prepare(network, method):
    """What is trained, and a function that runs one episode or a batch of them, gradients included."""
    name, _, steps = method.rpartition("-")
    if method == "protonet":
        return *protonet_of(network), 1
    if name.startswith(("niw-block", "niw-adapters")):
        return of_part(network, name, int(steps))
    loss, steps, model = NETWORKS[network][3], int(steps), with_linear_layer(network)
    if "niw" in name:
        return niw_of(network, name, steps, model, loss)
    if name == "higher":
        return model, higher_of(model, steps, loss), 1
    maml = l2l.algorithms.MAML(model, lr=0.01, first_order=name != "maml")

    def run(support, query):
        learner = maml.clone()
        for _ in range(steps):
            learner.adapt(loss(learner(support[0]), support[1]))
        if name == "reptile":
            for p, q in zip(model.parameters(), learner.parameters()):
                p.grad = p.detach() - q.detach()
        else:
            loss(learner(query[0]), query[1]).backward()

    return maml, run, 1


def higher_of(model, steps, loss):
    import higher

    inner = torch.optim.SGD(model.parameters(), 0.01)

    def run(support, query):
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (learner, optimiser):
            for _ in range(steps):
                optimiser.step(loss(learner(support[0]), support[1]))
            loss(learner(query[0]), query[1]).backward()

    return run


def niw_of(network, name, steps, model, loss):
    """`niw` is the default, with the last layer's second derivatives; `fo-niw` is of first order."""
    if name.endswith("batch"):
        size = BATCH.get(network, 2)
        niw = NIW(batch_statistics(model), lr=0.01, rank=8 if "rank" in name else 0)
        episodes = BatchedEpisodes(niw, lambda net, x, y: loss(net(x), y), steps=steps)

        def run_batch(support, query):
            batch = ([t.expand(size, *t.shape).contiguous() for t in part] for part in (support, query))
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="BatchedEpisodes")  # a loop is another row
                episodes(*batch).backward()

        return niw, run_batch, size
    likelihood = "gaussian" if loss is F.mse_loss else "categorical"
    options = {
        "fo-niw": {"first_order": True},
        "niw-all": {"second_order": "all"},
        "niw-ggn": {"first_order": True, "curvature": GGN(likelihood)},
        "niw-closed-form": {"inference": "closed_form"},
        "niw-rank": {"rank": 8},
        "niw-rank-last": {"rank": 8, "second_order": "last_step"},
    }
    niw = NIW(model, lr=0.01, **options.get(name, {}))
    return niw, niw_loop(niw, steps, loss), 1


def niw_loop(niw, steps, loss):
    def run(support, query):
        learner = niw.clone()
        for _ in range(steps):
            learner.adapt(loss(learner(support[0]), support[1]))
        loss(learner.query(query[0]), query[1]).backward()

    return run


def of_part(network, name, steps):
    """NIW on a transformer's last block, on adapters of it, or on adapters of every layer; all else is frozen."""
    backbone, width, data, loss = NETWORKS[network]
    layers = backbone() if name.endswith("all") else backbone()[-2:]
    layers = add_adapters(layers) if "adapters" in name else layers
    model = WithLinearLayer(layers, width, int(data()[0][1].max()) + 1)
    niw = NIW(model, lr=0.01, random=ADAPTERS if "adapters" in name else "all")
    return niw, niw_loop(niw, steps, loss), 1


def episode_of(network, method):
    torch.manual_seed(0)
    trained, run, size = prepare(network, method)
    support, query = NETWORKS[network][2]()
    if method in ("niw-block-5", "niw-adapters-5"):
        support, query = ((torch.randn(len(y), *HIDDEN[network]), y) for _, y in (support, query))
    opt = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], 1e-4)

    def episode():
        opt.zero_grad()
        run(support, query)
        opt.step()

    return episode, size


def measure_time(network, method, seconds):
    """Median seconds of an episode with its optimiser step."""
    episode, size = episode_of(network, method)
    times = timed(episode, seconds, warm=2)
    return {"seconds": statistics.median(times) / size, "runs": len(times)}


def measure_memory(network, method, seconds):
    """Peak memory in MB, that of the process after its imports taken off."""
    before = peak_memory()
    episode, _ = episode_of(network, method)
    for _ in range(2):
        episode()
    peak = peak_memory()
    return {"own": peak - before, "peak": peak}


def measure_prediction(network, seconds):
    """Median seconds of a prediction with 10 sampled networks, at once and one after another."""
    torch.manual_seed(0)
    if network == "omniglot":
        model, x = batch_statistics(l2l.vision.models.OmniglotCNN(20, hidden_size=64)), torch.randn(20, 1, 28, 28)
    else:
        model, x = with_linear_layer(network), NETWORKS[network][2]()[1][0]
    posterior = NIW(model, lr=0.01).prior()
    times = {True: [], False: []}
    with torch.no_grad():
        began = time.perf_counter()
        for vectorize in itertools.cycle(times):  # in turns
            start = time.perf_counter()
            posterior.predict(x, samples=10, vectorize=vectorize)
            times[vectorize].append(time.perf_counter() - start)
            if len(times[False]) > 4 and time.perf_counter() - began > seconds:
                break
    return {"vectorized": statistics.median(times[True][1:]), "loop": statistics.median(times[False][1:])}


def measure_calls(network, seconds):
    """Functions of the package called by one `adapt`, comprehensions included, after two that came before it."""
    support, _ = NETWORKS[network][2]()
    learner, loss, calls = NIW(with_linear_layer(network), lr=0.01).clone(), NETWORKS[network][3], []

    def note(frame, event, arg):
        if event == "call" and "l2l_niw" in frame.f_code.co_filename:
            calls.append(frame)

    for profile in (None, None, note):
        value = loss(learner(support[0]), support[1])
        sys.setprofile(profile)
        learner.adapt(value)
        sys.setprofile(None)
    return {"calls": len(calls)}
