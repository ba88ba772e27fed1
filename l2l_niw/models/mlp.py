"""A multi-layer perceptron: regression's backbone, and the heads' encoders and decoders."""

from typing import Callable, Sequence

from torch import Tensor, nn

from l2l_niw.utils._checks import check_number


class MLP(nn.Module):
    """
    **Description**

    Linear layers with an activation between them, and none after the last. As a backbone, give
    `activate_last=True`: its outputs are then features, and the head is the last layer.

    **Arguments**

    * **inputs** (int) - Dimensions of an input.
    * **widths** (sequence) - Widths of the layers, the output's last.
    * **activation** (callable, *optional*, default=torch.nn.ReLU) - Makes an activation.
    * **activate_last** (bool, *optional*, default=False) - Whether one follows the last layer too.

    **Example**

    ~~~python
    model = EpisodicModel(MLP(1, (40, 40), activate_last=True), Ridge(task='regression'))
    ~~~
    """

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        activation: Callable[[], nn.Module] = nn.ReLU,
        activate_last: bool = False,
    ):
        super().__init__()
        sizes = [inputs, *widths]
        for size in sizes:
            check_number("a width of an MLP", size, 1, whole=True)
        layers = []
        for before, after in zip(sizes, sizes[1:]):
            layers += [nn.Linear(before, after), activation()]
        self.layers = nn.Sequential(*(layers if activate_last else layers[:-1]))

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's outputs, (..., widths[-1]), from inputs (..., inputs)."""
        return self.layers(x)
