"""The names that options take, so that help and shell completion need not load what they stand for.

`tests/app/test_names.py` ties each tuple to its registry.
"""

MODELS = (
    "linear",
    "linear-from-zero",
    "mlp",
    "global-mlp",
    "cnn",
    "cnn-relu",
    "dc-cnn",
    "cifar-cnn",
    "resnet8-gn",
)
TEXT_MODELS = ("bag", "lstm", "encoder", "decoder")
DATA = (
    "digits",
    "fashion-mnist",
    "mnist",
    "cifar10",
    "svhn",
    "names",
    "wine",
    "housing",
    "sst2",
    "qnli",
    "snli",
    "e2e",
    "adult",
    "adult-labels",
)
TASKS = ("classes", "regression", "labels")
OPTIMIZERS = ("sgd", "adam", "adamw", "nadam", "rmsprop", "adagrad")
LR_SCHEDULES = ("constant", "linear", "cosine")

CLIPPINGS = ("auto-s", "auto-v", "abadi", "global", "dc-p", "dc-e", "quantile", "decay")
NO_CLIPPING = "none"
NOISE_SOURCES = ("secure", "seeded", "device")
ACCOUNTANTS = ("pld", "rdp", "gdp")

AUTO_METHOD = "auto"
SELECTION_METHODS = ("liu-talwar", "papernot-steinke", "grid")
EXECUTORS = ("local", "processes", "dask")

GAMES = ("step", "one-run", "runs")
CANARY_KINDS = ("crafted", "random")

BENCH_MODELS = ("mlp", "cnn", "resnet18", "encoder", "lstm", "decoder", "lora", "tabular")
BENCH_CLIPPINGS = tuple(dict.fromkeys(("auto-s", "auto-s per-layer", "dc-e", *CLIPPINGS)))
BENCH_AXES = ("batch", "width", "length", "layers", "microbatch", "records")
MALLOC = ("off", "on", "both")
