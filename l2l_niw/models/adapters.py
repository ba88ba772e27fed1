"""Low-rank adapters beside a network's linear layers, for tasks that differ by little."""

from torch import nn

from l2l_niw.errors import ModelError, require
from l2l_niw.utils._checks import check_number


def add_adapters(module: nn.Module, rank: int = 4, freeze: bool = True) -> nn.Module:
    """
    **Description**

    Adds low-rank adapters of peft to every linear layer of a network, in place, and returns it: W x becomes
    W x + B A x, with A of `rank` rows. B starts at 0, so that the network computes what it did. Give NIW
    `random='*lora_*'`, and tasks differ by the adapters alone.

    **Arguments**

    * **module** (Module) - The network, or the part of it that tasks adapt.
    * **rank** (int, *optional*, default=4) - Rows of A.
    * **freeze** (bool, *optional*, default=True) - Whether the network's own weights are frozen. Otherwise all tasks
        share them, and they are trained with the query's gradient.

    **References**

    1. Hu et al. 2022. "LoRA: Low-Rank Adaptation of Large Language Models." ICLR.

    **Example**

    ~~~python
    network = add_adapters(blocks[-2:])
    niw = NIW(EpisodicModel(network, NearestCentroid('cosine')), lr=0.01, random='*lora_*')
    ~~~
    """
    check_number("rank", rank, 1, whole=True)
    names = [name for name, part in module.named_modules() if type(part) is nn.Linear and name]
    if not names:
        raise ModelError(f"module: {type(module).__name__} has no linear layer inside it that could be adapted.")
    if any("lora_" in name for name, _ in module.named_parameters()):
        raise ModelError("module has adapters already.")
    wanted = {name: p.requires_grad and not freeze for name, p in module.named_parameters()}
    peft = require("peft", "adapters")
    training = module.training
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names), module)
    for name, p in module.named_parameters():
        p.requires_grad_(wanted.get(own_name(name), True))
    return module.train(training)


def own_name(name: str) -> str:
    """What a weight was called before adapters stood beside it."""
    return name.replace(".base_layer.", ".")
