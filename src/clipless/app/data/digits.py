"""The handwritten digits that come with scikit-learn: 1,797 images of 8x8, no download."""

import numpy as np

from clipless.app.data.dataset import Data, make_data

TRAIN_RECORDS = 1437
SPLIT_SEED = 0


def digits() -> Data:
    """1,437 training and 360 test images of shape (1, 8, 8), the same split always, grey values 0..16 divided by 16."""
    from sklearn.datasets import load_digits  # heavy, and needed nowhere else

    source = load_digits()
    images = (source.images / 16.0)[:, None]
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    train, test = order[:TRAIN_RECORDS], order[TRAIN_RECORDS:]
    labels = source.target
    return make_data("digits", (images[train], labels[train]), (images[test], labels[test]))
