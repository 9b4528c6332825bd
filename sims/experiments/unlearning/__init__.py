"""Ways to forget a site side by side, and what each leaves behind.

`ways`: on rotated_digits, at its size. The others: small federations of embedded digits (shadows), of which an attack that
is fitted to single images takes many.
"""

from fedloom.sims.experiments.study import Reproduction, any_override
from fedloom.sims.experiments.unlearning import methods, sequence, traces

TABLES = {"ways": methods.tables, "traces": traces.tables, "sequence": sequence.tables}
reproduce = Reproduction("Ways to remove a site", "runs/reproduce-unlearning", ("cpu",), TABLES, check=any_override)
