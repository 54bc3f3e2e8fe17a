"""Search the hyperparameters of a training with scikit-learn: random candidates, of which successive halving trains the
better third for three times as many epochs.

`python examples/halving_search.py --method random` gives every candidate all epochs.
"""

import argparse
from time import perf_counter

import numpy as np
from scipy.stats import loguniform
from sklearn.base import BaseEstimator
from sklearn.datasets import load_digits
from sklearn.experimental import enable_halving_search_cv  # noqa: F401  # makes HalvingRandomSearchCV importable
from sklearn.model_selection import HalvingRandomSearchCV, RandomizedSearchCV, ShuffleSplit

import graphwright as gw
from graphwright import data, nn, optim

SPACE = {"lr": loguniform(1e-4, 1e-1), "width": [8, 16, 32, 64], "dropout": [0.0, 0.1, 0.3]}


class Training(BaseEstimator):
    """A training function in the form that scikit-learn's searches call: `fit` trains, `score` measures."""

    def __init__(self, lr: float = 1e-3, width: int = 32, dropout: float = 0.0, epochs: int = 9) -> None:
        self.lr, self.width, self.dropout, self.epochs = lr, width, dropout, epochs

    def fit(self, images: np.ndarray, labels: np.ndarray) -> "Training":
        gw.manual_seed(0)
        layers = nn.Linear(64, self.width), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(self.width, 10)
        self.net_ = nn.Sequential(*layers)
        opt = optim.AdamW(self.net_, lr=self.lr)

        @gw.compile
        def step(x: gw.Tensor, y: gw.Tensor) -> gw.Tensor:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(self.net_(x), y)
            loss.backward()
            opt.step()
            return loss

        loader = data.DataLoader(data.TensorDataset(images, labels), 64, shuffle=True, drop_last=True)
        for _ in range(self.epochs):
            for x, y in loader:
                step(x, y)
        return self

    def score(self, images: np.ndarray, labels: np.ndarray) -> float:
        with gw.mode("eval"):
            return float((self.net_(gw.tensor(images)).numpy().argmax(1) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=("halving", "random"), default="halving")
    parser.add_argument("--candidates", type=int, default=27)
    parser.add_argument("--epochs", type=int, default=27, help="epochs of the last round of halving")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    count, epochs = (9, 9) if args.quick else (args.candidates, args.epochs)

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int64)
    train, test = slice(0, 1400), slice(1400, None)
    common = {"cv": ShuffleSplit(1, test_size=0.25, random_state=0), "random_state": 0}
    rounds = {"resource": "epochs", "n_candidates": count, "factor": 3, "min_resources": 1, "max_resources": epochs}
    if args.method == "halving":
        search = HalvingRandomSearchCV(Training(), SPACE, **rounds, **common)
    else:
        search = RandomizedSearchCV(Training(epochs=epochs), SPACE, n_iter=count, **common)

    began = perf_counter()
    search.fit(images[train], labels[train])
    rows = search.cv_results_
    spent = int(sum(params.get("epochs", epochs) for params in rows["params"]))
    for params, score in sorted(zip(rows["params"], rows["mean_test_score"], strict=True), key=lambda r: -r[1])[:5]:
        at = {name: round(float(value), 5) if name == "lr" else value for name, value in params.items()}
        print(f"validation {score:.3f}  {at}")
    print(f"{args.method}: {spent} epochs in {perf_counter() - began:.1f} s, "
          f"test accuracy of the best {search.score(images[test], labels[test]):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
