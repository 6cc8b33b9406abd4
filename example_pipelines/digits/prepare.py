"""From scikit-learn's handwritten digits to training, validation and test images: pure steps on arrays."""

from __future__ import annotations

import numpy as np

SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))
PARTS = {"train": 0.6, "validation": 0.2, "test": 0.2}
CLASSES = 10


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """The 1,797 images (8 by 8, values 0 to 16) and labels that come with scikit-learn; nothing is downloaded."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.float32), digits.target.astype(np.int64)


def make_features(images: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Scale to 0..1, split by class, and show the training images one pixel to each side as well.

    Only training images are shifted, and only after the split: no test image has a relative among them.
    """
    scaled = (images / 16.0).astype(np.float32)
    rows = split_rows(labels, seed)
    features: dict[str, np.ndarray] = {}
    for part, chosen in rows.items():
        features[f"{part}_images"], features[f"{part}_labels"] = scaled[chosen], labels[chosen]
    features["train_images"] = np.concatenate([shifted(features["train_images"], *shift) for shift in SHIFTS])
    features["train_labels"] = np.tile(features["train_labels"], len(SHIFTS))
    return features


def split_rows(labels: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Row numbers of each part, the same share of every class in each; the same seed gives the same split."""
    random = np.random.default_rng(seed)
    chosen: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
    for label in range(CLASSES):
        rows = random.permutation(np.flatnonzero(labels == label))
        first = round(len(rows) * PARTS["train"])
        second = first + round(len(rows) * PARTS["validation"])
        for part, piece in zip(PARTS, np.split(rows, [first, second]), strict=True):
            chosen[part].append(piece)
    return {part: np.sort(np.concatenate(pieces)) for part, pieces in chosen.items()}


def shifted(images: np.ndarray, down: int, right: int) -> np.ndarray:
    """Each image moved by whole pixels; what comes in at the edge is paper."""
    height, width = images.shape[1:]
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    return padded[:, 1 - down : 1 - down + height, 1 - right : 1 - right + width]
