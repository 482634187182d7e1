"""Models that nobody here wrote: tiny configurations over transformers' mappings, torch's own modules, other packages.

One loop, one truth: the clipped sum of the engine beside that of single records, with float64 where float32 is in doubt, and
a checked pass as a training run makes it.
"""

import copy
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.auto import configuration_auto, modeling_auto

import clipless
from clipless import oracle
from clipless.errors import CliplessError
from clipless.gradients.trees import differentiable
from clipless.preflight import relative_error
from self_checking import self_checked

RECORDS, VOCABULARY, LENGTH, IMAGE, WAVE = 4, 40, 8, 64, 400
LARGEST = 8_000_000
TOLERANCE = 1e-3

# What is set wherever a configuration has it, nested ones included.
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "emb_dim", "embedding_size"), 16
    ),
    **dict.fromkeys(("word_embed_proj_dim", "projection_dim", "decoder_hidden_size", "encoder_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "num_encoder_attention_heads"), 2),
    **dict.fromkeys(("num_decoder_attention_heads", "decoder_num_attention_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner"), 24),
    **dict.fromkeys(("n_inner", "hidden_dim_ff", "decoder_intermediate_size", "dim_ff", "ffn_hidden_size"), 24),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 12),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "conv_kernel_size"), 4),
    **dict.fromkeys(("pad_token_id", "type_vocab_size"), 1),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), 2),
    "image_size": IMAGE,
    "patch_size": 16,
    "num_frames": 2,
    "first_k_dense_replace": 1,
    "num_labels": 3,
    "use_cache": False,
    "sliding_window": 4,
    "attention_window": 4,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "conv_dim": [8, 8],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2,
    "classifier_proj_size": 8,
    "apply_spec_augment": False,
    "router_jitter_noise": 0.0,
    "drop_path_rate": 0.0,
}
# Configurations in which these names mean something else.
OWN: dict[str, dict[str, Any]] = {
    "swin": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "swinv2": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "donut-swin": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "maskformer-swin": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "swin2sr": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 1},
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 16},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 16},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "mobilevit": {
        "conv_kernel_size": 3,
        "hidden_sizes": [8, 8, 8],
        "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16],
        "patch_size": 2,
    },
    "mobilevitv2": {"patch_size": 2},
    "t5": {"decoder_start_token_id": 2},
    "timesformer": {"image_size": 16, "patch_size": 8},
    "vivit": {"image_size": 16, "tubelet_size": [1, 8, 8]},
    "videomae": {"image_size": 16, "patch_size": 8, "tubelet_size": 1},
    "phimoe": {"input_jitter_noise": 0.0},
    "qwen3_next": {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


@dataclass(frozen=True)
class Verdict:
    """What became of a case: `exact`, `refused` (with the reason), `mixes` if it is refused and the gradient of its batch is
    indeed not the sum of those of single records, `wrong`, `crash`, or `unbuilt` if it cannot be built or run by itself."""

    kind: str
    why: str = ""
    error: float = float("nan")


@dataclass(frozen=True)
class Case:
    """A model, and the arguments by name or by position that it is called with: a row per record, as `records` says."""

    family: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor] | tuple[Tensor, ...]]
    records: int = RECORDS


