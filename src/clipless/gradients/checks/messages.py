"""Errors for passes whose records cannot be told apart when they are run again."""

from clipless.errors import UnsupportedModule


def depends_on_others(name: str) -> UnsupportedModule:
    return UnsupportedModule(
        f"the output of {name!r} for one record depends on the other records of the batch (a statistic over the batch, a "
        "choice made for all of them), so no bound per record exists. Compute every record's output from that record alone; "
        "scale inputs by fixed constants."
    )


def lost_gradient(name: str) -> UnsupportedModule:
    return UnsupportedModule(
        f"the gradient of parameter {name!r} is not what plain autograd gives for it: the model uses it in a way that "
        "clipless does not see. Use it in the forward pass of the module that owns it, and return tensors, tuples, lists "
        "or dictionaries; clipless.check(model, loss_fn, batch) shows the difference."
    )


def unstable(name: str) -> UnsupportedModule:
    return UnsupportedModule(
        f"the output of {name!r} for one record changes visibly when the weights change in their last digit, so "
        "rounding hides whether records depend on each other. Training has probably diverged: take a smaller learning rate, "
        "or smaller initial weights."
    )
