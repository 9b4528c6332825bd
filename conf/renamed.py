"""Names of earlier versions that users' methods may still have. Each is refused with a line that has the new name."""

from collections.abc import Mapping

from fedloom.conf.errors import UserError

NAMES = {
    "Catalogue": "PerClientSlot", "Expected": "RecordSpec", "Images": "Examples", "Reply": "ClientUpdate",
    "Residue": "ResidualInfluence", "Run": "RoundContext", "value": "option",
}  # fmt: skip
OF_SESSIONS = {"own": "local_state", "draw": "per_step_inputs", "training_images": "training_examples"}
OF_STRATEGIES = {
    "goes_with": "default_objective", "passes_on": "objective_defaults", "at_work": "resolve", "settle": "recompute_derived",
    "facts": "summary_entries", "advice": "warnings", "one_basis": "heads_share_basis", "first": "initial_contribution",
}  # fmt: skip
OF_AVERAGING = {
    "beside": "extra_broadcast", "told": "extra_records", "after": "next_state", "blank": "initial_memory",
}  # fmt: skip


def missing(module: str, name: str) -> Exception:
    """Return the error for a module's __getattr__ to raise: ImportError with the new name, else AttributeError."""
    if name in NAMES:
        return ImportError(f"'{name}' of {module} is now called '{NAMES[name]}'")
    return AttributeError(f"module '{module}' has no attribute '{name}'")


def refuse_renamed(made: type, names: Mapping[str, str]) -> None:
    """Raise UserError if the class defines an old name of `names` ({old: new}), which the project no longer calls."""
    if old := next((name for name in names if name in vars(made)), ""):
        raise UserError(f"{made.__module__}.{made.__name__}: '{old}' is now called '{names[old]}'; rename it")
