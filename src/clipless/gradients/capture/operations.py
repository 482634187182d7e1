"""Operations on traced tensors in the forward pass of an open micro-batch: located, and tapped where they meet records."""

from typing import Any

from torch import Tensor

from clipless.gradients.capture import messages
from clipless.gradients.capture.crossing import Crossing
from clipless.gradients.capture.frames import CurrentPass
from clipless.gradients.capture.hooks import Tap
from clipless.gradients.capture.layout import Place
from clipless.gradients.capture.locating import locate_operation
from clipless.gradients.capture.receiver import Receiver
from clipless.gradients.capture.rows import Located


class RecordedOperations:
    """The `Operations` of the recorder: their gradients go to the receiver."""

    def __init__(self, current: CurrentPass, receiver: Receiver) -> None:
        self._current, self._receiver = current, receiver

    def locate(self, owner: str, operands: list[Any], results: list[Tensor]) -> Located:
        """Where the records lie in the operands, tensors and sizes, and in the results of an operation.

        Raises outside the forward pass of an open micro-batch.
        """
        current, micro = self._current, self._receiver.micro
        inside = current.frames[-1].place if current.frames else Place("", 0)
        place = current.operations.place(owner, inside)
        if micro is None:
            current.pattern.forget()
            raise messages.left_the_model(owner)
        found = locate_operation(current.pattern, place, operands, results, micro.records)
        if found.rows:
            current.route(micro)
        return found

    def tap(self, crossing: Crossing, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        """The results of an operation in which parameters met the records, tapped."""
        current, receiver = self._current, self._receiver
        crossing.micro, crossing.forward_pass, crossing.receive = (
            receiver.micro,
            current.forward_pass,
            receiver.crossing,
        )
        receiver.expect([root.name for traced in crossing.traced for root in traced.roots])
        return Tap.apply(current.anchor, crossing, *outputs)  # type: ignore[no-untyped-call]

    def give_up(self, owner: str, operation: str) -> None:
        """Raise: a probe did not find out that the module must be taken as a whole, and now it is too late."""
        self._current.pattern.forget()
        raise messages.in_place(owner, operation)
