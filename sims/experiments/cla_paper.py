"""The paper's cells that ours can be laid beside: test accuracy in %, mean and standard deviation over its five seeds.

From Nguyen, Nguyen, Nguyen, Phung, Bui, Ho: *On Cross-Layer Alignment for Model Fusion of Heterogeneous Neural Networks*,
Tables 9, 10, 12 and 14. Its MLPs are ours, on all of MNIST; its ResNets are eight times as wide as ours, on all of CIFAR-10.
Its VGGs have other widths than ours, its networks no norms: these pairs have no cells.
"""

Cell = tuple[float, float]

NETWORKS: dict[str, dict[str, dict[str, Cell]]] = {  # by pair, stage and method
    "mlp": {"one-shot": {"deeper": (96.95, 0.18), "shallower": (97.75, 0.04), "reference": (92.49, 2.64)}},  # Table 10
    "resnet": {  # Table 12; the ensemble: Table 14
        "one-shot": {
            "deeper": (93.31, 0.13),
            "shallower": (92.92, 0.20),
            "ensemble": (93.81, 0.21),
            "reference": (65.72, 2.33),
        },
        "+120 epochs": {"reference": (93.67, 0.07)},
    },
}

MAPS = {"cka": "[1, 2, 5]", "wasserstein": "[1, 2, 5]", "neurons": "[1, 2, 5]"}  # Table 9, with both constraints

WAYS = ("layers added", "merged, sum", "merged, average")

BALANCED: dict[str, dict[str, Cell]] = {  # Table 10, by map and way of balancing
    "[1, 2, 3]": {"layers added": (92.33, 2.35), "merged, sum": (93.90, 1.57), "merged, average": (91.84, 3.06)},
    "[1, 2, 4]": {"layers added": (92.48, 2.07), "merged, sum": (93.41, 1.56), "merged, average": (91.88, 1.62)},
    "[1, 2, 5]": {"layers added": (92.49, 2.64), "merged, sum": (94.00, 1.36), "merged, average": (92.37, 2.94)},
    "[1, 3, 4]": {"layers added": (90.69, 2.62), "merged, sum": (92.21, 1.86), "merged, average": (89.17, 0.98)},
    "[1, 3, 5]": {"layers added": (90.88, 2.61), "merged, sum": (93.04, 2.44), "merged, average": (89.57, 3.84)},
    "[1, 4, 5]": {"layers added": (90.98, 2.35), "merged, sum": (93.06, 2.07), "merged, average": (90.26, 2.84)},
    "[2, 3, 4]": {"layers added": (82.21, 1.79), "merged, sum": (51.26, 6.41), "merged, average": (55.62, 5.97)},
    "[2, 3, 5]": {"layers added": (83.14, 2.18), "merged, sum": (56.56, 5.87), "merged, average": (59.46, 5.73)},
    "[2, 4, 5]": {"layers added": (83.00, 2.01), "merged, sum": (54.16, 6.01), "merged, average": (58.62, 5.60)},
    "[3, 4, 5]": {"layers added": (79.49, 2.37), "merged, sum": (56.31, 4.79), "merged, average": (55.90, 3.02)},
}


def shown(cell: Cell | None) -> str:
    """As it stands in a table."""
    return f"{cell[0]:.1f} ± {cell[1]:.1f}" if cell else "-"
