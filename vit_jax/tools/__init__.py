"""Tools around the core: plans, sweeps, machines, figures, preparation of data, exports.

The core (pre-training, fine-tuning, evaluation, prediction) imports none of them; the verbs of
`cli` do.
"""
