"""The settings of a fusion."""

from dataclasses import dataclass, field, fields

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.balance import SIGNS
from fedloom.fusion.cla_ot.transport import TransportSettings

KINDS: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}
BASES = ("activations", "weights", "same")
STARTS = ("fused", "into")
REFITS = ("none", "plans", "regression", "selection")


@dataclass(frozen=True)
class FusionSettings:
    """The settings of `fuse`.

    Attributes:
        transport: How transport plans are computed.
        comparison: How layers are compared: "cka", "wasserstein" or "neurons".
        pin_first: Whether the first layers of every group of layers must correspond.
        pin_last: Whether the last layers of every group of layers must correspond.
        relu: What replaces the ReLU of a merged layer: "sum", "majority" or "average".
        basis: What plans are computed from: "activations" or "weights"; "same" matches channels by number.
        positions: Values of each channel that are used for the plans; 0: all.
        keep_added: Whether a layer that some networks lack is averaged over the others only.
        repair: Whether channel statistics are repaired after averaging (REPAIR).
        repair_samples: Probe samples that repair measures in one forward pass, which needs their memory; 0: all.
        sequential: One plan for each layer, each based on the plan before (the public code), instead of one for each
            axis.
        refit: What layers are fitted to, instead of repair. "selection": channels selected from all networks, without
            plans. "plans", "regression": the mean of all networks, written into the channels of `into`. "none": no
            refit.
        width: Channels of the result, relative to `into`. Only a selection takes a width other than 1.
        distillation: Steps of training on the networks' mean answer to the probe images, mirrored and shifted, at the
            end; 0: none. A few hundred help networks with BatchNorm, and take longer than all the rest. `Fused.agreement`
            is then measured on images that the result was trained on.
        distil_from: The network that this training starts from: the "fused" one, or `into` alone at the result's depth.
            `into` leaves out refit and repair.
        answers: What the last layer returns: logits of "classes", or "values", which are averaged.
        map: For two networks, the alignment to use instead of a comparison, as `optimal_alignment` returns it.
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
    distillation: int = 0
    distil_from: str = "fused"
    answers: str = "classes"
    map: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        takes = {"comparison": ("cka", "wasserstein", "neurons"), "relu": tuple(SIGNS), "basis": BASES,
                 "refit": REFITS, "distil_from": STARTS, "answers": ("classes", "values")}  # fmt: skip
        for name, values in takes.items():
            if getattr(self, name) not in values:
                raise UserError(f"fusion {name}: got '{getattr(self, name)}', takes one of: {', '.join(values)}")
        for setting in fields(self):
            kinds = KINDS.get(type(setting.default))
            if kinds and type(getattr(self, setting.name)) not in kinds:
                raise UserError(f"fusion {setting.name}: got {getattr(self, setting.name)!r}, takes {kinds[0].__name__}")
        if not isinstance(self.transport, TransportSettings):
            raise UserError(f"fusion transport: got {self.transport!r}, takes TransportSettings")
        for name in ("positions", "repair_samples", "distillation"):
            if getattr(self, name) < 0:
                meaning = "none" if name == "distillation" else "all"
                raise UserError(f"fusion {name}: got {getattr(self, name)}, takes a number, or 0 for {meaning}")
        if self.distillation and self.answers != "classes":
            raise UserError(f"fusion distillation: needs logits of classes, but answers is '{self.answers}'; leave one out")
        if self.distil_from == "into" and not (self.distillation and self.width == 1.0):
            got = f"got 'into' with distillation {self.distillation} and width {self.width:g}"
            raise UserError(f"fusion distil_from: {got}, takes 'into' with a distillation above 0 and width 1")
        if self.distil_from == "into" and self.refit in ("regression", "plans"):
            raise UserError(f"fusion refit: got '{self.refit}', has no effect with distil_from 'into'; leave one out")
        if not 0.0 < self.width < float("inf") or (self.width != 1.0 and self.refit != "selection"):
            raise UserError(f"fusion width: got {self.width:g} with refit '{self.refit}', takes a number above 0 with refit "
                            "'selection', else 1")  # fmt: skip
        if self.sequential and self.refit != "none":
            raise UserError(f"fusion refit: got '{self.refit}' with sequential plans, takes 'none' with these")

    def __repr__(self) -> str:
        names, usual = [each.name for each in fields(self)], FusionSettings()
        changed = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(usual, name)}
        return f"FusionSettings({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    @classmethod
    def reference(cls) -> "FusionSettings":
        """Return the settings of the public code of CLAFusion and OTFusion, its faults included."""
        euclidean = TransportSettings(ground="euclidean", normalisation="columns")
        return cls(transport=euclidean, positions=0, keep_added=False, repair=False, sequential=True, refit="none")
