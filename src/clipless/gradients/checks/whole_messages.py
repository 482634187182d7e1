"""Errors for functions from batch to losses that keep state, mix records or are not deterministic."""

from clipless.errors import CliplessError, Misuse

UNSEEN_RECORDS = (
    "clipless cannot choose records of this batch, so it does not see whether record_losses mixes their values. Give "
    "private.step what private.loader yields, built of tensors in tuples, lists, dictionaries or dataclasses."
)


def keeps_state(where: str) -> CliplessError:
    return Misuse(
        f"record_losses gave other losses when it was called again on the same batch{where}: it keeps something from "
        "call to call. If that comes from the records (a queue, a running mean or scale, a center), no noise protects it. "
        "Compute losses from the batch and the model alone; count steps and update teachers outside of the function, and "
        "draw from torch's generator."
    )


def depends_on_others(where: str) -> CliplessError:
    return Misuse(
        f"record_losses gave one record another loss when other records of the batch were replaced, left out or "
        f"reordered{where}: it mixes records (a statistic of the batch, a choice among records, a weight from other "
        "labels, a division by the number of rows), so no bound per record exists. Compute each record's loss from that "
        "record alone."
    )


def lost_gradient(name: str) -> CliplessError:
    return Misuse(
        f"the gradient of parameter {name!r} for half of the records is not what plain autograd gives for them alone: "
        "record_losses uses the parameter in a way that clipless does not see, or its gradients depend on the other "
        "records. Use the parameter in the forward pass of the module that owns it; clipless.check(model, record_losses, "
        "batch) shows the difference."
    )


def collated_with_others(where: str) -> CliplessError:
    return Misuse(
        f"records that are collated alone have other losses than records that are collated together{where}: padding, a "
        "statistic or an order in the collate function reaches the losses, so one record tells every other how long or how "
        "large it is. Mask padding wherever the model could see it (attention_mask, position ids, pooling, means over "
        "tokens), or pad to a fixed length; and compute nothing over the batch in the collate function."
    )


def not_fetched(failure: str) -> CliplessError:
    return Misuse(
        f"a checked step fetches a few records again, in the main process, and the data set raised {failure}. Make it "
        "readable in every process (open files in __getitem__, where they are not open yet), or use num_workers=0."
    )


def not_collated(reason: str) -> CliplessError:
    return Misuse(
        "clipless cannot see whether padding, or a statistic in the collate function, tells one record about the others: "
        f"{reason}. Pad every record to one length; draw random numbers in the data set, or from torch's, NumPy's or "
        "Python's generator; and give private.step what private.loader yields, unchanged."
    )


def collates_at_random() -> CliplessError:
    return Misuse(
        "the collate function gave other rows when it was called twice on the same records, from a random generator that "
        "clipless does not find, or from what it keeps from call to call. Draw from torch's, NumPy's or Python's generator, "
        "and keep nothing."
    )


def unstable(where: str) -> CliplessError:
    return Misuse(
        f"losses change visibly when the weights change in their last digit{where}, so rounding hides whether records "
        "depend on each other. Training has probably diverged: use a smaller learning rate, or smaller initial weights."
    )
