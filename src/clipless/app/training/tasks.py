"""What a model is trained for: the loss of each record, and what is measured on the test records."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

IGNORED = -100


@dataclass(frozen=True)
class LearningTask:
    """`losses` returns one loss per record, (B,); `measure` a sum over test records and the number to divide it by."""

    metric: str
    higher_is_better: bool
    losses: Callable[[Tensor, Tensor], Tensor]
    measure: Callable[[Tensor, Tensor], tuple[float, float]]

    def merit(self, score: float) -> float:
        """The score as a number of which more is better."""
        return score if self.higher_is_better else -score


def _class_losses(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def _hits(output: Tensor, y: Tensor) -> tuple[float, float]:
    return float((output.argmax(1) == y).sum()), len(y)


def _squared_errors(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().sum(1)


def _label_losses(output: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, y, reduction="none").sum(1)


def _label_hits(output: Tensor, y: Tensor) -> tuple[float, float]:
    return float(((output > 0) == (y > 0.5)).sum()), y.numel()


def _token_losses(output: Tensor, y: Tensor) -> Tensor:
    """The mean over a record's own tokens, so that no record's loss depends on another's length."""
    losses = F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none", ignore_index=IGNORED).view(y.shape)
    return losses.sum(1) / (y != IGNORED).sum(1).clamp(min=1)


def _token_sum(output: Tensor, y: Tensor) -> tuple[float, float]:
    total = F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=IGNORED)
    return float(total), float((y != IGNORED).sum())


TASKS = {
    "classes": LearningTask("accuracy", True, _class_losses, _hits),
    "numbers": LearningTask(
        "squared_error", False, _squared_errors, lambda o, y: (float(_squared_errors(o, y).sum()), len(y))
    ),
    "labels": LearningTask("label_accuracy", True, _label_losses, _label_hits),
    "tokens": LearningTask("loss_per_token", False, _token_losses, _token_sum),
}


@torch.no_grad()
def evaluate(model: nn.Module, dataset: TensorDataset, task: LearningTask, batch_size: int = 1024) -> float:
    """The task's metric on a data set, in evaluation mode. The model's mode is restored."""
    training = model.training
    model.eval()
    parts = zip(*(tensor.split(batch_size) for tensor in dataset.tensors), strict=True)
    found = [task.measure(model(x), y) for x, y in parts]
    model.train(training)
    return sum(total for total, _ in found) / sum(count for _, count in found)


def accuracy(model: nn.Module, dataset: TensorDataset, batch_size: int = 1024) -> float:
    """The fraction of records classified correctly, in evaluation mode. The model's mode is restored."""
    return evaluate(model, dataset, TASKS["classes"], batch_size)
