"""Data-parallel training that sends only the gradient entries that matter.

    state = SIDCoState(compressor="sidco-e", ratio=0.001)
    ddp_model.register_comm_hook(state, sidco_hook)

or both at once: ``state = attach(ddp_model, "sidco-e", ratio=0.001)``.
"""

from sidco_ddp.compressors import COMPRESSORS, make_compressor
from sidco_ddp.hook import attach, sidco_hook
from sidco_ddp.state import SIDCoState

__all__ = ["COMPRESSORS", "SIDCoState", "attach", "make_compressor", "sidco_hook"]
__version__ = "0.1.0"
