"""Real architectures with random weights, as their libraries build them, against the oracle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import clipless
from clipless import oracle
from clipless.preflight import relative_error
from self_checking import MODES, self_checked

VOCABULARY, LENGTH, WIDTH = 40, 8, 16


@dataclass(frozen=True)
class Architecture:
    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    logits: Callable[[nn.Module, dict[str, Tensor]], Tensor]


def tokens(records: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (records, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (records, 1))).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def classified(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).logits


def next_tokens(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).logits[:, :-1].flatten(1)


def encoder_decoder(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs, decoder_input_ids=inputs["input_ids"].flip(1)).logits.flatten(1)


def config(name: str, **settings: Any) -> transformers.PretrainedConfig:
    dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return getattr(transformers, name)(**{**dropout, **settings})


ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_labels": 3,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(config("BertConfig", **ENCODER))


def roberta() -> nn.Module:
    return transformers.RobertaForSequenceClassification(config("RobertaConfig", **ENCODER, pad_token_id=0))


def distilbert() -> nn.Module:
    settings = {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "num_labels": 3}
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "max_position_embeddings": 32}
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**settings, **quiet))


def gpt2() -> nn.Module:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **NO_DROPOUT))
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def llama() -> nn.Module:
    settings = {**ENCODER, "num_key_value_heads": 1, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def t5() -> nn.Module:
    settings = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**settings, dropout_rate=0.0))


def vit() -> nn.Module:
    settings = {name: value for name, value in ENCODER.items() if "vocab" not in name and "position" not in name}
    return transformers.ViTForImageClassification(config("ViTConfig", **settings, image_size=8, patch_size=4))


def lora() -> nn.Module:
    adapted = get_peft_model(bert(), LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"]))
    assert isinstance(adapted, nn.Module)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return adapted


class Residual(nn.Module):
    """A block of ResNet18 with GroupNorm."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
        )
        self.norm_one, self.norm_two = nn.GroupNorm(2, after), nn.GroupNorm(2, after)
        self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(2, after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_two(self.two(F.relu(self.norm_one(self.one(x)), inplace=True)))
        y += self.short(x)
        return F.relu(y, inplace=True)


def resnet() -> nn.Module:
    stages = [Residual(4 * 2 ** max(k - 1, 0), 4 * 2**k, 1 + (k > 0)) for k in range(4)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 2, 2), ConvNextBlock(4), nn.Flatten(), nn.Linear(64, 3))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, 2), nn.ConvTranspose2d(8, 3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        outer = F.silu(self.down(x))
        inner = F.silu(self.up(F.silu(self.middle(outer))))
        return self.last(torch.cat([inner, outer], 1)).flatten(2).mean(2)


class CharLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(input_ids))[0][:, -1])


def images(records: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(records, 3, 8, 8)}


