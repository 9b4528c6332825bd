"""Ways to remove a site, and the traces that each leaves.

The table `ways` uses rotated_digits. The others use many small federations of embedded digits, for attacks on single images.
"""

from fedloom.sims.experiments.study import Reproduction, any_override
from fedloom.sims.experiments.unlearning import methods, sequence, traces

TABLES = {"ways": methods.tables, "traces": traces.tables, "sequence": sequence.tables}
reproduce = Reproduction("Ways to remove a site", "runs/reproduce-unlearning", ("cpu",), TABLES, check=any_override)
