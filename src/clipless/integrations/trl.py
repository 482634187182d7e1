"""TRL: an SFTTrainer that trains privately. See docs/huggingface.md."""

from collections.abc import Callable
from typing import Any, ClassVar

from trl.trainer.sft_trainer import SFTTrainer

from clipless.errors import InvalidArgument
from clipless.integrations.transformers import PrivateTrainer

# What a setting is, whether it is on, and what to do instead.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("packing", lambda args: args.packing, "it puts several records into one row: leave it out"),
    ("padding_free", lambda args: args.padding_free, "it puts all records of a batch into one row: leave it out"),
    (
        "loss_type",
        lambda args: args.loss_type != "nll",
        "the loss of a record is the mean over its own tokens: override compute_record_losses(model, inputs) for another",
    ),
    (
        "activation_offloading",
        lambda args: args.activation_offloading,
        "it is part of a training step that is not used here: use gradient_checkpointing=True",
    ),
)


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):
    """TRL's SFTTrainer with `privacy=clipless.Privacy(...)`, and otherwise a `PrivateTrainer`: a record is a row of the data
    set as it is tokenized, and its loss is the mean over its own labelled tokens."""

    _evaluation_loss: ClassVar[Callable[..., Any]] = SFTTrainer.compute_loss

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse settings that break the promise."""
        for name, is_on, remedy in _REFUSED:
            if is_on(self.args):
                raise InvalidArgument(
                    f"{name}={getattr(self.args, name)!r} cannot be used in private training: {remedy}."
                )
        super().create_accelerator_and_postprocess()
