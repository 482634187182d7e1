"""A fixed spread of the zoo against single records, and the models that lie differently through private training."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clipless
import model_zoo as zoo
from clipless.torch_internals import GROUPED_PRODUCTS

SPREAD = (
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM"),
    *("OPTForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "ProphetNetForCausalLM", "Qwen3NextForCausalLM"),
    *(
        "BloomForCausalLM",
        "Gemma2ForCausalLM",
        "RwkvForCausalLM",
        "DebertaForMaskedLM",
        "XLNetForSequenceClassification",
    ),
    *(
        "BertForMultipleChoice",
        "T5EncoderModel",
        "SwitchTransformersForConditionalGeneration",
        "SwinForImageClassification",
    ),
    *("Swinv2ForImageClassification", "ViTForImageClassification", "BeitForImageClassification"),
    *(
        "DebertaV2ForSequenceClassification",
        "SEWDForCTC",
        "Wav2Vec2ForCTC",
        "WavLMForSequenceClassification",
        "SegformerForImageClassification",
    ),
)
CASES = {case.name: case for case in zoo.transformers_cases() if case.name in SPREAD}


# Mixtures of experts for which transformers has an operator of its own where torch has no grouped product, before 2.8.
GROUPED = (*SPREAD[:4], "Qwen3NextForCausalLM")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SPREAD)
def test_is_exact(name: str) -> None:
    verdict = zoo.judge(CASES[name])
    assert verdict.kind == ("exact" if GROUPED_PRODUCTS or name not in GROUPED else "refused"), verdict


def test_a_case_that_mixes_its_records_is_not_called_exact() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            return out - out.mean(0)

    assert zoo.judge(zoo.Case("own", "centred", Centred, lambda: (torch.randn(4, 3),))).kind == "mixes"


# Batches of 3, 2, 1, 0 and 2 records.
SEED = 5
STEPPED = {
    "Mixtral": "MixtralForCausalLM",
    "Qwen3-MoE": "Qwen3MoeForCausalLM",
    "OPT": "OPTForCausalLM",
    "Swin": "SwinForImageClassification",
    "Mamba2": "Mamba2ForCausalLM",
    "T5": "T5ForConditionalGeneration",
    "Wav2Vec2": "Wav2Vec2ForSequenceClassification",
}
TRAINED = {case.name: case for case in zoo.transformers_cases() if case.name in STEPPED.values()}


def rows_of(inputs: Any, rows: slice) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in inputs.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STEPPED)
def test_private_steps_with_an_empty_and_a_full_batch(name: str) -> None:
    """Five steps, whole or in checkpointed micro-batches of two, give the same parameters with the same noise."""
    if STEPPED[name] in GROUPED and not GROUPED_PRODUCTS:
        pytest.skip("refused, see above")
    after = []
    for parts, checkpointed in ((None, False), (2, True)):
        torch.manual_seed(0)
        np.random.seed(0)
        case = TRAINED[STEPPED[name]]
        model, inputs = case.make(), rows_of(case.inputs(), slice(0, 3))
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        data = [{key: value[row] for key, value in inputs.items()} for row in range(3)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        private = clipless.make_private(
            model, optimizer, data, noise_multiplier=1.0, delta=1e-5, batch_size=2, steps=5, seed=SEED
        )
        sizes = []
        for batch in private.loader.microbatches(parts) if parts else ([batch] for batch in private.loader):
            optimizer.zero_grad()
            sizes.append(0)
            for part in batch:
                records = len(next(iter(part.values())))
                private.backward(zoo.losses(model, (part, torch.arange(records))))
                sizes[-1] += records
            optimizer.step()
        private.detach()
        assert {0, 3} <= set(sizes)
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*after, rtol=1e-3, atol=1e-5)
