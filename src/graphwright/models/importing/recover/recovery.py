"""`recover`: the rules in their order, over one program."""

from __future__ import annotations

from graphwright.models.importing.recover.activations import recover_gelu
from graphwright.models.importing.recover.attention import recover_attention
from graphwright.models.importing.recover.means import recover_means
from graphwright.models.importing.recover.norms import recover_norms
from graphwright.models.importing.recover.products import recover_linear
from graphwright.models.importing.recover.regions import Regions
from graphwright.models.importing.recover.report import Recovered
from graphwright.models.importing.recover.rotary import recover_rope
from graphwright.models.importing.recover.routing import recover_routing
from graphwright.models.importing.recover.views import merge_views
from graphwright.program.program import Program

RULES = (merge_views, recover_attention, recover_norms, recover_rope, recover_linear, recover_gelu, recover_means,
         recover_routing)  # fmt: skip


def recover(program: Program) -> Recovered:
    """Replace regions of plain ops by the ops that they mean; no edit is recorded.

    A region is replaced only if it and its replacement agree on random values of what they read, at two sets of sizes,
    within some tens of roundings of their dtype. Where the program comes from does not matter.

    Returns: the ops that were recovered, and the regions that stayed plain ops.
    """
    regions = Regions(program)
    for rule in RULES:
        rule(regions)
    return regions.report
