"""Ensembles of other rows."""

import torch
from regression.base import Plain

from l2l_niw.heads.predictions import GaussianMixture


class Ensemble(Plain):
    """
    **Description**

    Several methods, trained on the same batches, each by itself. A prediction is the mixture of theirs, and the loss
    the mean of theirs.

    **Arguments**

    * **make** (callable) - Makes a member, at random initial weights.
    * **members** (int) - How many.
    * **by_evidence** (bool, *optional*, default=False) - Whether members count by the support's evidence, as Bayesian
        ridge has it, instead of equally.
    """

    def __init__(self, make, members, by_evidence=False):
        self.members, self.by_evidence = [make() for _ in range(members)], by_evidence

    def groups(self, lr):
        return [group for member in self.members for group in member.groups(lr)]

    def backward(self, tasks):
        return sum(member.backward(tasks) for member in self.members) / len(self.members)

    @torch.no_grad()
    def predict(self, tasks):
        parts = [member.predict(tasks) for member in self.members]
        mixture = type(parts[0]).mix(parts)
        if not self.by_evidence:
            return mixture
        evidence = torch.stack([member.model(*tasks.support).log_prob(tasks.y) for member in self.members], -1)
        means, scales, _ = mixture.tensors()
        return GaussianMixture(means, scales, evidence.unsqueeze(-2).expand(means.shape[:-1]))
