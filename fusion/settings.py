"""The choices of a fusion."""

from dataclasses import dataclass, field, fields

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.balance import SIGNS
from fedloom.fusion.cla_ot.transport import TransportSettings

KINDS: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}
BASES = ("activations", "weights", "same")
REFITS = ("none", "plans", "regression", "selection")


@dataclass(frozen=True)
class FusionSettings:
    """How networks are fused.

    `comparison` of layers: "cka", "wasserstein" or "neurons"; `pin_first`, `pin_last`: the ends of every group of layers
    correspond. `relu`: what stands for the ReLU of a merged layer, "sum", "majority" or "average". `basis`: plans from
    "activations" or from "weights", or channels are the "same" by their numbers (the first, of more). `positions`: values of
    each channel that are kept for the plans (0: all). `keep_added`: a layer that some networks lack is the others' alone.
    `repair`: channel statistics after averaging (REPAIR), measured on at most `repair_samples` of the probe set, in one
    forward pass that takes its memory (0: all). `sequential`: one plan for each layer, each reading the one before (the
    public code), instead of one for each axis.
    `refit`: what the layers are fitted to afterwards, instead of repair: the mixture of all networks that the "plans" or a
    "regression" write into the channels of `into`, or a "selection" of all networks' channels, which no plan moves
    (fusion.refit.refit); or "none". `width`: channels of the result, in those of `into`; needs a selection, unless it is 1.
    `answers`: what the networks' last layer gives, logits of "classes", or "values" of which the mean is meant.
    `map`: instead of comparing layers, for two networks: the alignment as cla_ot.matching.optimal_alignment returns it.
    """

    transport: TransportSettings = field(default_factory=TransportSettings)
    comparison: str = "cka"
    pin_first: bool = True
    pin_last: bool = True
    relu: str = "sum"
    basis: str = "activations"
    positions: int = 4096
    keep_added: bool = True
    repair: bool = True
    repair_samples: int = 0
    sequential: bool = False
    refit: str = "selection"
    width: float = 1.0
    answers: str = "classes"
    map: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        takes = {"comparison": ("cka", "wasserstein", "neurons"), "relu": tuple(SIGNS), "basis": BASES,
                 "refit": REFITS, "answers": ("classes", "values")}  # fmt: skip
        for name, values in takes.items():
            if getattr(self, name) not in values:
                raise UserError(f"fusion {name}: got '{getattr(self, name)}', takes one of: {', '.join(values)}")
        for one in fields(self):
            kinds = KINDS.get(type(one.default))
            if kinds and type(getattr(self, one.name)) not in kinds:
                raise UserError(f"fusion {one.name}: got {getattr(self, one.name)!r}, takes {kinds[0].__name__}")
        if not isinstance(self.transport, TransportSettings):
            raise UserError(f"fusion transport: got {self.transport!r}, takes TransportSettings")
        for name in ("positions", "repair_samples"):
            if getattr(self, name) < 0:
                raise UserError(f"fusion {name}: got {getattr(self, name)}, takes a number, or 0 for all")
        if not 0.0 < self.width < float("inf") or (self.width != 1.0 and self.refit != "selection"):
            raise UserError(f"fusion width: got {self.width:g} with refit '{self.refit}', takes a number above 0 with refit "
                            "'selection', else 1")  # fmt: skip
        if self.sequential and self.refit != "none":
            raise UserError(f"fusion refit: got '{self.refit}' with sequential plans, takes 'none' with these")

    @classmethod
    def reference(cls) -> "FusionSettings":
        """What the public code of CLAFusion and OTFusion does, its faults included."""
        euclidean = TransportSettings(ground="euclidean", normalisation="columns")
        return cls(transport=euclidean, positions=0, keep_added=False, repair=False, sequential=True, refit="none")