def tiny(config: Any, own: dict[str, Any], depth: int = 0) -> Any:
    """The configuration with its sizes made small, wherever a name is known."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig) and depth < 3:
            tiny(value, OWN.get(value.model_type, {}), depth + 1)
        elif ("dropout" in name or "drop_rate" in name or "layerdrop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    for name, value in {**TINY, **own}.items():
        known = name in vars(config) or name in type(config).attribute_map or name in own
        if known and value is not None and not isinstance(getattr(config, name, None), transformers.PretrainedConfig):
            before = vars(config).get(name)
            if name in own or before is None or isinstance(before, list | tuple) == isinstance(value, list):
                _set(config, name, int(value) if type(before) is int and type(value) is float else value)
    for name, value in list(vars(config).items()):
        if name in SCALED and name not in own and isinstance(value, list | tuple):
            _set(config, name, [max(n // 8, 1) if name != "depths" else min(n, 1) for n in value])
    layers, types = (vars(config).get(name) for name in ("num_hidden_layers", "layer_types"))
    if isinstance(types, list) and isinstance(layers, int) and "layer_types" not in own:
        _set(config, "layer_types", (sorted(set(types)) * layers)[:layers])
    return config


# Widths and depths of each stage.
SCALED = ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "depths")


def _set(config: Any, name: str, value: Any) -> None:
    with suppress(AttributeError):  # some are computed from others
        setattr(config, name, value)


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (RECORDS, LENGTH))
    ids[:, -1] = 2  # the end of a sequence, which some classifiers look for
    return {"input_ids": ids}


def masked_tokens() -> dict[str, Tensor]:
    mask = (torch.arange(LENGTH) < torch.tensor([[8], [5], [8], [3]])).long()
    return {"input_ids": torch.where(mask.bool(), tokens()["input_ids"], 1), "attention_mask": mask}


def both_tokens() -> dict[str, Tensor]:
    return tokens() | {"decoder_input_ids": tokens()["input_ids"]}


def choices() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (RECORDS, 3, LENGTH))}


def images(size: int = IMAGE) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(RECORDS, 3, size, size)}


def videos() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(RECORDS, 2, 3, 16, 16)}


def waves() -> dict[str, Tensor]:
    return {"input_values": torch.randn(RECORDS, WAVE)}


FAMILIES: dict[str, tuple[str, Callable[[], dict[str, Tensor]]]] = {
    "causal LM": ("MODEL_FOR_CAUSAL_LM", masked_tokens),
    "masked LM": ("MODEL_FOR_MASKED_LM", masked_tokens),
    "sequence classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION", tokens),
    "token classification": ("MODEL_FOR_TOKEN_CLASSIFICATION", masked_tokens),
    "question answering": ("MODEL_FOR_QUESTION_ANSWERING", tokens),
    "multiple choice": ("MODEL_FOR_MULTIPLE_CHOICE", choices),
    "text encoding": ("MODEL_FOR_TEXT_ENCODING", masked_tokens),
    "sequence to sequence": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", both_tokens),
    "image classification": ("MODEL_FOR_IMAGE_CLASSIFICATION", images),
    "image backbone": ("MODEL_FOR_BACKBONE", images),
    "masked image modelling": ("MODEL_FOR_MASKED_IMAGE_MODELING", images),
    "semantic segmentation": ("MODEL_FOR_SEMANTIC_SEGMENTATION", images),
    "depth estimation": ("MODEL_FOR_DEPTH_ESTIMATION", images),
    "video classification": ("MODEL_FOR_VIDEO_CLASSIFICATION", videos),
    "audio classification": ("MODEL_FOR_AUDIO_CLASSIFICATION", waves),
    "audio frames": ("MODEL_FOR_AUDIO_FRAME_CLASSIFICATION", waves),
    "speech to text": ("MODEL_FOR_CTC", waves),
}


def transformers_cases() -> Iterator[Case]:
    """Every architecture of every family."""
    for family, (mapping, inputs) in FAMILIES.items():
        for kind, names in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else list(names)[:1]:
                yield Case(family, name, partial(build, kind, name), inputs)


def build(kind: str, name: str) -> nn.Module:
    """A tiny model of this class, without dropout, with BatchNorm replaced, in training mode."""
    made = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[kind])
    config = tiny(made(), OWN.get(kind, {}))
    found = getattr(transformers, name, None)
    found = found or getattr(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), name)
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in found(config).parameters())
    except AttributeError:
        config = config.get_text_config()
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in found(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    return quiet(clipless.replace_batchnorm(found(config)).model)


def quiet(model: nn.Module) -> nn.Module:
    """In training mode, with every dropout at zero."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        rates = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        vars(module).update(dict.fromkeys(rates, 0.0))
    return model.train()


