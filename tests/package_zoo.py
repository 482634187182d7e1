"""Models of other packages for the zoo, where these are installed."""

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import clipless
from model_zoo import RECORDS, VOCABULARY, Case, quiet, tokens

# Registered operators stay as long as this object.
_OPERATORS: list[Any] = []


def declare_torchvision() -> None:
    """Declare torchvision's compiled operators where they cannot be loaded: packages import it, and models need none."""
    for _ in range(100):
        try:
            importlib.import_module("torchvision")
            return
        except ImportError:
            return
        except RuntimeError as trouble:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(trouble))
            if missing is None:
                return
            _OPERATORS.extend([] if _OPERATORS else [torch.library.Library("torchvision", "DEF")])
            _OPERATORS[0].define(f"{missing[1]}(...) -> ...")
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]


def package_cases() -> Iterator[Case]:
    """The cases of every package that can be imported."""
    declare_torchvision()
    for package, cases in PACKAGES.items():
        if _installed(package):
            yield from cases(importlib.import_module(package))


def package_versions() -> dict[str, str]:
    """The versions of the packages that can be imported."""
    declare_torchvision()
    found = {}
    for package in filter(_installed, PACKAGES):
        with suppress(importlib.metadata.PackageNotFoundError):
            names = importlib.metadata.packages_distributions().get(package, [package])
            found[names[0]] = importlib.metadata.version(names[0])
    return found


