"""Train a small causal language model, on whatever backend `ATTNX_BACKEND` names.

The model is plain PyTorch; only its attention is attnx's. It prints the same losses, to rounding,
with `ATTNX_BACKEND=numpy`, `torch` or `jax`, since a gradient means the same on each.
"""

import torch
import torch.nn.functional as F
from torch import nn

import attnx

TEXT = (
    """A query looks at every key that it may see. It weighs them by their scores, and takes the
mean of their values. What it may not see has no weight, and no effect. """
    * 4
)
LETTERS = sorted(set(TEXT))


class Attention(nn.Module):
    """Causal self-attention over the last `window` letters, with four heads that share two keys."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.size = width // 4
        self.visible = attnx.Causal() & attnx.Window(window, 0)
        self.q = nn.Linear(width, 4 * self.size, bias=False)
        self.kv = nn.Linear(width, 4 * self.size, bias=False)
        self.out = nn.Linear(4 * self.size, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `(batch, length, width)` to the same shape."""
        q = self.q(x).unflatten(-1, (4, self.size))
        k, v = self.kv(x).unflatten(-1, (4, self.size)).chunk(2, dim=-2)
        return self.out(attnx.attention(q, k, v, mask=self.visible, layout="bshd").flatten(-2))


class Model(nn.Module):
    """Two layers of attention and a perceptron each, on embedded letters."""

    def __init__(self, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.places = nn.Embedding(length, width)
        self.attention = nn.ModuleList(Attention(width, window=15) for _ in range(2))
        self.perceptron = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        nn.init.normal_(self.letters.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Letters `(batch, length)` to the scores of the next one, `(batch, length, letters)`."""
        x = self.letters(ids) + self.places.weight[: ids.shape[1]]
        for layer in range(2):
            x = x + self.attention[layer](self.norms[2 * layer](x))
            x = x + self.perceptron[layer](self.norms[2 * layer + 1](x))
        return F.linear(self.norms[4](x), self.letters.weight)


def main(steps: int = 40, batch: int = 8, length: int = 32) -> None:
    """Print who computes attention, and the loss of every fourth step."""
    q = torch.zeros(1, 1, 1, 8)
    print(f"attention by {attnx.plan(q, q, q).backend}")
    torch.manual_seed(0)
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    model = Model(length=length)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        starts = torch.randint(len(ids) - length, (batch, 1))
        rows = ids[starts + torch.arange(length + 1)]
        scores = model(rows[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 4 == 0 or step == steps - 1:
            print(f"step {step:2}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
