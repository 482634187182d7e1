"""Data sets for the command line and the experiments: a name or a path in, tensors out.

>>> digits = load("digits")
>>> len(digits.train), len(digits.test), digits.shape, digits.classes
(1437, 360, (1, 8, 8), 10)
"""

from collections.abc import Callable
from pathlib import Path

from clipless.app.data.dataset import Data
from clipless.app.data.digits import digits
from clipless.app.data.features import NAMES, refuse_unknown, with_features
from clipless.app.data.files import idx_folder, npz_archive
from clipless.app.data.images import cifar10, fashion_mnist, mnist, svhn
from clipless.app.data.own import TABLE_ENDS, OwnData, is_function, load_features, load_function, load_table
from clipless.app.data.sentences import NAME as MINILM
from clipless.app.data.sentences import with_minilm
from clipless.app.data.tables import adult, adult_labels, housing, wine
from clipless.app.data.texts import Sentences, e2e, names, qnli, snli, sst2
from clipless.app.progress import OnProgress, ignored
from clipless.arguments import unknown_name
from clipless.errors import InvalidArgument

__all__ = ["DATA", "Data", "OwnData", "load", "load_features"]

# Each takes the folder to look in; None: those of CLIPLESS_DATA and of the system's packages.
SENTENCES: dict[str, Callable[[str | Path | None], Sentences]] = {"sst2": sst2, "qnli": qnli, "snli": snli}
DATA: dict[str, Callable[[str | Path | None], Data]] = {
    "digits": lambda _: digits(),
    "fashion-mnist": fashion_mnist,
    "mnist": mnist,
    "cifar10": cifar10,
    "svhn": svhn,
    "names": names,
    "wine": wine,
    "housing": housing,
    "sst2": lambda folder: sst2(folder).hashed(),
    "qnli": lambda folder: qnli(folder).hashed(),
    "snli": lambda folder: snli(folder).hashed(),
    "e2e": e2e,
    "adult": adult,
    "adult-labels": adult_labels,
}


def load(
    name_or_path: str | Path,
    data_dir: str | Path | None = None,
    own: OwnData | None = None,
    on_progress: OnProgress = ignored,
) -> Data:
    """A registered data set; the one in a folder of idx files, an `.npz` archive, a csv or Parquet table; or what a function
    `package.module:function` returns.

    Inputs are scaled by fixed public constants, by what `own` states about a table, or not at all: no statistic of the
    training records is ever computed, because that would cost privacy. The number of records counts as public, and so
    does that of classes in idx files and archives. The files of a registered set are looked for in `data_dir`, or else in
    the folders of the environment variable CLIPLESS_DATA; nothing is downloaded. `+scattering` after the name of a set of
    images turns each into fixed features (kymatio), `+patches` into responses to a fixed dictionary, `+efficientnet` into
    those of a network trained on ImageNet; `+mirrored` after them averages over the image and its mirror image, and
    `+whitened` at the end decorrelates them by what they are like on synthetic pictures.
    `+minilm` after the name of a set of sentences turns each into features of a small pretrained encoder.
    Features are computed once and kept on disk; `on_progress` is told how far that is.

    Raises InvalidArgument for a name or file that does not exist and for contents that cannot be trained on.
    """
    name, stated = str(name_or_path), own or OwnData()
    path = Path(name_or_path).expanduser()
    if path.name.endswith(TABLE_ENDS):
        return load_table(_existing(path), stated)
    if is_function(name):
        return load_function(name, stated)
    stated.refuse_on(f"{name} is none")
    plain, *features = name.split("+")
    if features == [MINILM] and plain in DATA:
        return with_minilm(_sentences(plain)(data_dir), on_progress)
    if features and not path.exists() and (plain in DATA or set(features) <= NAMES):
        refuse_unknown(features)
        return with_features(load(plain, data_dir), features, on_progress)
    if name in DATA:
        return DATA[name](data_dir)
    if path.is_dir():
        return idx_folder(path)
    if path.name.endswith(".npz"):
        return npz_archive(_existing(path))
    if path.is_file():
        raise InvalidArgument(
            f"{path} is not a data set: pass a folder of idx files, an .npz archive, or a table ({', '.join(TABLE_ENDS)})."
        )
    if len(path.parts) > 1:
        raise InvalidArgument(f"there is no {path}: check the path, or pass one of the names {', '.join(DATA)}.")
    raise unknown_name(
        "data set", name, [*DATA, "FOLDER", "FILE.npz", "FILE.csv", "FILE.parquet", "package.module:function"]
    )


def _sentences(name: str) -> Callable[[str | Path | None], Sentences]:
    if name not in SENTENCES:
        known = ", ".join(SENTENCES)
        raise InvalidArgument(
            f"{name} has no sentences, which is what +{MINILM} transforms ({known} have): leave +{MINILM} out."
        )
    return SENTENCES[name]


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise InvalidArgument(f"there is no file {path}: check the path, or pass one of the names {', '.join(DATA)}.")
    return path