def torch_cases() -> Iterator[Case]:
    """The samples of torch's own database of modules that have parameters and rows; none where it cannot be imported."""
    try:
        from torch.testing._internal.common_modules import module_db
    except ImportError:
        return
    for info in module_db:
        samples = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
        for number, sample in enumerate(samples):
            made, called = sample.constructor_input, sample.forward_input
            args = called.args if called is not None else ()
            rows = len(args[0]) if args and isinstance(args[0], Tensor) and args[0].dim() > 0 else 0
            plain = rows > 1 and all(isinstance(arg, Tensor) for arg in args) and not called.kwargs
            if plain and "Lazy" not in info.name and "Loss" not in info.name:
                make = partial(_with_parameters, info.module_cls, made.args, made.kwargs)
                yield Case("torch.nn", f"{info.name}, sample {number}", make, partial(tuple, args), rows)


def _with_parameters(kind: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    module = kind(*args, **kwargs)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("no parameters")
    return quiet(clipless.replace_batchnorm(module).model)


def losses(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """One loss per record, from the first tensor of the output that has a row for each."""
    output = model(**batch[0]) if isinstance(batch[0], dict) else model(*batch[0])
    logits = getattr(output, "logits", None)
    found = differentiable(logits if isinstance(logits, Tensor) else output)
    rows = next((t for t in found if t.dim() > 0 and len(t) == len(batch[1])), None)
    if rows is None:
        raise ValueError("no output has a row per record")
    logits = rows.flatten(1) if rows.dim() > 1 else torch.stack([rows, -rows], 1)
    return F.cross_entropy(logits, batch[1] % min(2, logits.shape[1]), reduction="none")


def judge(case: Case, checked: bool = True) -> Verdict:
    """Run a case by the engine and by single records."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        try:
            model, batch = case.make(), (case.inputs(), torch.arange(case.records))
            truth, again = (oracle.clipped_sum(model, losses, batch) for _ in range(2))
        except Exception as trouble:
            return Verdict("unbuilt", f"{type(trouble).__name__}: {trouble}"[:200])
        if relative_error(truth, again) > TOLERANCE or not bool(truth.norms.isfinite().all()):
            return Verdict("unbuilt", "not the same twice, or not finite")
        verdict = _compared(model, batch, truth, checked)
        if verdict.kind not in ("exact", "crash"):
            verdict = _in_float64(model, batch, checked) or verdict
        if verdict.kind == "refused" and _mixes(model, batch):
            return Verdict("mixes", verdict.why)
    return verdict


def _compared(model: nn.Module, batch: Any, truth: clipless.ClippedSum, checked: bool) -> Verdict:
    try:
        error = relative_error(clipless.clipped_sum(model, losses, batch), truth)
        if checked:
            self_checked(model, losses, batch, len(batch[1]), per_record=True)
    except CliplessError as refusal:
        return Verdict("refused", str(refusal))
    except Exception as trouble:
        return Verdict("crash", f"{type(trouble).__name__}: {trouble}"[:300])
    return Verdict("exact" if error <= TOLERANCE else "wrong", error=error)


def _mixes(model: nn.Module, batch: Any) -> bool:
    """Whether plain autograd finds another gradient for the batch than for its records one by one."""
    apart = oracle.clipped_sum(model, losses, batch, clipless.abadi(threshold=1e20))
    model.zero_grad()
    losses(model, batch).sum().backward()
    found = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    together = {name: found[name].detach().clone() for name in apart.grads}
    model.zero_grad()
    return relative_error(clipless.ClippedSum(together, apart.norms), apart) > TOLERANCE


def _in_float64(model: nn.Module, batch: Any, checked: bool) -> Verdict | None:
    """The verdict in float64, where rounding hides nothing; None if the model cannot be run in it."""

    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    batch, model = pytree.tree_map(wide, batch), copy.deepcopy(model).double()
    try:
        truth = oracle.clipped_sum(model, losses, batch)
    except Exception:
        return None
    return _compared(model, batch, truth, checked)
