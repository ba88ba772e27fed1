"""The methods and networks of `complexity.py`, and what one process measures of them: time or memory."""

import statistics
import warnings

import torch
from processes import timed
from torch import nn
from torch.nn import functional as F

from l2l_niw import NIW, EpisodicModel
from l2l_niw.curvature import GGN
from l2l_niw.episodes import Episodes
from l2l_niw.heads import NearestCentroid
from l2l_niw.models import MLP, PoseEncoder, batch_statistics, timm_backbone
from l2l_niw.process import peak_memory

import learn2learn as l2l  # after l2l_niw, which lets it be imported on CPU-only builds


class Readout(nn.Module):
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


# name: (network, its features' width, one episode's data, loss)
NETWORKS = {
    "sine-line": (lambda: MLP(1, (40, 40), activate_last=True), 40, lambda: points((1,), 1, 5, 45), F.mse_loss),
    "conv-4": (
        lambda: l2l.vision.models.CNN4Backbone(hidden_size=32, channels=3, max_pool=True),
        800, lambda: images(84), F.cross_entropy,
    ),
    "pose": (lambda: PoseEncoder(), 64, lambda: points((1, 128, 128), 2, 15, 15), F.mse_loss),
    "resnet-18": (lambda: timm_backbone("resnet18"), 512, lambda: images(84, queries=5), F.cross_entropy),
    "vit-small": (
        lambda: timm_backbone("dino-small", img_size=80), 384, lambda: images(80, queries=5), F.cross_entropy,
    ),
}  # fmt: skip
STEPS = (1, 3, 5)
METHODS = [
    "protonet",
    *(f"{m}-{k}" for m in ("maml", "higher", "fo-maml") for k in STEPS),
    "reptile-5",
    *(f"niw-{k}" for k in (1, 2, 3, 5, 50)),
    *(f"niw-readout-{k}" for k in (1, 5, 50)),
    "niw-ggn-5",
    *(f"niw-paper-{k}" for k in (2, 5)),
    *(f"niw-batch-{k}" for k in (2, 5)),
    "niw-compiled-5",
]
BATCH = {"sine-line": 32}  # episodes of a batched row; 2 where not said


def protonet_of(network):
    backbone, _, _, loss = NETWORKS[network]
    if loss is F.mse_loss:  # no classes: the cost of one forward and backward of support and query
        model = Readout(backbone(), NETWORKS[network][1], NETWORKS[network][2]()[0][1].shape[-1])

        def run(support, query):
            (loss(model(support[0]), support[1]) + loss(model(query[0]), query[1])).backward()

        return model, run
    model = EpisodicModel(backbone(), NearestCentroid("cosine", 10.0))
    return model, lambda support, query: model(*support, query[0]).nll(query[1]).backward()


def readout_of(network):
    backbone, width, data, loss = NETWORKS[network]
    (_, y), _ = data()
    return Readout(backbone(), width, y.shape[-1] if loss is F.mse_loss else int(y.max()) + 1)


def prepare(network, method):
    """What is trained, and a function that runs one episode or a batch of them, gradients included."""
    name, _, steps = method.rpartition("-")
    if method == "protonet":
        return *protonet_of(network), 1
    loss, steps, model = NETWORKS[network][3], int(steps), readout_of(network)
    if name.startswith("niw"):
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
    """`niw-readout` is the default, with the readout's second derivatives; the others are of first order."""
    burn_in = min(2, steps - 1)
    if name in ("niw-batch", "niw-compiled"):
        size = BATCH.get(network, 2)
        niw = NIW(batch_statistics(model), lr=0.01, first_order=True, burn_in=burn_in)
        episodes = Episodes(
            niw, lambda net, x, y: loss(net(x), y), steps=steps, memory=2**32, compile=name == "niw-compiled"
        )

        def run_batch(support, query):
            batch = ([t.expand(size, *t.shape).contiguous() for t in part] for part in (support, query))
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Episodes")  # a loop is another row
                episodes(*batch).backward()

        return niw, run_batch, size
    if name == "niw-paper":  # chains on support and query, and the objective on both
        niw = NIW(model, lr=0.01, burn_in=burn_in, trace="none", precondition=False)

        def run_paper(support, query):
            x, y = (torch.cat(pair) for pair in zip(support, query))
            learner = niw.clone()
            for _ in range(steps):
                learner.adapt(loss(learner(x), y))
            loss(learner.as_query()(x), y).backward()

        return niw, run_paper, 1
    likelihood = "gaussian" if loss is F.mse_loss else "categorical"
    curvature = GGN(likelihood) if name == "niw-ggn" else "sgld"
    options = {} if name == "niw-readout" else {"first_order": True, "burn_in": burn_in, "curvature": curvature}
    niw = NIW(model, lr=0.01, **options)

    def run(support, query):
        learner = niw.clone()
        for _ in range(steps):
            learner.adapt(loss(learner(support[0]), support[1]))
        loss(learner(query[0]), query[1]).backward()

    return niw, run, 1


def episode_of(network, method):
    torch.manual_seed(0)
    trained, run, size = prepare(network, method)
    support, query = NETWORKS[network][2]()
    opt = torch.optim.SGD(trained.parameters(), 1e-4)

    def episode():
        opt.zero_grad()
        run(support, query)
        opt.step()

    return episode, size


def measure_time(network, method, seconds):
    """Median seconds of an episode with its optimiser step."""
    episode, size = episode_of(network, method)
    times = timed(episode, seconds, warm=2 if method == "niw-compiled-5" else 1)
    return {"seconds": statistics.median(times) / size, "runs": len(times)}


def measure_memory(network, method, seconds):
    """Peak memory in MB, that of the process after its imports taken off."""
    before = peak_memory()
    episode, _ = episode_of(network, method)
    for _ in range(2):
        episode()
    peak = peak_memory()
    return {"own": peak - before, "peak": peak}
