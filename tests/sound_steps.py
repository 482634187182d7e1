"""Functions in which every record has a loss of its own, written in all the ways that users write them."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from step_zoo import (
    CLASSES,
    FEATURES,
    Attention,
    Bag,
    Entry,
    Function,
    Parts,
    Recurrent,
    TimeMajor,
    as_arrays,
    as_fields,
    as_opaque,
    as_rows,
    between,
    convolution,
    cross_entropy,
    dropout,
    masked,
    mlp,
    of_inputs,
    of_outputs,
    padded_to_eight,
    padded_to_longest,
    plain,
    sentences,
    sorted_by_length,
    stacked,
    time_major,
    weighted,
)

SOUND: dict[str, Entry] = {}


def sound(name: str, model: Callable[[], nn.Module] = mlp, **settings: Any) -> Callable[[Any], Any]:
    """Register what makes a sound function."""

    def register(make: Callable[[], Function]) -> Callable[[], Function]:
        SOUND[name] = Entry(make, model, **settings)
        return make

    return register


sound("plain")(lambda: plain)
sound("dropout", dropout)(lambda: plain)
sound("LSTM", Recurrent)(lambda: plain)
sound("attention with dropout", Attention)(lambda: plain)
sound("convolution", convolution)(lambda: plain)
sound("in parts", Parts)(lambda: between(torch.tanh))
sound("forward()")(lambda: lambda model, batch: cross_entropy(model.forward(batch[0]), batch[1]))
sound("two passes", dropout)(lambda: lambda model, batch: plain(model, batch) + plain(model, batch))
sound("noise on inputs")(of_inputs(lambda x: x + torch.randn_like(x)))
sound("masked inputs", dropout)(of_inputs(lambda x: x * (torch.rand(x.shape) > 0.15)))
sound("rolled by chance")(of_inputs(lambda x: torch.roll(x, random.randint(0, 3), 1)))
sound("numbers from NumPy")(
    of_inputs(lambda x: x * float(np.random.rand()) + torch.tensor(np.random.rand(*x.shape)).float())
)
sound("sorted features")(of_inputs(lambda x: x.sort(1).values))
sound("clamped")(of_outputs(lambda z: z.clamp(-3, 3)))
sound("large logits")(of_outputs(lambda z: 1e3 * z))
sound("tiny losses")(lambda: lambda model, batch: 1e-9 * plain(model, batch))
sound("hinge at zero")(lambda: lambda model, batch: F.relu(plain(model, batch) - 100))
sound("class weights")(weighted(lambda found, labels: torch.tensor([1.0, 5.0, 9.0])[labels]))
sound("focal loss")(weighted(lambda found, _: (1 - (-found).exp()).square()))
sound("label smoothing")(
    lambda: lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none", label_smoothing=0.1)
)
sound("latent noise")(
    lambda: lambda model, batch: (lambda z: (z + torch.randn_like(z)).square().sum(1))(model(batch[0]))
)
sound("two best classes")(lambda: lambda model, batch: model(batch[0]).topk(2, 1).values.sum(1))
sound("Gumbel softmax")(
    lambda: lambda model, batch: -(F.gumbel_softmax(model(batch[0]), hard=True) * F.one_hot(batch[1], CLASSES)).sum(1)
)


@sound("R-drop", dropout)
def r_drop() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        one, other = model(batch[0]), model(batch[0])
        apart = F.kl_div(one.log_softmax(1), other.softmax(1), reduction="none").sum(1)
        return cross_entropy(one, batch[1]) + apart

    return losses


@sound("distillation")
def distillation() -> Function:
    torch.manual_seed(9)
    teacher = mlp().requires_grad_(False)
    return lambda model, batch: F.kl_div(
        model(batch[0]).log_softmax(1), teacher(batch[0]).softmax(1), reduction="none"
    ).sum(1)


@sound("diffusion")
def diffusion() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        t, noise = torch.randint(10, (len(x),)) / 10, torch.randn_like(x)
        found = model(t.sqrt().unsqueeze(1) * noise + (1 - t).sqrt().unsqueeze(1) * x)
        return (found - noise[:, :CLASSES]).square().mean(1)

    return losses


@sound("as many draws as the data say")
def data_dependent_draws() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone()
        x[x > 0] += torch.randn(int((x > 0).sum()))
        return cross_entropy(model(x), batch[1])

    return losses


@sound("skipped by chance", dropout)
def skipped_by_chance() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0] if float(torch.rand(())) < 0.5 else -batch[0]), batch[1])

    return losses


@sound("autocast inside")
def autocast_inside() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(model, batch)

    return losses


@sound("autocast around the model", Attention)
def autocast_around_the_model() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = model(batch[0])
        return cross_entropy(z.float(), batch[1])

    return losses


@sound("a torch generator of its own")
def own_generator() -> Function:
    generator = torch.Generator().manual_seed(3)
    return of_inputs(lambda x: x + torch.randn(x.shape, generator=generator))()


@sound("a NumPy generator of its own")
def own_numpy_generator() -> Function:
    generator = np.random.default_rng(3)
    return of_inputs(lambda x: x + torch.tensor(generator.normal(size=x.shape)).float())()


class Drawing:
    """Draws from a legacy NumPy generator that it holds."""

    def __init__(self) -> None:
        self.settings = {"generator": np.random.RandomState(3)}

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        noise = self.settings["generator"].normal(size=batch[0].shape)
        return cross_entropy(model(batch[0] + torch.tensor(noise).float()), batch[1])


sound("a generator of its object")(lambda: Drawing().losses)


@sound("gradients of another network")
def gradients_of_another_network() -> Function:
    torch.manual_seed(9)
    other = mlp().requires_grad_(False)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (push,) = torch.autograd.grad(cross_entropy(other(x), batch[1]).sum(), x)
        return cross_entropy(model((x + 0.1 * push.sign()).detach()), batch[1])

    return losses


@sound("inputs that require a gradient")
def inputs_with_gradient() -> Function:
    return of_inputs(lambda x: x.clone().requires_grad_())()


@sound("the model checkpointed, reentrant")
def reentrant() -> Function:
    return lambda model, batch: cross_entropy(
        checkpoint(model, batch[0].clone().requires_grad_(), use_reentrant=True), batch[1]
    )


@sound("a first pass without gradient")
def first_pass_without_gradient() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            p = model(batch[0]).softmax(1)
        return cross_entropy(model(batch[0] + 0.1 * p.sum(1, keepdim=True)), batch[1])

    return losses


@sound("changes the batch in place")
def changes_in_place() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        batch[0].mul_(2.0).add_(torch.randn_like(batch[0]))
        return plain(model, batch)

    return losses


def scaled(scale: float, model: nn.Module, batch: Any) -> Tensor:
    return scale * plain(model, batch)


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return self.scale * plain(model, batch)

    __call__ = losses


sound("a partial")(lambda: partial(scaled, 2.0))
sound("a bound method")(lambda: Scaled(2.0).losses)
sound("an object")(lambda: Scaled(2.0))


class Criterion(nn.Module):
    """A frozen scale as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES), requires_grad=False)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]) * self.scale, batch[1])


