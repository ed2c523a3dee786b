"""Drop-ins: the peers' own signatures and documented meaning, computed by `attnx.attention`.

Code is ported by one import. Each module imports its framework, so none is imported by the core.
"""