def _installed(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # not there, or built for another torch or another version of its own requirements
        return False
    return True


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    model = quiet(clipless.replace_batchnorm(make()).model)
    for module in model.modules():
        if type(module).__name__ == "StochasticDepth":
            vars(module)["p"] = 0.0
    return model


def _case(family: str, name: str, make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Case:
    """A case whose arguments are normal numbers of these shapes, for each record."""
    return Case(family, name, partial(_made, make), lambda: tuple(torch.randn(RECORDS, *shape) for shape in shapes))


def _words(family: str, name: str, make: Callable[[], nn.Module]) -> Case:
    return Case(family, name, partial(_made, make), lambda: (tokens()["input_ids"],))


TIMM = (
    *(
        "eva02_tiny_patch14_224",
        "vit_tiny_patch16_224",
        "deit_tiny_patch16_224",
        "maxvit_rmlp_pico_rw_256",
        "levit_128s",
    ),
    *(
        "coatnet_pico_rw_224",
        "mobilevit_xxs",
        "mobilevitv2_050",
        "resnet10t",
        "efficientnet_b0",
        "nf_resnet26",
        "rexnet_100",
    ),
    *(
        "convnext_atto",
        "gmlp_ti16_224",
        "xcit_nano_12_p16_224",
        "poolformer_s12",
        "mobilenetv3_small_050",
        "regnetx_002",
    ),
    *("ghostnet_050", "edgenext_xx_small", "crossvit_tiny_240", "fastvit_t8", "repvgg_a0", "tinynet_e", "lcnet_050"),
    *("starnet_s1", "efficientvit_b0", "mambaout_femto", "repvit_m0_9", "hardcorenas_a"),
)
TORCHVISION = (
    *("resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "squeezenet1_1", "shufflenet_v2_x0_5"),
    *("convnext_tiny", "swin_t", "mnasnet0_5", "regnet_y_400mf"),
)


def _timm(timm: Any) -> Iterator[Case]:
    for name in TIMM:
        size = next((int(part) for part in reversed(name.split("_")) if part in ("224", "240", "256")), 64)
        size = 224 if name == "levit_128s" else size
        make = partial(timm.create_model, name, pretrained=False, num_classes=3)
        yield _case("timm", name, make, (3, size, size))


def _torchvision(torchvision: Any) -> Iterator[Case]:
    for name in TORCHVISION:
        make = partial(getattr(torchvision.models, name), weights=None, num_classes=3)
        yield _case("torchvision", name, make, (3, 64, 64))


def _x_transformers(x: Any) -> Iterator[Case]:
    plain = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "rotary": {"rotary_pos_emb": True},
        "relative": {"rel_pos_bias": True},
        "alibi": {"alibi_pos_bias": True},
        "gated": {"ff_glu": True, "attn_gate_values": True},
        "memory": {"attn_num_mem_kv": 2},
        "sandwich": {"sandwich_norm": True},
        "rms, qk": {"use_rmsnorm": True, "attn_qk_norm": True},
        "scaled": {"use_scalenorm": True},
        "residual": {"gate_residual": True, "scale_residual": True},
    }
    for name, own in settings.items():
        for tied in (False, True):
            yield _words("x-transformers", name + ", tied" * tied, partial(_x_transformer, x, {**plain, **own}, tied))


def _x_transformer(x: Any, settings: dict[str, Any], tied: bool) -> nn.Module:
    model: nn.Module = x.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=16, attn_layers=x.Decoder(**settings), tie_embedding=tied
    )
    return model


def _vit_pytorch(package: Any) -> Iterator[Case]:
    plain = {"image_size": 32, "patch_size": 8, "num_classes": 3, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 24}
    windows = {"num_classes": 3, "dim": 16, "depth": (1, 1), "dim_head": 8, "window_size": 2}
    makes: dict[str, tuple[str, str, dict[str, Any]]] = {
        "ViT": ("vit", "ViT", plain),
        "SimpleViT": ("simple_vit", "SimpleViT", plain),
        "SimpleViT, qk norm": ("simple_vit_with_qk_norm", "SimpleViT", plain),
        "DeepViT": ("deepvit", "DeepViT", plain),
        "CaiT": ("cait", "CaiT", plain | {"cls_depth": 1}),
        "small data": ("vit_for_small_dataset", "ViT", plain),
        "parallel": ("parallel_vit", "ViT", plain),
        "registers": ("simple_vit_with_register_tokens", "SimpleViT", plain),
        "hyper-connections": ("simple_vit_with_hyper_connections", "SimpleViT", plain | {"num_residual_streams": 2}),
        "value residual": ("simple_vit_with_value_residual", "SimpleViT", plain),
        "XCiT": ("xcit", "XCiT", plain | {"cls_depth": 1, "local_patch_kernel_size": 3}),
        "CCT": ("cct", "CCT", {"img_size": 32, "num_classes": 3, "embedding_dim": 16, "num_layers": 2, "num_heads": 2}),
        "RvT": ("rvt", "RvT", plain),
        "MaxViT": ("max_vit", "MaxViT", windows),
        "LeViT": (
            "levit",
            "LeViT",
            {"image_size": 32, "num_classes": 3, "dim": 16, "depth": 1, "heads": 2, "mlp_mult": 2},
        ),
        "CvT": ("cvt", "CvT", {"num_classes": 3}),
        "RegionViT": ("regionvit", "RegionViT", {"dim": (16, 16, 16, 16), "depth": (1, 1, 1, 1), "num_classes": 3}),
    }
    for name, (file, kind, settings) in makes.items():
        with suppress(Exception):
            module = importlib.import_module(f"vit_pytorch.{file}")
            size = {"RegionViT": 224, "CvT": 64, "MaxViT": 64}.get(name, 32)
            yield _case("vit-pytorch", name, partial(getattr(module, kind), **settings), (3, size, size))


class Flow(nn.Module):
    """A normalising flow as a module: the logarithm of the density of each record."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor) -> Tensor:
        found: Any = self.flow
        density: Tensor = found.log_prob(x)
        return density


def _nflows(_: Any) -> Iterator[Case]:
    base = importlib.import_module("nflows.distributions.normal").StandardNormal
    flow = importlib.import_module("nflows.flows.base").Flow
    t = importlib.import_module("nflows.transforms")
    makes: dict[str, Callable[[], nn.Module]] = {
        "affine autoregressive": lambda: t.MaskedAffineAutoregressiveTransform(6, 8),
        "quadratic autoregressive": lambda: t.MaskedPiecewiseQuadraticAutoregressiveTransform(6, 8, tails="linear"),
        "rational autoregressive": lambda: t.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
            features=6, hidden_features=8, tails="linear", tail_bound=3.0
        ),
        "LU": lambda: t.LULinear(6),
        "SVD": lambda: t.SVDLinear(6, 2),
        "Householder": lambda: t.HouseholderSequence(6, 3),
        "permuted": lambda: t.CompositeTransform([t.RandomPermutation(6), t.LULinear(6)]),
    }
    for name, make in makes.items():
        yield _case("nflows", name, lambda make=make: Flow(flow(make(), base([6]))), (6,))  # type: ignore[misc]


def _zuko(zuko: Any) -> Iterator[Case]:
    makes = {"NSF": zuko.flows.NSF, "MAF": zuko.flows.MAF, "NICE": zuko.flows.NICE, "SOSPF": zuko.flows.SOSPF}
    for name, kind in makes.items():
        make = partial(lambda kind: Density(kind(features=4, context=0, transforms=2, hidden_features=(8,))), kind)
        yield _case("zuko", name, make, (4,))


class Density(Flow):
    """The same for flows that are called for their distribution."""

    def forward(self, x: Tensor) -> Tensor:
        density: Tensor = self.flow().log_prob(x)
        return density


def _normflows(package: Any) -> Iterator[Case]:
    def real() -> nn.Module:
        pairs = [
            [package.flows.AffineCouplingBlock(package.nets.MLP([2, 8, 4])), package.flows.Permute(4, mode="swap")]
            for _ in range(2)
        ]
        base = package.distributions.base.DiagGaussian(4)
        return Flow(package.NormalizingFlow(base, [flow for pair in pairs for flow in pair]))

    yield _case("normflows", "Real NVP", real, (4,))


def _rtdl(package: Any) -> Iterator[Case]:
    sizes = package.FTTransformer.get_default_kwargs(1) | {"d_block": 16, "n_blocks": 2, "attention_n_heads": 2}
    sizes = {key: value for key, value in sizes.items() if not key.startswith("_")}

    def mixed() -> tuple[Tensor, Tensor]:
        return torch.randn(RECORDS, 5), torch.randint(3, (RECORDS, 2))

    make = partial(package.FTTransformer, n_cont_features=5, cat_cardinalities=[3, 4], d_out=3, **sizes)
    yield Case("rtdl", "FT-Transformer", partial(_made, make), mixed)
    yield _case("rtdl", "MLP", partial(package.MLP, d_in=5, d_out=3, n_blocks=2, d_block=8, dropout=0.0), (5,))
    narrow = {"n_blocks": 2, "d_block": 8, "d_hidden_multiplier": 2.0, "dropout1": 0.0, "dropout2": 0.0}
    yield _case("rtdl", "ResNet", partial(package.ResNet, d_in=5, d_out=3, d_hidden=None, **narrow), (5,))


def _numeric(package: Any) -> Iterator[Case]:
    makes: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: package.LinearReLUEmbeddings(5, 8),
        "periodic": lambda: package.PeriodicEmbeddings(5, 8, lite=False),
        "periodic, lite": lambda: package.PeriodicEmbeddings(5, 8, lite=True),
    }
    for name, make in makes.items():
        yield _case("rtdl", f"{name} embeddings", make, (5,))


def _tab(package: Any) -> Iterator[Case]:
    sizes = {"categories": (3, 4), "num_continuous": 5, "dim": 8, "depth": 2, "heads": 2, "dim_out": 3}
    own: dict[str, dict[str, Any]] = {"TabTransformer": {"mlp_act": nn.ReLU()}, "FTTransformer": {}}

    def mixed() -> tuple[Tensor, Tensor]:
        return torch.randint(3, (RECORDS, 2)), torch.randn(RECORDS, 5)

    for name, more in own.items():
        make = partial(getattr(package, name), **sizes, **more)
        yield Case("tab-transformer", name, partial(_made, make), mixed)


def _efficient_attention(package: Any) -> Iterator[Case]:
    narrow = {"num_tokens": VOCABULARY, "dim": 16, "depth": 2, "heads": 2}
    if package.__name__ == "performer_pytorch":
        make = partial(package.PerformerLM, max_seq_len=8, auto_check_redraw=False, nb_features=8, dim_head=8, **narrow)
        yield _words("attention", "Performer", make)
    elif package.__name__ == "linformer":
        make = partial(package.LinformerLM, seq_len=8, k=4, **narrow)
        yield _words("attention", "Linformer", make)
    else:
        sizes = {"num_tokens": VOCABULARY, "dim": 16, "depth": 2, "seq_len": 8}
        yield _words("attention", "gMLP", partial(package.gMLP, **sizes))


def _peft(peft: Any) -> Iterator[Case]:
    transformers = importlib.import_module("transformers")
    config = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    kinds = {
        "LoRA": lambda: peft.LoraConfig(target_modules=["query", "value"], r=4, lora_dropout=0.0),
        "DoRA": lambda: peft.LoraConfig(target_modules=["query", "value"], r=4, lora_dropout=0.0, use_dora=True),
        "IA3": lambda: peft.IA3Config(target_modules=["key", "output.dense"], feedforward_modules=["output.dense"]),
        "VeRA": lambda: peft.VeraConfig(target_modules=["query", "value"], r=4, vera_dropout=0.0),
        "prompt": lambda: peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
    }
    for name, made in kinds.items():

        def make(made: Callable[[], Any] = made) -> nn.Module:
            bert = transformers.BertForSequenceClassification(
                transformers.BertConfig(vocab_size=VOCABULARY, num_labels=3, **config)
            )
            model: nn.Module = peft.get_peft_model(bert, made())
            return model

        yield Case("peft", name, partial(_made, make), tokens)


def _segmentation(package: Any) -> Iterator[Case]:
    for name in ("Unet", "FPN", "Linknet", "DeepLabV3Plus", "Segformer"):
        make = partial(getattr(package, name), "resnet18", encoder_weights=None, classes=2)
        yield _case("segmentation-models", name, make, (3, 64, 64))


def _monai(package: Any) -> Iterator[Case]:
    nets = importlib.import_module("monai.networks.nets")
    unet = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (4, 8), "strides": (2,)}
    yield _case("monai", "UNet", partial(nets.UNet, **unet), (1, 16, 16))
    sizes = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "init_filters": 8}
    yield _case("monai", "SegResNet", partial(nets.SegResNet, **sizes), (1, 16, 16))
    small = {"in_channels": 1, "out_channels": 2, "img_size": 32, "feature_size": 4, "hidden_size": 16, "mlp_dim": 24}
    yield _case("monai", "UNETR", partial(nets.UNETR, num_heads=2, spatial_dims=2, **small), (1, 32, 32))


def _sequences(package: Any) -> Iterator[Case]:
    if package.__name__ == "conformer":
        make = partial(package.Conformer, dim=16, depth=2, dim_head=8, heads=2)
        yield _case("sequences", "Conformer", make, (9, 16))
    else:
        for norm in (None, "layer_norm", "weight_norm"):
            make = partial(package.TCN, 4, [8, 8], kernel_size=3, dropout=0.0, use_norm=norm)
            yield _case("sequences", f"TCN, {norm}", make, (4, 9))


class Packed(nn.Module):
    """A recurrent layer on packed sequences of unequal length."""

    def __init__(self, kind: Callable[..., nn.Module], **settings: Any) -> None:
        super().__init__()
        self.inner = kind(6, 5, batch_first=True, **settings)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.inner(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0].sum(1)


def _opacus(_: Any) -> Iterator[Case]:
    layers = importlib.import_module("opacus.layers")
    lengths = torch.tensor([2, 5, 7, 3])
    for kind in (layers.DPRNN, layers.DPGRU, layers.DPLSTM):
        for settings in ({}, {"num_layers": 2}, {"bidirectional": True}):
            name = f"{kind.__name__} {', '.join(settings)}".strip()
            make = partial(Packed, kind, **settings)
            yield Case("opacus", name, partial(_made, make), lambda: (torch.randn(RECORDS, 7, 6), lengths.clone()))
    for settings in ({}, {"add_bias_kv": True}, {"bias": False}):
        attention = partial(layers.DPMultiheadAttention, 6, 2, batch_first=True, **settings)
        yield _case("opacus", f"DPMultiheadAttention {', '.join(settings)}".strip(), attention, *[(7, 6)] * 3)


PACKAGES: dict[str, Callable[[Any], Iterator[Case]]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "x_transformers": _x_transformers,
    "vit_pytorch": _vit_pytorch,
    "nflows": _nflows,
    "zuko": _zuko,
    "normflows": _normflows,
    "rtdl_revisiting_models": _rtdl,
    "rtdl_num_embeddings": _numeric,
    "tab_transformer_pytorch": _tab,
    "performer_pytorch": _efficient_attention,
    "linformer": _efficient_attention,
    "g_mlp_pytorch": _efficient_attention,
    "peft": _peft,
    "segmentation_models_pytorch": _segmentation,
    "monai": _monai,
    "conformer": _sequences,
    "pytorch_tcn": _sequences,
    "opacus": _opacus,
}