def plain(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(*inputs.values())


ARCHITECTURES = {
    "bert": Architecture(bert, tokens, classified),
    "roberta": Architecture(roberta, tokens, classified),
    "distilbert": Architecture(distilbert, tokens, classified),
    "gpt2": Architecture(gpt2, tokens, next_tokens),
    "llama": Architecture(llama, tokens, next_tokens),
    "t5": Architecture(t5, tokens, encoder_decoder),
    "vit": Architecture(vit, images, classified),
    "lora": Architecture(lora, tokens, classified),
    "resnet": Architecture(resnet, images, plain),
    "convnext": Architecture(convnext, images, plain),
    "unet": Architecture(UNet, images, plain),
    "char-lstm": Architecture(CharLSTM, tokens, plain),
}


def losses(architecture: Architecture) -> Callable[[nn.Module, Any], Tensor]:
    def compute(model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        return F.cross_entropy(architecture.logits(model, batch[0]), batch[1], reduction="none")

    return compute


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_agrees_with_the_oracle(name: str) -> None:
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = architecture.make().train()
    for records, how in ((1, "flat"), (3, "per-layer"), (LENGTH, "flat")):
        batch = architecture.inputs(records), torch.arange(records) % 3
        clipping = clipless.auto_s() if how == "flat" else clipless.abadi(groups="per-layer")
        fast, slow = (which.clipped_sum(model, losses(architecture), batch, clipping) for which in (clipless, oracle))
        torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-3, atol=1e-5)
        assert relative_error(fast, slow) <= 1e-3


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "char-lstm"])
def test_agrees_with_the_oracle_under_bfloat16_autocast(name: str) -> None:
    """The whole gradient within 2e-2 of the oracle under the same autocast, sums in float32.

    Not the LSTM: torch itself cannot run it in bfloat16 on every CPU.
    """
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = architecture.make().train()
    plain_losses = losses(architecture)

    def under_autocast(module: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain_losses(module, batch).float()

    batch = architecture.inputs(4), torch.arange(4) % 3
    for how in (clipless.auto_s(), clipless.abadi(groups="per-layer")):
        fast, slow = (which.clipped_sum(model, under_autocast, batch, how) for which in (clipless, oracle))
        one, other = (torch.cat([grad.flatten() for grad in found.grads.values()]) for found in (fast, slow))
        assert one.dtype == torch.float32
        assert float((one - other).norm()) <= 2e-2 * float(other.norm()) + 1e-9


@pytest.mark.parametrize("per_record", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_run_finds_no_fault_with_it(name: str, per_record: bool) -> None:
    """In float32 and under autocast, for as many records as positions too."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = architecture.make().train()
    for records, enabled in ((5, False), (LENGTH, False), (5, name != "char-lstm")):
        batch = architecture.inputs(records), torch.arange(records) % 3
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert self_checked(model, losses(architecture), batch, records, per_record)


@pytest.mark.parametrize(
    ("lengths", "checkpointed"),
    [
        ((8, 8, 8, 8, 8), False),
        ((8, 8, 8, 8, 3), False),
        ((8, 8, 3, 8, 8), False),
        ((8, 8, 8, 8, 8), True),
        ((3, 4, 5, 8, 2), True),
    ],
)
def test_t5_agrees_with_the_oracle_for_any_padding_and_under_checkpointing(
    lengths: tuple[int, ...], checkpointed: bool
) -> None:
    """It passes no mask where nothing is left out, and hands a bias of its first layer to all others."""
    torch.manual_seed(0)
    model = ARCHITECTURES["t5"].make().train()
    if checkpointed:
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mask = (torch.arange(LENGTH) < torch.tensor(lengths).unsqueeze(1)).long()
    ids = torch.randint(3, VOCABULARY, (5, LENGTH)) * mask
    batch = {"input_ids": ids, "attention_mask": mask}, torch.arange(5) % 3
    fast, slow = (which.clipped_sum(model, losses(ARCHITECTURES["t5"]), batch) for which in (clipless, oracle))
    assert relative_error(fast, slow) <= 1e-3
    for per_record in MODES.values():
        assert self_checked(model, losses(ARCHITECTURES["t5"]), batch, len(lengths), per_record)


SPEECH = {
    **{name: value for name, value in ENCODER.items() if "position" not in name},
    "num_hidden_layers": 1,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "apply_spec_augment": True,
    "mask_time_prob": 0.4,
    "mask_time_length": 2,
    "mask_feature_prob": 0.0,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
    **dict.fromkeys(("final_dropout", "layerdrop"), 0.0),
}


@pytest.mark.parametrize("family", ["Wav2Vec2", "Hubert", "UniSpeech", "Data2VecAudio"])
def test_masked_positions_of_speech_are_learned(family: str) -> None:
    """The parameter written over the positions that were drawn has the gradient of each record, for those positions."""
    torch.manual_seed(0)
    own = {"conv_pos_kernel_size": 3} if family == "Data2VecAudio" else {}
    settings = {**SPEECH, **own, "num_conv_pos_embeddings": 1 if own else 4}
    made = getattr(transformers, f"{family}ForSequenceClassification")
    model = made(getattr(transformers, f"{family}Config")(**settings)).train()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    number = next(k for k, name in enumerate(names) if "masked_spec_embed" in name)
    batch = torch.randn(4, 200), torch.arange(4) % 3

    def drawn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        np.random.seed(3)
        return F.cross_entropy(model(batch[0]).logits, batch[1], reduction="none")

    found = clipless.clipped_sum(model, drawn, batch, clipless.abadi(groups="per-parameter", threshold=1e9))
    token = model.get_parameter(names[number])
    each = torch.stack([torch.autograd.grad(drawn(model, batch)[b], token)[0] for b in range(4)])
    torch.testing.assert_close(found.norms[number], each.norm(dim=1), rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(found.grads[names[number]], each.sum(0), rtol=1e-3, atol=1e-8)
    assert float(each.norm()) > 0
    assert self_checked(model, drawn, batch, 4, per_record=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_check_finds_every_architecture_sound(name: str) -> None:
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = architecture.make().train()
    report = clipless.check(model, losses(architecture), (architecture.inputs(4), torch.arange(4) % 3))
    report.raise_if_unsound()
    handled = {row.parameter for row in report.handling}
    assert handled == dict(model.named_parameters()).keys()


def test_a_model_trains_through_make_private_with_its_check_first() -> None:
    torch.manual_seed(0)
    architecture = ARCHITECTURES["bert"]
    model = architecture.make().train()
    inputs, labels = architecture.inputs(12), torch.arange(12) % 3
    data = [{**{key: value[row] for key, value in inputs.items()}, "labels": labels[row]} for row in range(12)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = {key: value[:4] for key, value in inputs.items()}, labels[:4]
    private = clipless.make_private(
        model,
        optimizer,
        data,
        noise_multiplier=1.0,
        delta=1e-5,
        batch_size=4,
        epochs=2,
        clipping="dc-e",
        check=(losses(architecture), first),
        loss_reduction="mean",
    )
    for _ in range(private.epochs):
        for parts in private.loader.microbatches(2):
            for part in parts:
                model(**part).loss.backward()
            optimizer.step()
    assert private.ledger.steps == 6
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    private.detach()
