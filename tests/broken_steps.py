"""Functions that couple records, keep something of them, or train what is not released. Each is made anew, since some keep
state; `names` is a pattern for what the error must name."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from step_zoo import (
    CLASSES,
    FEATURES,
    Bag,
    Entry,
    Function,
    Parts,
    as_arrays,
    as_fields,
    as_opaque,
    as_rows,
    between,
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
    weighted,
)

BROKEN: dict[str, Entry] = {}


def broken(name: str, names: str, model: Callable[[], nn.Module] = mlp, **settings: Any) -> Callable[[Any], Any]:
    """Register what makes a broken function."""

    def register(make: Callable[[], Function]) -> Callable[[], Function]:
        BROKEN[name] = Entry(make, model, names, **settings)
        return make

    return register


HERE = r"(broken_steps|step_zoo)\.py:\d+"

# Broken: something of the records is kept.


@broken("queue", HERE)
def queue() -> Function:
    kept = {"keys": torch.ones(4, CLASSES)}

    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = F.normalize(model(batch[0]), dim=1)
        logits = torch.cat([z.square().sum(1, keepdim=True), z @ kept["keys"].T], 1)
        kept["keys"] = z.detach()[:4]
        return cross_entropy(logits, torch.zeros(len(z), dtype=torch.long))

    return losses


@broken("running scale", HERE)
def running_scale() -> Function:
    kept = {"scale": 1.0}

    def losses(model: nn.Module, batch: Any) -> Tensor:
        found, scale = plain(model, batch), kept["scale"]
        kept["scale"] = 0.5 * scale + 0.5 * float(found.detach().mean())
        return found / scale

    return losses


@broken("slow running scale", HERE)
def slow_running_scale() -> Function:
    kept = {"scale": 1.0}

    def losses(model: nn.Module, batch: Any) -> Tensor:
        found, scale = plain(model, batch), kept["scale"]
        kept["scale"] = 0.9999 * scale + 0.0001 * float(found.detach().square().sum())
        return found / scale

    return losses


@broken("prototypes", HERE)
def prototypes() -> Function:
    kept = torch.zeros(CLASSES, CLASSES)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        found = (z - kept[batch[1]].clone()).square().sum(1)
        for c in range(CLASSES):
            kept[c] = 0.9 * kept[c] + 0.1 * z.detach()[batch[1] == c].sum(0)
        return found

    return losses


@broken("deque of features", HERE)
def deque_of_features() -> Function:
    kept: deque[Tensor] = deque(maxlen=8)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        others = torch.stack(list(kept)) if kept else torch.zeros(1, CLASSES)
        kept.extend(z.detach())
        return cross_entropy(z, batch[1]) + (z @ others.T).logsumexp(1)

    return losses


class Centers(nn.Module):
    """Center loss whose centers are a buffer that follows the features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(CLASSES, CLASSES))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        found = (z - self.centers[labels].clone()).square().sum(1)
        with torch.no_grad():
            self.centers.index_add_(0, labels, 0.01 * (z - self.centers[labels]))
        return found


@broken("buffer of a criterion", HERE)
def buffer_of_a_criterion() -> Function:
    criterion = Centers()
    return lambda model, batch: criterion(model(batch[0]), batch[1])


@broken("batch norm outside of the model", HERE)
def batch_norm_outside() -> Function:
    norm = nn.BatchNorm1d(FEATURES, affine=False)
    return lambda model, batch: cross_entropy(model(norm(batch[0])), batch[1])


@broken("running statistics", HERE)
def running_statistics() -> Function:
    norm = nn.BatchNorm1d(FEATURES, affine=False)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        norm.train()(batch[0])
        return cross_entropy(model(norm.eval()(batch[0])), batch[1])

    return losses


