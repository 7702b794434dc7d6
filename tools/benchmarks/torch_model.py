"""AMDIM for images of 32 pixels in plain PyTorch: what the benchmarks compare with.

Written as the authors' code computes it: each view through the encoder by itself, convolutions as
convolutions, losses and classifiers in one graph, with PyTorch's own Adam. It is for comparisons.
"""

import torch
import torch.nn.functional as F
from torch import nn

_TASKS = ((1, 5), (1, 7), (5, 5))


class _Residual(nn.Module):
    """conv w×w, ReLU, conv 1×1, added to the pooled input."""

    def __init__(self, inputs: int, outputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, width, stride, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 1, bias=False)
        nn.init.zeros_(self.conv2.weight)
        self.width, self.stride, self.padding = width, stride, outputs - inputs

    def forward(self, x):
        base = x if self.width == 1 else F.avg_pool2d(x, self.width, self.stride)
        if self.padding:
            base = F.pad(base, [0, 0, 0, 0, 0, self.padding])
        return base + self.conv2(F.relu(self.conv1(x)))


def _block(inputs: int, outputs: int, width: int, stride: int, depth: int) -> nn.Sequential:
    rest = [_Residual(outputs, outputs, 1, 1) for _ in range(depth - 1)]
    return nn.Sequential(_Residual(inputs, outputs, width, stride), *rest)


class Encoder(nn.Module):
    """[N, 3, 32, 32] -> f7 [N, 4·ndf, 7, 7], f5 [N, 4·ndf, 5, 5], f1 [N, D]."""

    def __init__(self, ndf: int, n_rkhs: int, depth: int):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, ndf, 3), nn.ReLU(), _Residual(ndf, ndf, 1, 1))
        self.to7 = nn.Sequential(
            _block(ndf, 2 * ndf, 4, 2, depth), _block(2 * ndf, 4 * ndf, 2, 2, depth)
        )
        self.to5 = _block(4 * ndf, 4 * ndf, 3, 1, depth)
        self.to3 = _block(4 * ndf, 4 * ndf, 3, 1, depth)
        self.top = nn.Sequential(_Residual(4 * ndf, n_rkhs, 3, 1), nn.BatchNorm2d(n_rkhs))

    def forward(self, images):
        f7 = self.to7(self.stem(images))
        f5 = self.to5(f7)
        return f7, f5, self.top(self.to3(f5)).flatten(1)


class _Embedding(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 1, bias=False)
        nn.init.zeros_(self.conv2.weight)
        self.shortcut, self.norm = nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs)
        with torch.no_grad():
            same = torch.eye(outputs, inputs)[:, :, None, None]
            self.shortcut.weight.uniform_(-0.01, 0.01).mul_(1 - same).add_(same)

    def forward(self, x):
        return self.norm(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class TrainedModel(nn.Module):
    """Encoder, embeddings and both classifiers, with their training step.

    `settings` and `optimizer` are a ModelConfig and an OptimizerConfig of amdim_tf.
    """

    def __init__(self, settings, optimizer, classes: int):
        super().__init__()
        self.clip, self.regularization = settings.score_clip, settings.score_regularization
        ndf, n_rkhs, depth = settings.ndf, settings.n_rkhs, settings.n_depth
        self.encoder = Encoder(ndf, n_rkhs, depth)
        self.embedding7 = _Embedding(4 * ndf, n_rkhs)
        self.embedding5 = _Embedding(4 * ndf, n_rkhs)
        self.linear = nn.Linear(n_rkhs, classes)
        self.mlp = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(n_rkhs, 1024, bias=False), nn.BatchNorm1d(1024),
            nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, classes),
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(
            self.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta_1, optimizer.beta_2),
            eps=1e-8,
            weight_decay=optimizer.weight_decay,
        )

    def set_learning_rate(self, rate: float) -> None:
        """From the next step on."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def train_step(self, view1, view2, labels) -> float:
        """One step of optimization; returns the sum of the NCE losses."""
        views = [self._embed(view) for view in (view1, view2)]
        loss, regularizer = 0.0, 0.0
        for n, m in _TASKS:
            for source, target in (views, views[::-1]):
                of_task, squares = _nce(_antecedents(source[n]), target[m].flatten(2), self.clip)
                loss = loss + of_task / 2
                regularizer = regularizer + self.regularization * squares / 2
        features = torch.cat([view[1] for view in views]).detach()
        labels, total = torch.cat([labels, labels]), loss + regularizer
        for classifier in (self.linear, self.mlp):
            logits = classifier(features)
            clipped = 10 * torch.tanh(logits / 10)
            total = total + F.cross_entropy(clipped, labels) + 1e-3 * (logits**2).mean()
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        return loss.item()

    def _embed(self, images):
        f7, f5, f1 = self.encoder(images)
        return {1: f1, 5: self.embedding5(f5), 7: self.embedding7(f7)}


def _antecedents(embedding):
    """φ1, or one location of each image."""
    if embedding.dim() == 2:
        return embedding
    flat = embedding.flatten(2)  # [B, D, S]
    places = torch.randint(flat.shape[2], [flat.shape[0], 1, 1]).expand(-1, flat.shape[1], 1)
    return flat.gather(2, places)[:, :, 0]  # [B, D]


def _nce(antecedents, consequents, clip):
    """Loss, and the mean of the squared scores. antecedents: [B, D]; consequents: [B, D, S]."""
    B, D, S = consequents.shape
    flat = consequents.permute(1, 0, 2).reshape(D, B * S)
    scores = (antecedents @ flat / D**0.5).reshape(B, B, S)
    squares = (scores**2).mean()
    if clip:
        scores = clip * torch.tanh(scores / clip)
    others = 1 - torch.eye(B)[:, :, None]  # [B, B, 1]
    shift = scores.amax(dim=(1, 2))  # [B]
    negatives = (others * torch.exp(scores - shift[:, None, None])).sum(dim=(1, 2))  # [B]
    positives = scores.diagonal().t() - shift[:, None]  # [B, S]
    log_probabilities = positives - torch.log(torch.exp(positives) + negatives[:, None])
    return -log_probabilities.mean(), squares
