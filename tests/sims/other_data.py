"""Small data sets of all kinds, written to files, for the tests of whole runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits


def cancer(folder: Path) -> str:
    """Write scikit-learn's breast cancer table, with hospitals A, B and C. Returns the domain."""
    data: Any = load_breast_cancer(as_frame=True)
    table = data.frame.drop(columns="target")
    table["kind"] = [str(data.target_names[number]) for number in data.target]
    table["hospital"] = ["ABC"[number % 3] for number in range(len(table))]
    table.to_csv(folder / "cancer.csv", index=False)
    return f"table:{folder}/cancer.csv?target=kind&without=hospital"


def diabetes(folder: Path) -> str:
    """Write scikit-learn's diabetes table, whose target is a whole number up to 346. Returns the domain."""
    data: Any = load_diabetes(as_frame=True)
    data.frame.to_csv(folder / "diabetes.csv", index=False)
    return f"table:{folder}/diabetes.csv?target=target&task=regression"


def sequences(folder: Path) -> str:
    """Write scikit-learn's digits as sequences of 8 steps of 8 features. Returns the domain."""
    data: Any = load_digits()
    np.savez(folder / "steps.npz", x=(data.images / 8 - 1).astype(np.float32), y=data.target)
    return f"npz:{folder}/steps.npz?inputs=sequence"


def tokens(folder: Path, each_step: bool = False) -> str:
    """Write 300 random walks over 12 tokens, with their direction or their next tokens as targets. Returns the domain."""
    random = np.random.default_rng(0)
    direction = random.integers(0, 2, 300)
    steps = np.where(random.random((300, 9)) < 0.9, 1, 0) * (2 * direction[:, None] - 1)
    walks = (random.integers(0, 12, (300, 1)) + np.cumsum(steps, axis=1)) % 12 + 1
    np.savez(folder / "walks.npz", x=walks[:, :-1], y=walks[:, 1:] if each_step else direction)
    return f"npz:{folder}/walks.npz?inputs=tokens"


def next_tokens(folder: Path) -> str:
    """Write the walks of `tokens` with their next tokens as targets. Returns the domain."""
    return tokens(folder, each_step=True)


def labels(folder: Path) -> str:
    """Write 300 rows of 6 features with 3 labels, each of which follows from two features. Returns the domain."""
    x = np.random.default_rng(0).normal(size=(300, 6)).astype(np.float32)
    np.savez(folder / "labels.npz", x=x, y=(x[:, 0::2] + x[:, 1::2] > 0).astype(np.int64))
    return f"npz:{folder}/labels.npz"


def frame(folder: Path, **columns: object) -> str:
    """Write a table of these columns. Returns the domain without a query."""
    pd.DataFrame(columns).to_csv(folder / "table.csv", index=False)
    return f"table:{folder}/table.csv"