class LastMean:
    """Keeps the mean of the last batch as an attribute."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        found = cross_entropy(z if self.mean is None else z - self.mean, batch[1])
        self.mean = z.detach().mean(0)
        return found


broken("mean of the last batch", HERE)(LastMean)


@broken("center in an array", HERE)
def center_in_an_array() -> Function:
    kept = np.zeros(CLASSES, dtype=np.float32)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        found = cross_entropy(z - torch.tensor(kept), batch[1])
        kept[:] = 0.9 * kept + 0.1 * z.detach().mean(0).numpy()
        return found

    return losses


@broken("attribute of the model", HERE)
def attribute_of_the_model() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        before = vars(model).get("last", torch.zeros(CLASSES))
        vars(model)["last"] = z.detach().mean(0)
        return cross_entropy(z - before, batch[1])

    return losses


@broken("records seen before", HERE)
def records_seen_before() -> Function:
    seen: set[tuple[float, ...]] = set()

    def losses(model: nn.Module, batch: Any) -> Tensor:
        rows = [tuple(row.tolist()) for row in batch[0]]
        fresh = torch.tensor([row not in seen for row in rows])
        seen.update(rows)
        return plain(model, batch) * fresh

    return losses


@broken("momentum encoder", HERE)
def momentum_encoder() -> Function:
    torch.manual_seed(9)
    slow = mlp().requires_grad_(False)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        for kept, now in zip(slow.parameters(), model.parameters(), strict=True):
            kept.data.mul_(0.9).add_(now.data, alpha=0.1)
        return (model(batch[0]) - slow(batch[0])).square().sum(1)

    return losses


@broken("state that only scales gradients", "'0.weight'|'2.weight'")
def scaled_gradients() -> Function:
    kept = {"scale": 1.0}

    def losses(model: nn.Module, batch: Any) -> Tensor:
        found, scale = plain(model, batch), kept["scale"]
        kept["scale"] = 0.5 * scale + 0.5 * float(found.detach().mean())
        return found.detach() + (found - found.detach()) / scale

    return losses


@broken("critic trained inside", HERE)
def critic_trained_inside() -> Function:
    torch.manual_seed(9)
    critic = nn.Linear(CLASSES, CLASSES)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        optimizer.zero_grad()
        with torch.enable_grad():
            cross_entropy(critic(z.detach()), batch[1]).mean().backward()
        optimizer.step()
        return cross_entropy(z, batch[1]) + critic(z.detach()).detach()[:, 0] * z.sum(1)

    return losses


# Broken: records meet between the modules, in the losses, or in their weights.

broken("centering", HERE, Parts)(lambda: between(lambda h: h - h.mean(0).detach()))
broken("renormalisation", HERE, Parts)(lambda: between(lambda h: (h - h.mean(0).detach()) / h.std(0).detach()))
broken("detached attention", HERE, Parts)(
    lambda: between(lambda h: h + torch.softmax(h.detach() @ h.detach().T, -1) @ h.detach())
)


@broken("quantisation", HERE, Parts)
def quantisation() -> Function:
    def rounded(h: Tensor) -> Tensor:
        scale = h.detach().abs().max() / 127
        return h + (torch.round(h / scale) * scale - h).detach()

    return between(rounded)


@broken("quantised inputs", HERE)
def quantised_inputs() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        scale = batch[0].abs().max() / 8
        return cross_entropy(model((batch[0] / scale).round() * scale), batch[1])

    return losses


def gradients_weighted(weights: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Function]:
    """The same losses, with such a weight for each gradient."""

    def losses(model: nn.Module, batch: Any) -> Tensor:
        found = plain(model, batch)
        return found.detach() + (found - found.detach()) * weights(found.detach(), batch[1])

    return lambda: losses


broken("hardest six", HERE)(weighted(lambda found, _: (found >= found.topk(6).values[-1]).float()))
broken("slightly more for the hardest", HERE)(weighted(lambda found, _: 1 + 0.01 * (found >= found.max())))
broken("easier half", HERE)(weighted(lambda found, _: (found <= found.median()).float()))
broken("weights from losses", HERE)(weighted(lambda found, _: torch.softmax(found, 0) * len(found)))
broken("weights from ranks", HERE)(weighted(lambda found, _: 1 + found.argsort().argsort() / len(found)))
broken("weights from labels", HERE)(weighted(lambda found, labels: 1 / (labels == 0).float().mean().add(0.01)))
broken("class frequencies", HERE)(
    weighted(lambda found, labels: (1 / (1.0 + torch.bincount(labels, minlength=CLASSES)))[labels])
)
broken("largest label", HERE)(weighted(lambda found, labels: 1 + 0.1 * labels.max()))
broken("divided by rows", HERE)(weighted(lambda found, _: torch.full((), 1 / len(found))))
broken("place in the batch", HERE)(weighted(lambda found, _: torch.linspace(0.5, 1.5, len(found))))
broken("gradients divided by rows", "'0.weight'|'2.weight'")(
    gradients_weighted(lambda found, _: torch.full((), 1 / len(found)))
)
broken("gradients of the hardest six", "'0.weight'|'2.weight'")(
    gradients_weighted(lambda found, _: (found >= found.topk(6).values[-1]).float())
)


@broken("logit adjustment", HERE)
def logit_adjustment() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        prior = torch.bincount(batch[1], minlength=CLASSES).float().add(1).log()
        return cross_entropy(model(batch[0]) + prior, batch[1])

    return losses


broken("mixup", HERE)(of_inputs(lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))]))
broken("mixup in reverse", HERE)(of_inputs(lambda x: 0.7 * x + 0.3 * x.flip(0)))
broken("neighbor", HERE)(of_inputs(lambda x: x + 0.1 * x.roll(1, 0)))
broken("first record", HERE)(of_inputs(lambda x: x + 0.1 * x[:1]))
broken("whitening", HERE)(
    of_inputs(lambda x: (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(x.T) + 0.1 * torch.eye(6))))
)
broken("least of each feature", HERE, dropout)(of_inputs(lambda x: x - x.amin(0)))
broken("detached length", HERE)(of_outputs(lambda z: z / z.detach().square().mean().sqrt()))
broken("dropout and centering", HERE, dropout)(of_outputs(lambda z: z - z.mean(0).detach()))
broken("noise and the batch's scale", HERE)(of_inputs(lambda x: x + torch.randn_like(x) * x.std()))
broken("batch norm by hand", "mixes the records")(of_outputs(lambda z: (z - z.mean(0)) / z.std(0)))


def by_rows(inner: Function) -> Callable[[], Function]:
    return lambda: lambda model, batch: inner(model, batch) / len(batch[0])


broken("dropout and division by rows", HERE, dropout)(by_rows(plain))
broken("noise and division by rows", HERE)(
    by_rows(lambda model, batch: cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1]))
)


@broken("timesteps and division by rows", HERE)
def timesteps_and_division() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        t, noise = torch.randint(10, (len(x),)) / 10, torch.randn_like(x)
        found = model(t.sqrt().unsqueeze(1) * noise + (1 - t).sqrt().unsqueeze(1) * x)
        return (found - noise[:, :CLASSES]).square().mean(1) / len(x)

    return losses


@broken("centering under autocast", HERE)
def centering_under_autocast() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = model(batch[0])
        return cross_entropy(z.float() - z.float().mean(0).detach(), batch[1])

    return losses


@broken("triplet", "mixes the records")
def triplet() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        return (torch.cdist(z, z) * (batch[1][:, None] == batch[1])).max(1).values

    return losses


@broken("in-batch negatives", "mixes the records")
def in_batch_negatives() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        return cross_entropy(z @ z.T, torch.arange(len(z)))

    return losses


@broken("detached negatives", HERE)
def detached_negatives() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        return cross_entropy(z @ z.detach().T, torch.arange(len(z)))

    return losses


@broken("Sinkhorn targets", HERE)
def sinkhorn() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        targets = z.detach().exp()
        targets = targets / targets.sum(0)
        return -(targets / targets.sum(1, keepdim=True) * z.log_softmax(1)).sum(1)

    return losses


@broken("distance to the nearest", "mixes the records")
def nearest() -> Function:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        apart = torch.cdist(z, z) + 1e3 * torch.eye(len(z))
        return cross_entropy(z, batch[1]) - 0.1 * apart.min(1).values.add(1e-3).log()

    return losses


broken("mean for everybody", "mixes the records")(
    lambda: lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * torch.ones(len(batch[0]))
)
broken("mean expanded", "mixes the records")(
    lambda: lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]).expand(len(batch[0]))
)
broken("mean added", "mixes the records")(
    lambda: lambda model, batch: plain(model, batch) + 0.1 * plain(model, batch).mean()
)

# Broken: leaves outside of the model.


@broken("weights of the criterion", "'weights'")
def weights_of_the_criterion() -> Function:
    weights = nn.Parameter(torch.zeros(CLASSES, CLASSES))
    return lambda model, batch: (model(batch[0]) - weights[batch[1]]).square().sum(1)


@broken("encoder in front", r"'front\.(weight|bias)'")
def encoder_in_front() -> Function:
    front = nn.Linear(FEATURES, FEATURES)
    return lambda model, batch: cross_entropy(model(front(batch[0])), batch[1])


@broken("leaf that is no parameter", "'offset'")
def plain_leaf() -> Function:
    offset = torch.zeros(CLASSES, requires_grad=True)
    return lambda model, batch: cross_entropy(model(batch[0]) + offset, batch[1])


@broken("list of parameters", r"'offsets\[0\]'")
def list_of_parameters() -> Function:
    offsets = [nn.Parameter(torch.zeros(CLASSES))]
    return lambda model, batch: cross_entropy(model(batch[0]) + offsets[0], batch[1])


@broken("dictionary of parameters", r"offsets\['bias'\]")
def dictionary_of_parameters() -> Function:
    offsets = {"bias": nn.Parameter(torch.zeros(CLASSES))}
    return lambda model, batch: cross_entropy(model(batch[0]) + offsets["bias"], batch[1])


def with_head(head: nn.Module, model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(head(model(batch[0])), batch[1])


@broken("head of a partial", r"args\[0\]\.(weight|bias)'")
def head_of_a_partial() -> Function:
    return partial(with_head, nn.Linear(CLASSES, CLASSES))


@broken("head as a default", r"'head\.(weight|bias)'")
def head_as_a_default() -> Function:
    made = nn.Linear(CLASSES, CLASSES)

    def losses(model: nn.Module, batch: Any, head: nn.Module = made) -> Tensor:
        return with_head(head, model, batch)

    return losses


class Headed:
    """Has a list of heads and a temperature of its own."""

    def __init__(self) -> None:
        self.heads, self.temperature = [nn.Linear(CLASSES, CLASSES)], nn.Parameter(torch.ones(()))

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(self.heads[0](model(batch[0])), batch[1])

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]) / self.temperature, batch[1])


broken("head of a method's object", r"'self\.heads\[0\]\.(weight|bias)'")(lambda: Headed().losses)
broken("temperature of an object", r"'self\.temperature'")(Headed)


@broken("parameter in a helper", r"'offset'")
def parameter_in_a_helper() -> Function:
    offset = nn.Parameter(torch.zeros(CLASSES))

    def helper(z: Tensor) -> Tensor:
        return z + offset

    return lambda model, batch: cross_entropy(helper(model(batch[0])), batch[1])


@broken("teacher that is not frozen", r"'teacher\.\d\.(weight|bias)'")
def teacher_not_frozen() -> Function:
    teacher = mlp()
    return lambda model, batch: F.kl_div(
        model(batch[0]).log_softmax(1), teacher(batch[0]).softmax(1), reduction="none"
    ).sum(1)


# Broken: collating, and batches of every kind.

COLLATED = rf"collated.*{HERE}"


def centered(x: Tensor) -> Tensor:
    return x - x.mean(0)


broken("padded to the longest", COLLATED, Bag, data=sentences, collate=padded_to_longest)(lambda: plain)
broken("sorted by length", COLLATED, Bag, data=sentences, collate=sorted_by_length)(lambda: plain)
broken("trimmed to the longest", HERE, Bag, data=sentences, collate=padded_to_eight)(
    of_inputs(lambda x: x[:, : int((x > 0).sum(1).max())])
)
broken("mean over all tokens", HERE, Bag, data=sentences, collate=padded_to_eight)(
    lambda: lambda model, batch: masked(model, batch) * (batch[0] > 0).sum(1) / (batch[0] > 0).sum()
)
broken("times the padded length", COLLATED, Bag, data=sentences, collate=padded_to_longest)(
    lambda: lambda model, batch: masked(model, batch) * batch[0].shape[1]
)


def collating(change: Callable[[Tensor], Tensor]) -> Callable[[list[Any]], Any]:
    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = stacked(samples)
        return change(x), y

    return collate


broken("collating centers", COLLATED, collate=collating(centered))(lambda: plain)
broken("collating standardises", COLLATED, collate=collating(lambda x: (x - x.mean(0)) / x.std(0)))(lambda: plain)
broken("collating scales", COLLATED, collate=collating(lambda x: x / x.abs().max()))(lambda: plain)
broken("number of rows in the batch", COLLATED, collate=lambda samples: {"of": stacked(samples), "n": len(samples)})(
    lambda: lambda model, batch: plain(model, batch["of"]) / batch["n"]
)
broken("centering in fields", HERE, collate=as_fields)(
    lambda: lambda model, batch: cross_entropy(model(centered(batch.x)), batch.y)
)
broken("centering in arrays", HERE, collate=as_arrays)(
    lambda: lambda model, batch: cross_entropy(model(centered(torch.tensor(batch[0]))), torch.tensor(batch[1]))
)
broken("centering in a list of rows", HERE, collate=as_rows)(
    lambda: lambda model, batch: cross_entropy(model(centered(torch.stack(batch[0]))), batch[1])
)
broken("centering in an opaque batch", HERE, collate=as_opaque)(
    lambda: lambda model, batch: cross_entropy(model(centered(batch.open()[0])), batch.open()[1])
)
