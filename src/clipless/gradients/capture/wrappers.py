"""Wrappers around the model that make_private was not given: they copy, divide or average by themselves."""

from torch import nn

from clipless.errors import Misuse

_FSDP = "FullyShardedDataParallel", "divides parameters and averages gradients by itself"
# What FullyShardedDataParallel and fully_shard set on every module whose parameters they take over.
_MARK = "_fsdp_use_orig_params"
# The functions in which wrappers run the model, by their module: what each is called, and what it does.
WRAPPERS = {
    ("torch.nn.parallel.data_parallel", "DataParallel.forward"): (
        "DataParallel",
        "runs copies of the model on parts of the batch",
    ),
    ("torch.nn.parallel.parallel_apply", "parallel_apply.<locals>._worker"): (
        "DataParallel",
        "runs copies of the model on parts of the batch",
    ),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.forward"): _FSDP,
    ("torch.distributed.pipelining.stage", "_PipelineStageBase.forward_maybe_with_nosync"): (
        "PipelineStage",
        "divides the batch by itself and sends gradients that are not private yet to other processes",
    ),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.forward"): (
        "DeepSpeedEngine",
        "averages gradients by itself",
    ),
}
QUALIFIED = {function for _, function in WRAPPERS}


def refuse_sharded_later(module: nn.Module) -> None:
    """Raise if the module was sharded after make_private. FullyShardedDataParallel frees the memory of the parameters that
    it takes over: to read them would end the process."""
    if _MARK in vars(module):
        raise Misuse(
            "the model was put into FullyShardedDataParallel or fully_shard after make_private, which replace its "
            "parameters: call fully_shard first, then build the optimizer and call make_private (docs/distributed.md). "
            "FullyShardedDataParallel is not supported."
        )


def paused_too_late() -> Misuse:
    return Misuse(
        "the model runs in a DistributedDataParallel that make_private was not given, which would average gradients by "
        "itself: wrap the model first and give make_private the wrapper, or train the model without it."
    )


def wrapped_by(name: str, does: str) -> Misuse:
    return Misuse(
        f"the model runs in {name}, which {does}, where nothing is private yet: run the model itself, in one process for "
        "each device, or shard it by fully_shard before make_private (docs/distributed.md)."
    )