sound("a module")(Criterion)


@sound("a path by chance, keys that are popped", collate=lambda samples: dict(zip("xy", stacked(samples), strict=True)))
def path_by_chance() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        labels, z = batch.pop("y"), model(batch.pop("x"))
        return cross_entropy(z, labels) if float(torch.rand(())) < 0.5 else cross_entropy(z.sin().exp(), labels)

    return losses


@sound("a path by chance, after changes in place")
def path_by_chance_in_place() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0].mul_(2.0))
        return cross_entropy(z, batch[1]) if float(torch.rand(())) < 0.5 else cross_entropy(z.sin().exp(), batch[1])

    return losses


# Batches of every kind.


def by_name(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


class Encoding(dict):  # type: ignore[type-arg]
    """A mapping with attributes, like the batches of tokenizers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Listed(list):  # type: ignore[type-arg]
    """A list that is made in a way of its own."""

    def __init__(self, content: Any, *, name: str = "batch") -> None:
        super().__init__(content)
        self.name = name


def popping(model: nn.Module, batch: Any) -> Tensor:
    labels = batch.pop("y")
    return cross_entropy(model(input=batch.pop("x")), labels)


def as_mapping(kind: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    def collate(samples: list[Any]) -> Any:
        x, y = stacked(samples)
        return kind(x=x, y=y)

    return collate


def ragged(samples: list[Any]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Images, and for each of them as many boxes as there are, as in detection."""
    targets = [{"boxes": x[:CLASSES].repeat(1 + y, 1), "label": torch.tensor([y])} for x, y in samples]
    return torch.stack([x for x, _ in samples]), targets


def detection(model: nn.Module, batch: Any) -> Tensor:
    pairs = zip(model(batch[0]), batch[1], strict=True)
    found = [cross_entropy(z[None], t["label"])[0] + (t["boxes"] - z).square().mean() for z, t in pairs]
    return torch.stack(found)


def with_constants(samples: list[Any]) -> dict[str, Any]:
    x, y = stacked(samples)
    return {"x": x, "y": y, "positions": torch.arange(FEATURES), "split": "train", "scale": 0.5, "extra": None}


sound("a dictionary", collate=as_mapping(dict))(lambda: by_name)
sound("an encoding", collate=as_mapping(Encoding))(lambda: by_name)
sound("keys that are popped", collate=as_mapping(Encoding))(lambda: popping)
sound("a list of its own kind", collate=lambda samples: Listed(stacked(samples)))(lambda: plain)
sound("fields", collate=as_fields)(lambda: lambda model, batch: cross_entropy(model(batch.x), batch.y))
sound("fields changed in place", collate=as_fields)(
    lambda: lambda model, batch: cross_entropy(model(batch.x.mul_(2.0)), batch.y)
)
sound("arrays", collate=as_arrays)(
    lambda: lambda model, batch: cross_entropy(model(torch.tensor(batch[0])), torch.tensor(batch[1]))
)
sound("arrays changed in place", collate=as_arrays)(
    lambda: (
        lambda model, batch: cross_entropy(
            model(torch.as_tensor(np.multiply(batch[0], 2.0, out=batch[0]))), torch.tensor(batch[1])
        )
    )
)
sound("an opaque batch", collate=as_opaque)(
    lambda: lambda model, batch: cross_entropy(model(batch.open()[0]), batch.open()[1])
)
sound("a list of rows", collate=as_rows)(
    lambda: lambda model, batch: cross_entropy(model(torch.stack(batch[0])), batch[1])
)
sound("strings", collate=lambda samples: {"x": stacked(samples)[0], "name": [f"class {y}" for _, y in samples]})(
    lambda: lambda model, batch: cross_entropy(model(batch["x"]), torch.tensor([int(n[6:]) for n in batch["name"]]))
)
sound("boxes", collate=ragged)(lambda: detection)
sound("constants", collate=with_constants)(
    lambda: lambda model, batch: cross_entropy(model(batch["x"] + batch["scale"] * batch["positions"]), batch["y"])
)
sound("a mask", Bag, data=sentences, collate=padded_to_longest)(lambda: masked)
sound("a mask, sorted by length", Bag, data=sentences, collate=sorted_by_length)(lambda: masked)
sound("a fixed length", Bag, data=sentences, collate=padded_to_eight)(lambda: plain)
sound("time first", TimeMajor, data=sentences, collate=time_major)(
    lambda: lambda model, batch: cross_entropy(model(batch[0], batch[1]), batch[2])
)
sound("time first, as many as records", TimeMajor, data=sentences, collate=partial(time_major, length=8))(
    lambda: lambda model, batch: cross_entropy(model(batch[0], batch[1]), batch[2])
)
